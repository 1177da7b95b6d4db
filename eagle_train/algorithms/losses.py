"""Losses on rows of logits. R rows, Vd the draft vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def soft_cross_entropy(q: Tensor, p: Tensor) -> Tensor:
    """−Σ_v p(v) log softmax(q)(v) per row: q [R, Vd] logits, p [R, Vd] probabilities (Σ p = 1, no gradient) → [R].

    In float32 or wider whatever q's dtype. Only q's own memory is kept for the backward, which is (softmax(q) − p)·g.
    """
    return _SoftCrossEntropy.apply(q, p)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, p: Tensor) -> Tensor:
        wide = q.to(p.dtype)
        lse = wide.logsumexp(-1)
        ctx.save_for_backward(q, p, lse)
        return lse - torch.linalg.vecdot(p, wide)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        q, p, lse = ctx.saved_tensors
        out = (q.to(p.dtype) - lse[:, None]).exp_().sub_(p).mul_(grads[0][:, None])
        return out.to(q.dtype), None
