"""Head, softmax and loss of all depths in one pass over the teacher's positions, the gradient formed in the forward.

For a slice of teacher positions the target's logits are made once; the rows of every depth that meet one of them are
run through the draft's lm_head together (one large product instead of one per depth), their logits are overwritten by
their gradient, and that is multiplied back at once. So no logits outlive their slice, and lm_head has one gradient for
all depths. Memory: one slice of logits, whatever the length of the pack and the number of depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle_train.algorithms.losses import Given, Loss, acceptance
from eagle_train.algorithms.teacher import Teacher
from eagle_train.data.pack import Pack
from eagle_train.device.shapes import pad_rows

SLICE_ELEMENTS = 1 << 25  # logits held at once
SLICE_ROWS = 1024


@dataclass
class Figures:
    """Per row of one depth: correct [R] bool, accept [R] = p(argmax Q), alpha [R]; empty unless asked for."""

    correct: list[Tensor] = field(default_factory=list)
    accept: list[Tensor] = field(default_factory=list)
    alpha: list[Tensor] = field(default_factory=list)


@dataclass
class Job:
    """One pack's rows at each depth, and what comes out beside the loss.

    places: per depth, the teacher position of each row [R_k], ascending; weights [R_k]: what its loss is multiplied
    with. Filled: losses (the weighted sum per depth) and figures.
    """

    pack: Pack
    teacher: Teacher
    loss: Loss
    places: list[Tensor]
    weights: list[Tensor]
    detailed: bool
    losses: list[Tensor] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)


def fused_loss(job: Job, lm_head: Tensor, hidden: Sequence[Tensor]) -> Tensor:
    """lm_head [Vd, H], hidden per depth [R_k, H] (after the final norm) → the sum of all weighted losses, a scalar."""
    out: Tensor = _Fused.apply(job, torch.is_grad_enabled(), lm_head, *hidden)
    return out


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: Job, learn: bool, lm_head: Tensor, *hidden: Tensor) -> Tensor:
        with torch.autocast(lm_head.device.type, enabled=False):
            weight = lm_head.to(hidden[0].dtype)
            wide = torch.promote_types(weight.dtype, torch.float32)
            for_head = torch.zeros_like(lm_head, dtype=wide) if learn and ctx.needs_input_grad[2] else None
            for_rows = [torch.zeros_like(x) for x in hidden] if learn else []
            sums = [weight.new_zeros((), dtype=wide) for _ in hidden]
            job.figures = [Figures() for _ in hidden]
            for part in _slices(job, lm_head.shape[0]):
                _one_slice(job, part, weight, hidden, for_head, for_rows, sums)
            job.losses = sums
        ctx.learn, ctx.for_head, ctx.dtype = learn, for_head, lm_head.dtype
        ctx.save_for_backward(*for_rows)
        return torch.stack(sums).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.learn, "the loss was computed without gradients, or its backward ran before"
        by = grads[0]
        for_head = None if ctx.for_head is None else ctx.for_head.mul_(by).to(ctx.dtype)
        ctx.learn, ctx.for_head = False, None  # lm_head's buffer is given away: a second backward would lack it
        # `by` stays float32: rounded to bfloat16 first, 1/3 would scale these rows by 0.2 % more than lm_head.
        return None, None, for_head, *[x * by for x in ctx.saved_tensors]


def _slices(job: Job, vocabulary: int) -> list[tuple[Tensor, list[slice]]]:
    """Runs of teacher positions, and each depth's rows that meet them."""
    depths = len(job.places)
    places = torch.unique(torch.cat(job.places))
    size = max(min(SLICE_ROWS, SLICE_ELEMENTS // vocabulary) // depths, 16)
    parts = places.split(size)
    edges = torch.stack([p[-1] for p in parts])
    ends = [torch.searchsorted(rows, edges, right=True).tolist() for rows in job.places]
    return [(part, [slice(stops[n - 1] if n else 0, stops[n]) for stops in ends]) for n, part in enumerate(parts)]


def _one_slice(
    job: Job,
    part: tuple[Tensor, list[slice]],
    weight: Tensor,
    hidden: Sequence[Tensor],
    for_head: Tensor | None,
    for_rows: list[Tensor],
    sums: list[Tensor],
) -> None:
    places, slices = part
    x = pad_rows(torch.cat([h[s] for h, s in zip(hidden, slices, strict=True)]))
    logits = x @ weight.mT
    given = job.teacher.draft_logits(job.pack.last[places])
    mass = None
    if job.detailed or job.loss.needs_mass:
        mass = (given.logsumexp(-1) - job.pack.lse[places].to(given.dtype)).exp()
    whole = Given(given.softmax(-1), mass, job.teacher.columns(job.pack.top[places]))
    start, scales = 0, x.new_zeros(len(x), 1, dtype=whole.p.dtype)
    for k, rows in enumerate(slices):
        count = rows.stop - rows.start
        if not count:
            continue
        mine = whole.at(torch.searchsorted(places, job.places[k][rows]))
        q = logits[start : start + count]
        if job.detailed:
            _figures(job.figures[k], q, mine)
        loss, grad, counts = job.loss.rows(q, mine)
        weights = job.weights[k][rows].to(loss.dtype)
        sums[k] += loss @ weights
        if for_rows:
            q.copy_(grad)
            scales[start : start + count, 0] = weights * counts
        start += count
    if not for_rows:
        return
    # A row's weight scales its gradient: cheaper on H than on Vd numbers.
    back = ((logits @ weight) * scales)[:start].split([rows.stop - rows.start for rows in slices])
    for into, rows, part_of in zip(for_rows, slices, back, strict=True):
        into[rows] = part_of
    if for_head is not None:
        for_head += logits.mT @ (x * scales).to(x.dtype)


def _figures(into: Figures, q: Tensor, given: Given) -> None:
    choice = q.argmax(-1)
    assert given.mass is not None, "figures need the full vocabulary's log-sum-exp"
    into.correct.append(choice == given.best)
    into.accept.append(given.p.gather(1, choice[:, None])[:, 0] * given.mass)
    # Widened first: torch's softmax with a dtype of its own is several times slower on a CPU.
    into.alpha.append(acceptance(given, q.to(given.p.dtype).softmax(-1)))
