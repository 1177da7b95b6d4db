"""The training core in its plainest form: every score behind a mask, every logit kept, gradients by autograd alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_train.algorithms.grade import Terms
from eagle_train.algorithms.teacher import Teacher
from eagle_train.algorithms.unroll import Span, unroll
from eagle_train.data.pack import Pack
from eagle_train.draft.head import DraftHead


class MaskedMemory:
    """`UnrollMemory`'s place: one T × kT mask."""

    def __init__(self, spans: Sequence[Span], bounds: Sequence[tuple[int, int]], num_layers: int) -> None:
        self.spans, self.bounds = spans, bounds
        self.base: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self.own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = self.base[layer] is None
        if first:
            self.base[layer] = (k, v)
        else:
            self.own[layer].append((k, v))
        places = torch.full((len(q),), -1)
        if first and layer < len(self.base) - 1:
            places[: self.bounds[-1][1]] = torch.arange(self.bounds[-1][1])
        else:
            for span in self.spans:
                places[span.first : span.stop] = torch.arange(span.a, span.b)
        base = self.base[layer]
        assert base is not None
        columns = torch.arange(len(base[0]))
        seen = torch.zeros(len(q), len(columns), dtype=torch.bool)
        for a, b in self.bounds:
            inside = (places >= a) & (places < b)
            seen |= inside[:, None] & (columns >= a) & (columns <= places[:, None])
        mask = torch.cat([seen, *(torch.eye(len(q), dtype=torch.bool) for _ in self.own[layer])], dim=1)
        keys = torch.cat([base[0], *(k for k, _ in self.own[layer])])
        values = torch.cat([base[1], *(v for _, v in self.own[layer])])
        return masked(q, keys, values, mask) * (places >= 0)[:, None, None]


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [R, Q, D], k and v [S, G, D], mask [R, S] → [R, Q, D]; a row that sees nothing takes everything."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    mask = mask | ~mask.any(1, keepdim=True)
    scores = torch.einsum("rhd,shd->hrs", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hrs,shd->rhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def row_loss(kind: str, q: Tensor, p: Tensor, mass: Tensor, best: Tensor, top_k: int = 10) -> Tensor:
    """One term of `losses.Loss`, from its definition [C]."""
    logs, inside = q.log_softmax(-1), (best >= 0).to(q.dtype)
    kl = -(p * logs).sum(-1)
    alpha = torch.minimum(logs.exp(), p * mass[:, None]).sum(-1)
    if kind == "kl":
        return kl * inside
    if kind == "ce":
        return -logs.gather(1, best.clamp(min=0)[:, None])[:, 0] * inside
    if kind == "top_k":
        kept = torch.zeros_like(p).scatter(1, p.topk(min(top_k, p.shape[1])).indices, 1.0)
        return -(p * kept * logs).sum(-1) * inside
    if kind == "tv":
        return 1 - alpha
    if kind == "lk":
        return -alpha.log()
    assert kind == "lk_hybrid", kind
    share = (-3 * alpha.detach()).exp()
    return share * kl + (1 - share) * (1 - alpha)


def losses(
    terms: Terms, head: DraftHead, pack: Pack, teacher: Teacher, *, states: Tensor | None = None, detach: bool = False
) -> list[Tensor]:
    """Per depth the weighted sum of the rows' losses, all logits at once."""
    runs, out = pack.runs(), []
    first = (runs >= 2).nonzero()[:, 0]
    for depth in unroll(head, pack, len(terms.weights), runs, states=states, detach=detach):
        at = depth.rows + 1 + depth.depth
        logits = teacher.head(pack.last[at])
        p = logits[:, teacher.draft_ids].softmax(-1)
        mass = logits.softmax(-1)[:, teacher.draft_ids].sum(-1)
        top = logits.argmax(-1)
        best = torch.where(head.vocab.t2d[top], torch.searchsorted(teacher.draft_ids, top), -1)
        q = head.logits(depth.hidden)
        found = torch.zeros(len(at), dtype=q.dtype)
        for kind, weight in terms.loss.terms:
            found = found + weight * row_loss(kind, q, p, mass, best, terms.loss.top_k)
        if terms.features:
            gap = (depth.hidden - pack.last[at]).abs()
            found = found + terms.features * torch.where(gap < 1, gap * gap / 2, gap - 0.5).mean(-1)
        mine = pack.document[depth.rows].tolist()
        counts = torch.tensor([int((pack.document[first] == d).sum()) for d in mine], dtype=q.dtype)
        share = terms.weights[depth.depth] / (1 if terms.by_token else counts)
        out.append((found * share).sum())
    return out
