"""EAGLE-3's training-time test: the unroll, and soft cross-entropy to the target at every depth.

    row i, depth k      input                                     position   predicts    teacher
    k = 0               emb(x_{i+1}),   project(g_i)               i          x_{i+2}     head(last_{i+1})
    k                   emb(x_{i+1+k}), row i's state of k-1       i+k        x_{i+2+k}   head(last_{i+1+k})

This is what the engines run: after a verification the draft is run over the accepted tokens with the target's true
streams (depth 0), then rolls out on its own states. A (row, depth) is trained iff x_{i+1} … x_{i+2+k} all belong to
one answer span: exactly the rows an engine visits, because it drafts only after the target has emitted an answer token.

Loss of a row at depth k: −Σ_v p(v) log q(v) over the draft vocabulary, p the teacher renormalised on it; a row whose
target argmax lies outside the draft vocabulary has no loss (it still counts in every metric). Source: EAGLE-3
(arXiv 2503.01840) section 3 and its released code, where the depths weigh 0.8^k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle_train.algorithms.losses import soft_cross_entropy
from eagle_train.algorithms.teacher import Teacher
from eagle_train.algorithms.unroll import UnrollMemory
from eagle_train.data.pack import Pack
from eagle_train.device.shapes import rounded
from eagle_train.draft.eagle3 import Eagle3Head


@dataclass(frozen=True)
class DepthRows:
    """One depth of the unroll: `rows` [R] places in the pack, `hidden` [R, H] the draft's outputs before `norm`,
    `logits` [R, Vd]."""

    depth: int
    rows: Tensor
    hidden: Tensor
    logits: Tensor


@dataclass(frozen=True)
class DepthResult:
    """One depth's loss and per-row figures (all detached but `loss`).

    loss: scalar, the weighted sum over this depth's rows; rows [R]; correct [R] bool: the draft's argmax is the
    target's; accept [R]: p(argmax q), what a greedy draft is accepted with at temperature 1; alpha [R]: Σ min(p, q),
    a sampled draft's acceptance, p on the full vocabulary in both (these three are empty unless asked for); skipped:
    rows without a loss, because the target's argmax lies outside the draft vocabulary.
    """

    depth: int
    loss: Tensor
    rows: Tensor
    correct: Tensor
    accept: Tensor
    alpha: Tensor
    skipped: int


def unroll(head: Eagle3Head, pack: Pack, depths: int, runs: Tensor) -> Iterator[DepthRows]:
    """Run `head` over `pack`, yielding depth 0 … depths−1; depth k ≥ 1 computes its trained rows only.

    Row counts are rounded up with copies of the last row, which nothing sees and nothing is taken from.
    """
    n = pack.ids.shape[0]
    filled = torch.arange(rounded(n), device=pack.ids.device)
    here, ahead = filled.clamp(max=n - 1), (filled + 1).clamp(max=n - 1)
    memory = UnrollMemory((*pack.bounds, (n, len(filled))), head.config.num_layers)
    # Row i looks at token i+1; a document's last row has none: it is computed for its shape and never trained or seen.
    state = head.project(pack.streams[here].to(head.fc.weight.dtype))
    hidden = head.step(head.embed(pack.ids[ahead]), state, pack.positions[here], memory.attend)
    held = filled  # the rows that `hidden` stands for
    for k in range(depths):
        rows = (runs >= k + 2).nonzero()[:, 0]
        if not len(rows):
            return
        chosen = torch.cat([rows, rows[-1:].expand(rounded(len(rows)) - len(rows))])
        place = torch.searchsorted(held, chosen)
        held, hidden = chosen, hidden[place]
        if k:
            memory.descend(place if k > 1 else None, chosen)
            emb = head.embed(pack.ids[chosen + 1 + k])
            hidden = head.step(emb, head.feedback(hidden), pack.positions[chosen] + k, memory.attend)
        yield DepthRows(k, rows, hidden[: len(rows)], head.logits(hidden)[: len(rows)])


class Eagle3:
    """How an EAGLE-3 head is taught: `depths` of the unroll, weighted `decay`^k."""

    def __init__(self, depths: int, decay: float) -> None:
        self.depths, self.decay = depths, decay

    def results(self, head: Eagle3Head, pack: Pack, teacher: Teacher, *, detailed: bool = False) -> list[DepthResult]:
        """One result per depth that has rows. Each row weighs 1 / (its conversation's depth-0 rows), times decay^k.

        The sum of the losses, divided by the number of conversations with trained rows in the whole optimizer window,
        is the loss: so packing, padding, accumulation and ranks change nothing.
        """
        runs = pack.runs()
        taught = (runs >= 2).nonzero()[:, 0]
        if not len(taught):
            return []
        count = torch.bincount(pack.document[taught], minlength=len(pack.bounds))[pack.document]
        with torch.no_grad():
            # One teacher softmax per teacher position; every depth that meets the position takes its row.
            logits = teacher.draft_logits(pack.last[taught + 1])
            given = _Given(pack.top, logits.softmax(-1), torch.full_like(runs, -1))
            given.place[taught + 1] = torch.arange(len(taught), device=runs.device)
            if detailed:
                inside = logits.logsumexp(-1) - teacher.log_sum_exp(pack.last[taught + 1])
                given = replace(given, mass=inside.exp())
        out = []
        for depth in unroll(head, pack, self.depths, runs):
            scale = self.decay**depth.depth / count[depth.rows].to(given.probs.dtype)
            out.append(_result(head, depth, given, scale))
        return out


@dataclass(frozen=True)
class _Given:
    """The teacher of a pack: top [N] as in `Pack`; probs [P, Vd] on the draft vocabulary; place [N]: a position's row
    in probs; mass [P]: the share of the full distribution that the draft vocabulary holds (None: no figures wanted)."""

    top: Tensor
    probs: Tensor
    place: Tensor
    mass: Tensor | None = None


def _result(head: Eagle3Head, depth: DepthRows, given: _Given, scale: Tensor) -> DepthResult:
    at = depth.rows + 1 + depth.depth
    top, row = given.top[at], given.place[at]
    inside = top >= 0
    q, p = depth.logits, given.probs[row]
    loss = soft_cross_entropy(q, p)
    correct = accept = alpha = q.new_empty(0)
    if given.mass is not None:
        with torch.no_grad():
            wide, mass = q.to(p.dtype), given.mass[row]
            choice = wide.argmax(-1)
            correct = head.target_ids(choice) == top
            accept = p.gather(1, choice[:, None])[:, 0] * mass
            alpha = torch.minimum(p * mass[:, None], wide.softmax(-1)).sum(-1)
    return DepthResult(
        depth=depth.depth,
        loss=(loss * scale * inside).sum(),
        rows=depth.rows,
        correct=correct,
        accept=accept,
        alpha=alpha,
        skipped=int((~inside).sum()),
    )
