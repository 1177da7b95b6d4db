"""EAGLE-3's training-time test: the unroll, and the loss against the target at every depth.

    row i, depth k      input                                     position   predicts    teacher
    k = 0               emb(x_{i+1}),   project(g_i)               i          x_{i+2}     head(last_{i+1})
    k                   emb(x_{i+1+k}), row i's state of k-1       i+k        x_{i+2+k}   head(last_{i+1+k})

This is what the engines run: after a verification the draft is run over the accepted tokens with the target's true
streams (depth 0), then rolls out on its own states. A (row, depth) is trained iff x_{i+1} … x_{i+2+k} all belong to
one answer span: exactly the rows an engine visits, because it drafts only after the target has emitted an answer token.

The loss of a row at depth k is what `losses.Loss` says (the default: soft cross-entropy to the teacher renormalised on
the draft vocabulary), weighted by the depth. Source: EAGLE-3 (arXiv 2503.01840) section 3 and its released code, where
the depths weigh 0.8^k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_train.algorithms.fused import Job, fused_loss
from eagle_train.algorithms.losses import Loss
from eagle_train.algorithms.teacher import Teacher
from eagle_train.algorithms.unroll import UnrollMemory, spans_of
from eagle_train.data.pack import Pack
from eagle_train.device.shapes import rounded
from eagle_train.draft.eagle3 import Eagle3Head


@dataclass(frozen=True)
class DepthRows:
    """One depth of the unroll: `rows` [R] places in the pack, `hidden` [R, H] the draft's outputs before `norm`."""

    depth: int
    rows: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class DepthResult:
    """One depth's figures, all detached.

    loss: the weighted sum over this depth's rows, a scalar; rows [R]; correct [R] bool: the draft's argmax is the
    target's; accept [R]: p(argmax q), what a greedy draft is accepted with at temperature 1; alpha [R]: Σ min(p, q),
    a sampled draft's acceptance, p on the full vocabulary in both (these three are empty unless asked for); outside:
    rows whose target argmax lies outside the draft vocabulary.
    """

    depth: int
    loss: Tensor
    rows: Tensor
    correct: Tensor
    accept: Tensor
    alpha: Tensor
    outside: int


@dataclass(frozen=True)
class Results:
    """`loss`: the sum over all depths, a scalar with gradients; `depths`: one result per depth that has rows."""

    loss: Tensor
    depths: list[DepthResult]


def unroll(head: Eagle3Head, pack: Pack, depths: int, runs: Tensor) -> Iterator[DepthRows]:
    """Run `head` over `pack`, yielding depth 0 … depths−1 with the rows that are trained at each.

    Every depth computes the rows that depth 0 trains; those whose reach ends earlier (the last k of a span) are
    computed for their shape and not yielded. Row counts are rounded up with rows that nothing sees.
    """
    taught = (runs >= 2).nonzero()[:, 0]
    if not len(taught):
        return
    n = pack.ids.shape[0]
    filled = torch.arange(rounded(n), device=pack.ids.device)
    here, ahead = filled.clamp(max=n - 1), (filled + 1).clamp(max=n - 1)
    chosen = torch.cat([taught, taught[-1:].expand(rounded(len(taught)) - len(taught))])
    memory = UnrollMemory(spans_of(taught.tolist(), pack.bounds), pack.bounds, head.config.num_layers)
    # Row i looks at token i+1; a document's last row has none: it is computed for its shape and never trained or seen.
    state = head.project(pack.streams[here].to(head.fc.weight.dtype))
    hidden = head.step(head.embed(pack.ids[ahead]), state, pack.positions[here], memory.attend, chosen)
    for k in range(depths):
        if k:
            emb = head.embed(pack.ids[(chosen + 1 + k).clamp(max=n - 1)])
            hidden = head.step(emb, head.feedback(hidden), pack.positions[chosen] + k, memory.attend)
        reach = (runs[taught] >= k + 2).nonzero()[:, 0]
        if not len(reach):
            return
        yield DepthRows(k, taught[reach], hidden[reach])


class Eagle3:
    """How an EAGLE-3 head is taught: one weight per depth of the unroll, a loss, and what weighs the same in it."""

    def __init__(self, weights: Sequence[float], loss: Loss | None = None, *, by_token: bool = False) -> None:
        assert weights and all(w >= 0 for w in weights), weights
        self.weights, self.loss, self.by_token = tuple(weights), loss or Loss(), by_token

    def share(self, taught_rows: int) -> int:
        """What a conversation with so many depth-0 rows adds to the divisor of its optimizer window."""
        return taught_rows if self.by_token else int(taught_rows > 0)

    def results(self, head: Eagle3Head, pack: Pack, teacher: Teacher, *, detailed: bool = False) -> Results | None:
        """Loss and figures; None where the pack trains nothing.

        Each row weighs 1 / (its conversation's depth-0 rows), or 1 with `by_token`, times its depth's weight. The sum
        of the losses, divided by the sum of `share` over the whole optimizer window and all ranks, is the loss: so
        packing, padding, accumulation and ranks change nothing.
        """
        runs = pack.runs()
        depths = list(unroll(head, pack, len(self.weights), runs))
        if not depths:
            return None
        count = torch.bincount(pack.document[depths[0].rows], minlength=len(pack.bounds))[pack.document]
        if self.by_token:
            count = torch.ones_like(count)
        count = count.to(torch.promote_types(head.fc.weight.dtype, torch.float32))
        job = Job(
            pack=pack,
            teacher=teacher,
            loss=self.loss,
            places=[d.rows + 1 + d.depth for d in depths],
            weights=[self.weights[d.depth] / count[d.rows] for d in depths],
            detailed=detailed,
        )
        loss = fused_loss(job, head.lm_head.weight, [head.norm(d.hidden) for d in depths])
        return Results(loss, [_result(d, job) for d in depths])


def _result(depth: DepthRows, job: Job) -> DepthResult:
    k, figures = depth.depth, job.figures[depth.depth]
    empty = depth.hidden.new_empty(0)
    return DepthResult(
        depth=k,
        loss=job.losses[k],
        rows=depth.rows,
        correct=torch.cat([empty, *figures.correct]),
        accept=torch.cat([empty, *figures.accept]),
        alpha=torch.cat([empty, *figures.alpha]),
        outside=int((job.pack.top[job.places[k]] < 0).sum()),
    )
