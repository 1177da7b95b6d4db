"""The draft's transformer layer: Llama-shaped, without a batch dimension and without an opinion about its keys.

Shapes: N rows (any rows: one step of one request, or all rows of a pack), H draft width, Q query heads, G key/value
heads, D head size, I inner size. Attention is a callable handed in (`Attend`), because where a row's keys live is what
differs between the training unroll and a serving cache; everything else is the same code in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

# (layer index, q [N, Q, D], k [N, G, D], v [N, G, D]) → [N, Q, D]; q and k are already rotated.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class LayerShape(Protocol):
    """What the layers ask of a head's configuration, `HeadConfig` or another kind's."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def rope(self) -> dict[str, Any]: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...


@dataclass(frozen=True)
class HeadConfig:
    """Everything that fixes an EAGLE-3 head's tensors and its arithmetic.

    Widths in elements; `layer_ids` in this project's numbering (id k = the residual stream after k decoder layers);
    `rope` and `max_position_embeddings` are the target's, as `transformers` writes them (`rope_parameters`).
    `norm_output`: what is fed back is the state after `norm` (vLLM's meaning), else the state before it.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    num_layers: int = 1
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class RMSNorm(nn.Module):
    """x · weight / rms(x), the rms in at least float32 (as Llama's).

    Under autocast the result comes in autocast's dtype: the projections that read it need not convert it one by one.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        out: Tensor = _Normed.apply(x, self.weight, self.eps, dtype)
        return out


class _Normed(torch.autograd.Function):
    """Keeps x and one number per row for the backward, where autograd would keep four copies of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        by = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, by)
        return ((wide * by).to(x.dtype) * weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, by = ctx.saved_tensors
        grad, normed = grads[0].to(by.dtype), x * by
        for_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight
        share = torch.linalg.vecdot(grad, normed)[..., None] / x.shape[-1]
        return (grad.sub_(normed.mul_(share)).mul_(by)).to(x.dtype), for_weight, None, None


class Rotary(nn.Module):
    """Cosines and sines by `transformers`, so that every rope scaling a target may have is the target's own."""

    def __init__(self, config: LayerShape) -> None:
        super().__init__()
        self.llama = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope),
        )
        self.inner = LlamaRotaryEmbedding(self.llama)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        """Moves with the head, but keeps float32 frequencies: rounded once to bfloat16 they would never come back."""
        super()._apply(fn, recurse)
        self.inner = LlamaRotaryEmbedding(self.llama).to(self.inner.inv_freq.device)
        return self

    def forward(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """positions [N] → (cos, sin), each [N, 1, D] in `like`'s dtype."""
        cos, sin = self.inner(like, positions[None])
        return cos[0, :, None], sin[0, :, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, D] turned by its position; halves are paired, as in Hugging Face's Llama."""
    a, b = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-b, a), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Projections around the attention that the caller brings."""

    def __init__(self, config: LayerShape, index: int, input_size: int) -> None:
        super().__init__()
        self.index, self.head_dim = index, config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(input_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(input_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """x [N, input] → [N, H]; with `rows` [R], places in x: keys of all N, queries and output of those alone."""
        asking, at = (x, (cos, sin)) if rows is None else (x[rows], (cos[rows], sin[rows]))
        q = self.q_norm(self.q_proj(asking).unflatten(-1, (-1, self.head_dim)))
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        out = attend(self.index, rotate(q, *at), rotate(k, cos, sin), v)
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FirstLayer(nn.Module):
    """EAGLE-3's first layer: attends on [norm(embedding), norm(state)] (2H wide); the residual is the state."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 0, 2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, emb: Tensor, state: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        normed = self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        both = torch.cat((self.input_layernorm(emb), normed), dim=-1)
        x = _of(residual, rows) + self.self_attn(both, cos, sin, attend, rows)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainLayer(nn.Module):
    """An ordinary pre-norm Llama layer; without `input_norm` its attention reads the residual as it is."""

    def __init__(self, config: LayerShape, index: int, *, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps) if input_norm else nn.Identity()
        self.self_attn = Attention(config, index, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        x = _of(x, rows) + self.self_attn(self.input_layernorm(x), cos, sin, attend, rows)
        return x + self.mlp(self.post_attention_layernorm(x))


def _of(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x[rows]
