"""The hand-set chain is what it claims to be, before any engine of ours or of others is asked about it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def _load() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "scripts" / "handset.py"
    spec = importlib.util.spec_from_file_location("handset", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["handset"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


handset = _load()


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(target, head, broken)."""
    out = tmp_path_factory.mktemp("chain")
    target, head = handset.write_chain(out)
    _, broken = handset.write_chain(out, broken=True)
    return target, head, broken


def test_cycle_visits_every_token_once() -> None:
    following = handset.cycle().following()
    start = token = next(iter(following))
    seen = []
    while True:
        seen.append(token)
        token = following[token]
        if token == start:
            break
    assert len(seen) == 3 * 4 * 5 * 7 == len(set(seen))
    assert sorted(seen) != list(range(min(seen), min(seen) + 420)), "the ids have no gaps"


def test_target_continues_along_the_cycle(chain: tuple[Path, Path, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(chain[0], dtype=torch.float32)
    following = handset.cycle().following()
    for prompt in handset.prompts(3):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()
        assert out[: len(prompt)] == prompt
        made = out[len(prompt) - 1 :]
        assert len(made) == 25, "stopped early"
        assert made[1:] == [following[t] for t in made[:-1]]


def test_every_token_is_followed_by_a_wide_margin(chain: tuple[Path, Path, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(chain[0], dtype=torch.float32)
    c = handset.cycle()
    with torch.no_grad():
        logits = model(c.ids[:, None]).logits[:, 0]
    best = logits.topk(2)
    assert torch.equal(best.indices[:, 0], c.ids.roll(-1))
    assert float((best.values[:, 0] - best.values[:, 1]).min()) > 3.0


def test_streams_differ_by_one_tooth(chain: tuple[Path, Path, Path]) -> None:
    """A reader of the wrong stream must see wrong wheels; that is what makes the acceptance a proof."""
    model = AutoModelForCausalLM.from_pretrained(chain[0], dtype=torch.float32)
    c = handset.cycle()
    caught: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _m, _a, out: caught.append((out[0] if isinstance(out, tuple) else out)[:, 0])
        )
    with torch.no_grad():
        model(c.ids[:, None])
    for k, stream in enumerate(caught, start=1):
        for wheel, teeth in enumerate(handset.TEETH):
            part = stream[:, handset.START[wheel] : handset.START[wheel + 1]]
            turned = (c.teeth[:, wheel] + (k if wheel < 3 else 0)) % teeth
            expected = torch.nn.functional.one_hot(turned, teeth).float()
            torch.testing.assert_close(part, expected, rtol=0, atol=2e-4)


def test_head_follows_the_plain_form(chain: tuple[Path, Path, Path]) -> None:
    config = json.loads((chain[1] / "config.json").read_text())
    tensors = load_file(chain[1] / "model.safetensors")
    h, size = config["hidden_size"], config["head_dim"]
    q, kv, inner, vd = (
        size * config["num_attention_heads"],
        size * config["num_key_value_heads"],
        config["intermediate_size"],
        config["draft_vocab_size"],
    )
    expected = {
        "fc.weight": (h, 3 * h),
        "norm.weight": (h,),
        "lm_head.weight": (vd, h),
        "d2t": (vd,),
        "t2d": (config["vocab_size"],),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (inner, h),
        "midlayer.mlp.up_proj.weight": (inner, h),
        "midlayer.mlp.down_proj.weight": (h, inner),
    }
    assert {name: tuple(value.shape) for name, value in tensors.items()} == expected
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert size == 32, "vLLM's CPU kernels take 32, 64, …"
    assert {v.dtype for k, v in tensors.items() if k not in ("d2t", "t2d")} == {torch.float32}


def test_vocabulary_maps(chain: tuple[Path, Path, Path]) -> None:
    tensors = load_file(chain[1] / "model.safetensors")
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
    ids = torch.arange(len(d2t)) + d2t
    assert bool((ids.diff() > 0).all()) and int(ids[-1]) < len(t2d)
    assert torch.equal(ids, t2d.nonzero()[:, 0])
    assert torch.equal(ids, handset.cycle().ids.sort().values)
    assert len(d2t.unique()) > 10, "one constant offset would not tell an offset from a shift"


def test_broken_differs_in_d2t_alone(chain: tuple[Path, Path, Path]) -> None:
    good, bad = (load_file(folder / "model.safetensors") for folder in chain[1:])
    differing = [name for name in good if not torch.equal(good[name], bad[name])]
    assert good.keys() == bad.keys() and differing == ["d2t"]
    assert not bad["d2t"].any()
    assert bool((good["d2t"] != 0).all()), "with a zero offset a token is still right when d2t is zeroed"
