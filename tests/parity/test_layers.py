"""The head's arithmetic, against three independent accounts of it, in float64.

- a step-by-step run with a serving cache: what the unroll trains is what an engine decodes;
- a brute-force head written here, with attention as a loop over the keys that a row may see;
- `transformers`: layers, norms and rotary embeddings of real families with the weights copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from eagle_inference.cache import DraftCache
from eagle_train.algorithms.unroll import Span, UnrollMemory, unroll
from eagle_train.data.pack import Pack
from eagle_train.draft.eagle3 import Eagle3Head
from eagle_train.draft.layers import FirstLayer, HeadConfig, PlainLayer, RMSNorm, Rotary, rotate
from eagle_train.targets.hf import Target
from tests.parity import tiny

DEPTHS = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "biases": {"qkv_bias": True},
    "qk_norm": {"qk_norm": True},
    "all": {
        "fc_norm": True, "norm_output": True, "norm_before_residual": True, "qkv_bias": True, "qk_norm": True,
    },
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16},
}  # fmt: skip


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@pytest.fixture(scope="module")
def pack(target: Target) -> Pack:
    drawn = ["uaaaaauuaaaa", "aaaau", "uuaaaaa"]
    return tiny.pack(target, [(tiny.tokens(len(d), seed), tiny.answers(d)) for seed, d in enumerate(drawn)])


@pytest.fixture(params=[(n, v) for n in (1, 2) for v in VARIANTS], ids=lambda p: f"{p[0]}-{p[1]}")
def head(request: pytest.FixtureRequest, target: Target) -> Eagle3Head:
    layers, variant = request.param
    return tiny.head(target, replace(tiny.head_config(target, 40), num_layers=layers, **VARIANTS[variant]))


@torch.no_grad()
def unrolled(head: Eagle3Head, pack: Pack) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """(row, depth) → the unroll's output and logits."""
    out = {}
    for depth in unroll(head, pack, DEPTHS, pack.runs()):
        logits = head.logits(depth.hidden)
        for place, row in enumerate(depth.rows.tolist()):
            out[row, depth.depth] = (depth.hidden[place], logits[place])
    rows = tiny.trained(pack.mask, pack.bounds, DEPTHS)
    assert set(out) == {(i, k) for k, found in enumerate(rows) for i in found} and rows[-1]
    return out


@torch.no_grad()
def test_unroll_is_step_by_step_decoding(head: Eagle3Head, pack: Pack) -> None:
    """A fresh cache for each row: rows up to i with true streams, then step after step on the row's own states."""
    found = unrolled(head, pack)
    for i in {row for row, _ in found}:
        start = next(a for a, b in pack.bounds if a <= i < b)
        cache = DraftCache(head.config.num_layers, capacity=i - start + DEPTHS)
        rows = slice(start, i + 1)
        emb = head.embed(pack.ids[start + 1 : i + 2])
        hidden = head.step(emb, head.project(pack.streams[rows]), pack.positions[rows], cache.attend)[-1:]
        cache.advance(i + 1 - start)
        for k in range(DEPTHS):
            if (i, k) in found:
                same(found[i, k][0], hidden[0])
                same(found[i, k][1], head.logits(hidden)[0])
            if i + 2 + k < len(pack.ids) and k + 1 < DEPTHS:
                position = torch.tensor([i - start + k + 1])
                hidden = head.step(head.embed(pack.ids[i + 2 + k, None]), head.feedback(hidden), position, cache.attend)
                cache.advance(1)


@torch.no_grad()
def test_unroll_is_the_brute_force_head(head: Eagle3Head, pack: Pack) -> None:
    theirs = Brute(head, pack)
    for (i, k), (hidden, logits) in unrolled(head, pack).items():
        same(hidden, theirs.state(i, k))
        same(logits, theirs.logits(i, k))


class Brute:
    """The head once more, one row at a time, from its tensors alone."""

    def __init__(self, head: Eagle3Head, pack: Pack) -> None:
        self.config, self.w, self.pack = head.config, head.state_dict(), pack
        self.table = head.embed(torch.arange(head.config.vocab_size))
        self.kept: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}  # (layer, row, depth) → rotated k, v
        self.states: dict[tuple[int, int], Tensor] = {}

    def start(self, i: int) -> int:
        return max(a for a, _ in self.pack.bounds if a <= i)

    def state(self, i: int, k: int) -> Tensor:
        """What the layers give for row i at depth k [H]."""
        if (i, k) not in self.states:
            if k == 0:
                for j in range(self.start(i), i):
                    self.state(j, 0)  # so that its keys are there
                given = self.project(self.pack.streams[i])
            else:
                given = self.state(i, k - 1)
                given = self.norm(given, "norm") if self.config.norm_output else given
            self.states[i, k] = self.layers(self.table[self.pack.ids[i + 1 + k]], given, i, k)
        return self.states[i, k]

    def logits(self, i: int, k: int) -> Tensor:
        return self.w["lm_head.weight"] @ self.norm(self.state(i, k), "norm")

    def project(self, streams: Tensor) -> Tensor:
        parts = list(streams.chunk(len(self.config.layer_ids)))
        if self.config.fc_norm:
            parts = [self.norm(part, f"fc_norm.{s}") for s, part in enumerate(parts)]
        return self.w["fc.weight"] @ torch.cat(parts)

    def layers(self, emb: Tensor, given: Tensor, i: int, k: int) -> Tensor:
        state = self.norm(given, "midlayer.hidden_norm")
        both = torch.cat([self.norm(emb, "midlayer.input_layernorm"), state])
        x = (state if self.config.norm_before_residual else given) + self.attention(both, "midlayer", 0, i, k)
        x = x + self.mlp(x, "midlayer")
        for n in range(1, self.config.num_layers):
            name = f"layers.{n - 1}"
            x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), name, n, i, k)
            x = x + self.mlp(x, name)
        return x

    def attention(self, x: Tensor, name: str, layer: int, i: int, k: int) -> Tensor:
        size, position = self.config.head_dim, i - self.start(i) + k
        q, key, value = (self.linear(x, f"{name}.self_attn.{p}_proj").view(-1, size) for p in "qkv")
        if self.config.qk_norm:
            q, key = self.norm(q, f"{name}.self_attn.q_norm"), self.norm(key, f"{name}.self_attn.k_norm")
        q, key = self.turn(q, position), self.turn(key, position)
        self.kept[layer, i, k] = (key, value)
        allowed = [(j, 0) for j in range(self.start(i), i + 1)] + [(i, depth) for depth in range(1, k + 1)]
        shared, heads = q.shape[0] // key.shape[0], []
        for h, query in enumerate(q):
            scores = [float(query @ self.kept[layer, j, d][0][h // shared]) / math.sqrt(size) for j, d in allowed]
            weights = [math.exp(s - max(scores)) for s in scores]
            parts = [w * self.kept[layer, j, d][1][h // shared] for w, (j, d) in zip(weights, allowed, strict=True)]
            heads.append(torch.stack(parts).sum(0) / sum(weights))
        return self.w[f"{name}.self_attn.o_proj.weight"] @ torch.cat(heads)

    def mlp(self, x: Tensor, name: str) -> Tensor:
        x = self.norm(x, f"{name}.post_attention_layernorm")
        gate = self.w[f"{name}.mlp.gate_proj.weight"] @ x
        return self.w[f"{name}.mlp.down_proj.weight"] @ (
            gate / (1 + torch.exp(-gate)) * (self.w[f"{name}.mlp.up_proj.weight"] @ x)
        )

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = self.w[f"{name}.weight"] @ x
        return out + self.w[f"{name}.bias"] if self.config.qkv_bias else out

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.w[f"{name}.weight"]

    def turn(self, x: Tensor, position: int) -> Tensor:
        """Pairs (d, d + D/2) turned by position · theta^(−2d/D); the angles are float32, as in every engine."""
        half = self.config.head_dim // 2
        theta = self.config.rope["rope_theta"]
        angle = position * (1.0 / theta ** (torch.arange(0, 2 * half, 2).float() / (2 * half)))
        cos, sin = angle.cos().double(), angle.sin().double()
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=1)


def in_family_shape(target: Target, **options: bool) -> HeadConfig:
    theirs = target.config
    size = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    return replace(tiny.head_config(target), head_dim=size, **options)


OPTIONS: dict[str, dict[str, bool]] = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
ATTENDS: dict[str, Callable[[int], Any]] = {
    "unroll": lambda n: UnrollMemory([Span(0, 0, n, 0)], [(0, n)], 1).attend,
    "cache": lambda n: DraftCache(1, n).attend,
}


@torch.no_grad()
@pytest.mark.parametrize("attend", ATTENDS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("first", [False, True], ids=["PlainLayer", "FirstLayer"])
def test_layers_are_the_familys(family: str, attend: str, first: bool) -> None:
    """Stream 3 → stream 4 of a target is its fourth layer; the first layer is one too when it ignores the embedding."""
    rope = {"unroll": "llama3", "cache": "yarn"}[attend]
    target = tiny.target(family, layer_ids=(3, 4), rope=ROPES[rope])
    theirs, config = target.layers[3].state_dict(), in_family_shape(target, **OPTIONS[family])
    ids = torch.tensor(tiny.tokens(20, seed=9))
    before, after = target.forward(ids).streams.chunk(2, dim=-1)
    cos, sin = Rotary(config)(torch.arange(20), before)
    assert (after - before).norm() > 0.3 * before.norm(), "the layer does too little to tell"
    keys = ATTENDS[attend](20)
    if not first:
        layer = PlainLayer(config, 0).double()
        layer.load_state_dict(theirs)
        same(layer(before, cos, sin, keys), after)
        return
    wide = FirstLayer(config).double()
    for name in ("q_proj", "k_proj", "v_proj"):
        full = f"self_attn.{name}.weight"
        theirs[full] = F.pad(theirs[full], (config.hidden_size, 0))
    theirs["hidden_norm.weight"] = theirs["input_layernorm.weight"]
    wide.load_state_dict(theirs)
    same(wide(torch.randn_like(before), before, cos, sin, keys), after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_is_llamas_to_the_bit(dtype: torch.dtype) -> None:
    ours, theirs = RMSNorm(24, 1e-5), LlamaRMSNorm(24, 1e-5)
    tiny.randomise(ours, seed=1)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(50, 24, generator=torch.Generator().manual_seed(2)).to(dtype) * 3
    assert torch.equal(ours.to(dtype)(x), theirs.to(dtype)(x))


def test_rms_norm_in_float64() -> None:
    ours, theirs = RMSNorm(24, 1e-5).double(), nn.RMSNorm(24, eps=1e-5, dtype=torch.float64)
    tiny.randomise(ours, seed=1)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(50, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rotary_is_the_targets(family: str, rope: str) -> None:
    """To the bit, also after the head was bfloat16 for a while, as one read from a bfloat16 file is."""
    target = tiny.target(family, rope=ROPES[rope])
    # As loaded: `.to(float64)` has not touched its frequencies.
    theirs = type(target.base.rotary_emb)(target.config)
    rotary = Rotary(in_family_shape(target))
    positions, like = torch.arange(tiny.CONTEXT), torch.zeros(1)
    cos, sin = theirs(like, positions[None])
    q, k = torch.randn(2, 1, 4, tiny.CONTEXT, cos.shape[-1], generator=torch.Generator().manual_seed(3))
    turned = apply_rotary_pos_emb(q, k, cos, sin)
    for kind in (torch.float32, torch.bfloat16, torch.float32, torch.float64):
        ours = rotary.to(kind)(positions, like)
        assert torch.equal(ours[0][:, 0], cos[0]) and torch.equal(ours[1][:, 0], sin[0]), kind
        for given, wanted in zip((q, k), turned, strict=True):
            assert torch.equal(rotate(given[0].transpose(0, 1), *ours), wanted[0].transpose(0, 1))


def test_ropes_differ() -> None:
    """Otherwise the tests above would not tell one scaling from another."""
    cosines = [
        Rotary(in_family_shape(tiny.target(rope=r)))(torch.arange(30), torch.zeros(1))[0] for r in ROPES.values()
    ]
    assert all(not torch.allclose(a, b) for n, a in enumerate(cosines) for b in cosines[:n])
