"""Tiny seeded models for tests: random targets of three families and random heads for them, in float64.

The targets are written with `transformers`' own classes. Their RMS norms compute in float32 whatever they are given,
which would hide anything below 1e-7, so they are replaced by PyTorch's own. The weights are far larger than a fresh
model's: attention then looks at more than an average, and greedy text wanders.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from eagle_train.algorithms.teacher import Teacher
from eagle_train.data.pack import Pack, layout
from eagle_train.draft.eagle import EagleConfig, EagleHead
from eagle_train.draft.eagle3 import Eagle3Head
from eagle_train.draft.head import DraftHead
from eagle_train.draft.layers import HeadConfig
from eagle_train.draft.vocab import DraftVocab
from eagle_train.targets.hf import Target

VOCAB, WIDTH, INNER, LAYERS, CONTEXT = 61, 32, 40, 8, 64
EPS = 1e-5
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
FAMILIES = tuple(CLASSES)


def model(
    family: str = "llama", *, layers: int = LAYERS, vocab: int = VOCAB, tied: bool = False, seed: int = 0,
    rope: dict[str, Any] | None = None, exact: bool = True,
) -> Any:  # fmt: skip
    """A random causal LM; `exact`: with norms that compute in float64."""
    kind, build = CLASSES[family]
    config = kind(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=EPS,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    made = build(config).to(torch.float64)
    if exact:
        _exact_norms(made)
    randomise(made, seed)
    return made.eval()


def target(
    family: str = "llama", *, layers: int = LAYERS, vocab: int = VOCAB, layer_ids: Sequence[int] | None = None,
    seed: int = 0, rope: dict[str, Any] | None = None,
) -> Target:  # fmt: skip
    """A random target without a tokenizer."""
    return Target(model(family, layers=layers, vocab=vocab, seed=seed, rope=rope), None, layer_ids, f"tiny {family}")


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Fill every parameter: matrices with spread 1.5 / √(inputs), norms around one, biases around zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(module.named_parameters()):
        if parameter.dim() == 2:
            spread = 1.0 if "embed" in name else 1.5 / parameter.shape[1] ** 0.5
            parameter.normal_(0, spread, generator=generator)
        else:
            parameter.uniform_(-0.5, 0.5, generator=generator)
            parameter += 1.0 if name.endswith("weight") else 0.0


def _exact_norms(made: nn.Module) -> None:
    for parent in list(made.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                exact = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=torch.float64)  # type: ignore[arg-type, union-attr]
                setattr(parent, name, exact)


def head_config(target: Target, draft_vocab: int | None = None) -> HeadConfig:
    """A head's configuration for `target`, its head size not the usual quotient; vary it with `dataclasses.replace`."""
    return HeadConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=draft_vocab or target.config.vocab_size,
        target_hidden_size=WIDTH,
        layer_ids=target.layer_ids,
        rms_norm_eps=EPS,
        max_position_embeddings=CONTEXT,
        rope=dict(target.config.rope_parameters),
    )


def head(target: Target, config: HeadConfig, *, ids: Sequence[int] | None = None, seed: int = 100) -> Eagle3Head:
    """A random head with the target's embedding; `ids`: its draft vocabulary (default: random)."""
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    if ids is None:
        ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:size].tolist()
    made = Eagle3Head(config, DraftVocab.of(ids, vocab_size)).to(torch.float64)
    randomise(made, seed)
    made.attach(target)
    return made


def eagle_head(target: Target, *, seed: int = 100, num_layers: int = 1, qkv_bias: bool = False) -> EagleHead:
    """A random EAGLE-1 head with the target's tables."""
    config = EagleConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        vocab_size=target.config.vocab_size,
        rms_norm_eps=EPS,
        max_position_embeddings=CONTEXT,
        rope=dict(target.config.rope_parameters),
        num_layers=num_layers,
        qkv_bias=qkv_bias,
    )
    made = EagleHead(config).to(torch.float64)
    randomise(made, seed)
    made.attach(target)
    return made


def teacher(target: Target, head: DraftHead) -> Teacher:
    """The target's head as the losses read it."""
    return Teacher(target.head, head.vocab.ids, target.head_weight[head.vocab.ids])


def tokens(count: int, seed: int, vocab: int = VOCAB) -> list[int]:
    """Random token ids."""
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def pack(
    target: Target, documents: Sequence[tuple[Sequence[int], Sequence[bool]]], teacher: Teacher | None = None
) -> Pack:
    """(ids, mask) of each document → a pack with the target's true features; `top` as `teacher` has it, or whole."""
    positions, document, bounds = layout([len(ids) for ids, _ in documents])
    features = [target.forward(torch.tensor(ids)) for ids, _ in documents]
    last = torch.cat([f.last for f in features])
    return Pack(
        ids=torch.tensor([i for ids, _ in documents for i in ids]),
        positions=positions,
        document=document,
        mask=torch.tensor([m for _, mask in documents for m in mask]),
        bounds=bounds,
        streams=torch.cat([f.streams for f in features]),
        last=last,
        top=teacher.whole(last)[0] if teacher is not None else target.head(last).argmax(-1),
        lse=target.head(last).logsumexp(-1),
    )


def answers(text: str) -> list[bool]:
    """A mask as drawn: `a` where the assistant wrote the token."""
    return [letter == "a" for letter in text]


def trained(mask: Tensor, bounds: Sequence[tuple[int, int]], depths: int) -> list[set[int]]:
    """Per depth k the rows i with x_{i+1} … x_{i+2+k} all inside one document and all masked, by the definition."""
    return [
        {i for a, b in bounds for i in range(a, b) if i + 2 + k < b and all(mask[i + 1 : i + 3 + k])}
        for k in range(depths)
    ]


def tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """Words t0 … for a target that is written to disk."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="t1", unk_token="t0")


def handset() -> ModuleType:
    """scripts/handset.py: a target and a head whose acceptance is K + 1 by construction."""
    name = "handset"
    if name not in sys.modules:
        path = Path(__file__).resolve().parents[2] / "scripts" / "handset.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
