"""Weights set by hand, whose acceptance is known before any run: K + 1 exactly, or 1 exactly when broken on purpose.

    python scripts/handset.py OUT      writes OUT/target, OUT/head, OUT/broken, OUT/prompts.json

A token is a reading of four wheels with 3, 4, 5 and 7 teeth. The next token has every wheel one tooth further, so the
420 readings form one cycle. The target's greedy continuation is that cycle. Each of its four layers turns the first
three wheels by a tooth, so no stream equals its neighbours, and the ids are shuffled and have gaps.

The head must get each wheel from the one place where it can be read:

- wheels 0, 1, 2: from the streams after layers 1, 2, 3, in this order (`fc`);
- wheel 3: from the embedding of the token that follows, through attention to the row's own position;
- the target's id: through `d2t`.

A wrong layer id, stream order, embedding half, shift, feedback state or vocabulary map each gives a wrong wheel, and
one wrong wheel is a wrong token. Engines that pass therefore read all of them as the exporter writes them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEETH = (3, 4, 5, 7)
START = tuple(accumulate((0, *TEETH)))  # wheel w owns dimensions START[w] … START[w + 1] − 1
SPARE = START[4]  # where attention puts wheel 3 before the MLP swaps it in
HIDDEN, LAYERS, INTERMEDIATE = 64, 4, 64
Q_HEADS, KV_HEADS, HEAD_DIM = 2, 1, 32  # the smallest head size that vLLM's CPU kernels take
VOCAB, FIRST, UNUSED = 512, 3, 40  # ids below FIRST are special; FIRST … UNUSED − 1 and some others are never used
EPS, THETA, CONTEXT = 1e-6, 10000.0, 512
LAYER_IDS = (1, 2, 3)
SEED = 20261130


@dataclass(frozen=True)
class Cycle:
    """`ids` [420]: the target's tokens in the order in which they follow each other; `teeth` [420, 4]: their wheels."""

    ids: Tensor
    teeth: Tensor

    def following(self) -> dict[int, int]:
        """Each token of the cycle → the token that must come next."""
        return dict(zip(self.ids.tolist(), self.ids.roll(-1).tolist(), strict=True))


def cycle() -> Cycle:
    """The one cycle that everything here is built on."""
    steps = torch.arange(420)
    shuffled = torch.randperm(VOCAB - UNUSED, generator=torch.Generator().manual_seed(SEED)) + UNUSED
    return Cycle(shuffled[:420], torch.stack([steps % n for n in TEETH], dim=1))


def write_chain(out: Path, broken: bool = False) -> tuple[Path, Path]:
    """Write `out/target` and `out/head` (with `broken`: `out/broken`, its d2t zeroed); returns both folders.

    A target that is there already is overwritten with the same bytes.
    """
    target, head = out / "target", out / ("broken" if broken else "head")
    _write_target(target)
    head.mkdir(parents=True, exist_ok=True)
    tensors = head_tensors()
    if broken:
        tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    (head / "config.json").write_text(json.dumps(head_config(), indent=2) + "\n")
    return target, head


def prompts(count: int = 8) -> list[list[int]]:
    """Prompts of 1 … `count` tokens; all but the last token are arbitrary, for only the last one decides."""
    ids, generator = cycle().ids, torch.Generator().manual_seed(SEED + 1)
    return [ids[torch.randint(len(ids), (n,), generator=generator)].tolist() for n in range(1, count + 1)]


def target_model() -> LlamaForCausalLM:
    """The target: no attention, and an MLP in each layer that turns wheels 0, 1 and 2 by one tooth."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=Q_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    mlp = _mlp(wheels_in=4)
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    state["model.embed_tokens.weight"] = _codes(turned=(0, 0, 0, 0))
    # The head undoes the four turns and adds one, on wheel 3 it adds one: the row of token j is the code it is hit by.
    state["lm_head.weight"] = _codes(turned=(LAYERS - 1,) * 3 + (-1,))
    for name in state:
        if name.endswith(("layernorm.weight", "norm.weight")):
            state[name] = torch.ones(HIDDEN)
        elif ".mlp." in name:
            state[name] = mlp[name.split(".mlp.")[1]].clone()
    model.load_state_dict(state)
    return model.eval()


def head_config() -> dict[str, object]:
    """`config.json` of the head, in the plain form."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": Q_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "draft_vocab_size": len(_draft_ids()),
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
        "rope_theta": THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "eagle_aux_hidden_state_layer_ids": list(LAYER_IDS),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    }


def head_tensors() -> dict[str, Tensor]:
    """Every tensor of the head under its name on disk."""
    ids, ones = _draft_ids(), torch.ones(HIDDEN)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    tensors = {
        "fc.weight": _fc(),
        "norm.weight": ones,
        "lm_head.weight": _codes(turned=(-1, -1, -1, -1))[ids],
        "d2t": ids - torch.arange(len(ids)),
        "t2d": t2d,
    }
    tensors |= {f"midlayer.self_attn.{name}": value for name, value in _attention().items()}
    tensors |= {f"midlayer.mlp.{name}": value for name, value in _mlp(wheels_in=5).items()}
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"midlayer.{norm}.weight"] = ones.clone()
    return {name: value.contiguous() for name, value in tensors.items()}


def _draft_ids() -> Tensor:
    """The target ids that the head can draft, ascending: the cycle's. None equals its own rank, as id 3 would."""
    ids = cycle().ids.sort().values
    assert bool((ids != torch.arange(len(ids))).all()), "a zeroed d2t would still hit some tokens"
    return ids


def _codes(turned: tuple[int, ...]) -> Tensor:
    """[VOCAB, HIDDEN]: a one per wheel at the token's tooth, each wheel turned by `turned`; unused ids are zero."""
    table, c = torch.zeros(VOCAB, HIDDEN), cycle()
    for w, n in enumerate(TEETH):
        table[c.ids, START[w] + (c.teeth[:, w] + turned[w]) % n] = 1.0
    return table


def _turn(wheel: int, by: int) -> Tensor:
    """[HIDDEN, HIDDEN]: moves the ones of `wheel` by `by` teeth and drops everything else."""
    matrix, tooth = torch.zeros(HIDDEN, HIDDEN), torch.arange(TEETH[wheel])
    matrix[START[wheel] + (tooth + by) % TEETH[wheel], START[wheel] + tooth] = 1.0
    return matrix


def _fc() -> Tensor:
    """[HIDDEN, 3·HIDDEN]: wheel w from stream w, turned back by the layers it went through; wheel 3 from the last."""
    parts = [_turn(w, -LAYER_IDS[w]) for w in range(3)]
    parts[2] = parts[2] + _turn(3, 0)
    return torch.cat(parts, dim=1)


def _mlp(wheels_in: int) -> dict[str, Tensor]:
    """A gated MLP that turns wheels 0, 1, 2 by a tooth; with five wheels coming in, the spare one replaces wheel 3.

    Its input is normed: each of the `wheels_in` ones among HIDDEN values stands at sqrt(HIDDEN / wheels_in), and
    silu(x)·x of that is divided away again, so what is added to the residual stream is exact up to rounding.
    """
    height = torch.tensor((HIDDEN / wheels_in) ** 0.5)
    move = torch.zeros(HIDDEN, HIDDEN)
    for wheel in range(3):
        move += _turn(wheel, 1) - _turn(wheel, 0)
    if wheels_in == 5:
        spare, wheel3 = SPARE + torch.arange(TEETH[3]), START[3] + torch.arange(TEETH[3])
        move[wheel3, spare] = 1.0
        move[wheel3, wheel3] = -1.0
        move[spare, spare] = -1.0
    gate = torch.eye(INTERMEDIATE, HIDDEN)
    down = move / (F.silu(height) * height)
    return {"gate_proj.weight": gate, "up_proj.weight": gate.clone(), "down_proj.weight": down}


def _attention() -> dict[str, Tensor]:
    """q, k, v [·, 2·HIDDEN] and o: the row's own embedding's wheel 3 → the spare dimensions.

    Wheel 3 is its own key: rows with the same tooth score about 45 above the others, and they hold the same value, so
    the softmax is a choice. It uses the lower half of the head only: rotary then never mixes two teeth.
    """
    height = (HIDDEN / 4) ** 0.5
    tooth, embedded = torch.arange(TEETH[3]), START[3] + torch.arange(TEETH[3])  # the embedding is the first half
    q = torch.zeros(Q_HEADS, HEAD_DIM, 2 * HIDDEN)
    k, v = torch.zeros(HEAD_DIM, 2 * HIDDEN), torch.zeros(HEAD_DIM, 2 * HIDDEN)
    q[:, tooth, embedded] = 4.0
    k[tooth, embedded] = 4.0
    v[tooth, embedded] = 1.0 / height
    o = torch.zeros(HIDDEN, Q_HEADS, HEAD_DIM)
    o[SPARE + tooth, :, tooth] = 1.0 / Q_HEADS
    return {
        "q_proj.weight": q.flatten(0, 1),
        "k_proj.weight": k,
        "v_proj.weight": v,
        "o_proj.weight": o.flatten(1),
    }


def _write_target(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    target_model().save_pretrained(folder)
    words = {"<s>": 0, "</s>": 1, "<pad>": 2} | {f"t{i}": i for i in range(FIRST, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<pad>",
        model_max_length=CONTEXT,
    ).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    write_chain(given.out)
    write_chain(given.out, broken=True)
    (given.out / "prompts.json").write_text(json.dumps(prompts()) + "\n")
    print(f"wrote {given.out}/target, head, broken and prompts.json")
