"""Attention with its log-sum-exp, and its backward, per device: what the unroll's merged attention is made of.

Shapes: q [1, Q, R, D], k and v [1, G, S, D], G dividing Q; log-sum-exp [1, Q, R] in at least float32. `causal` needs
R = S. The backward is given the *merged* output and log-sum-exp (see `algorithms/unroll.py`): a flash kernel's backward
rebuilds its probabilities as exp(score − log-sum-exp), so those of its own keys come out as their share of the merged
softmax (the identity that ring attention rests on).

The CPU takes torch's flash kernel (grouped heads as they are), but for the bfloat16 backward: there `blocked_backward`
is twice as fast. The CUDA kernel (float16 and bfloat16) has never been run on a GPU by this project. Everything else
takes the blocked version, a few rows' scores at a time, which is also what the kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

aten = torch.ops.aten
BLOCK_SCORES = 1 << 17  # per head, held at once by the blocked version


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """→ (output [1, Q, R, D], log-sum-exp [1, Q, R])."""
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    if _has_cuda_kernel(q):
        k, v = _repeated(k, q), _repeated(v, q)
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
        return out, lse
    return blocked(q, k, v, causal, scale)


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """grad [1, Q, R, D], that of the merged output; `out` and `lse` merged → the gradients of q, k and v."""
    if q.device.type == "cpu" and q.dtype != torch.bfloat16:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        gq, gk, gv = kernel(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
        return gq, gk, gv
    if _has_cuda_kernel(q):
        groups, none = k.shape[1], torch.empty(0, dtype=torch.int64, device=q.device)
        k, v = _repeated(k, q), _repeated(v, q)
        gq, gk, gv = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, none, none, q.shape[2], k.shape[2], 0.0, causal, none, none, scale=scale
        )
        return gq, _summed(gk, groups), _summed(gv, groups)
    return blocked_backward(grad, q, k, v, out, lse, causal, scale)


def blocked(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The same in plain operations, a block of rows at a time; scores in at least float32."""
    k, v = _repeated(k, q), _repeated(v, q)
    outs, sums = [], []
    for rows, keys in _blocks(q, k, causal):
        scores = _scores(q[:, :, rows], k[:, :, keys], causal, scale)
        lse = scores.logsumexp(-1)
        outs.append((scores - lse[..., None]).exp_().to(q.dtype) @ v[:, :, keys])
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def blocked_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of `blocked`, with a log-sum-exp that may count further keys."""
    groups, k, v = k.shape[1], _repeated(k, q), _repeated(v, q)
    delta = (grad.to(lse.dtype) * out).sum(-1, keepdim=True)
    gq, gk, gv = torch.empty_like(q), torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    for rows, keys in _blocks(q, k, causal):
        mine, my_grad = q[:, :, rows], grad[:, :, rows]
        probs = _scores(mine, k[:, :, keys], causal, scale).sub_(lse[:, :, rows, None]).exp_()
        ds = (my_grad @ v[:, :, keys].mT).to(lse.dtype).sub_(delta[:, :, rows]).mul_(probs).mul_(scale).to(q.dtype)
        gq[:, :, rows] = ds @ k[:, :, keys]
        gk[:, :, keys] += ds.mT @ mine
        gv[:, :, keys] += probs.to(q.dtype).mT @ my_grad
    return gq, _summed(gk, groups).to(k.dtype), _summed(gv, groups).to(v.dtype)


def _blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Blocks of rows, and the keys that any row of the block sees."""
    rows, keys = q.shape[2], k.shape[2]
    assert rows == keys or not causal, f"causal attention of {rows} rows over {keys} keys"
    size = max(BLOCK_SCORES // keys, 32)
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        yield slice(start, stop), slice(0, stop if causal else keys)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Of a block of rows; if causal, its last row stands at the last key."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).mT).mul_(scale)
    if causal:
        rows, keys = scores.shape[-2:]
        ahead = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu_(1)
        scores[..., keys - rows :].masked_fill_(ahead, -torch.inf)
    return scores


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _summed(x: Tensor, groups: int) -> Tensor:
    """The gradient of `_repeated`: [1, Q, S, D] → [1, G, S, D]."""
    return x.unflatten(1, (groups, -1)).sum(2)


def _has_cuda_kernel(q: Tensor) -> bool:
    return q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16)
