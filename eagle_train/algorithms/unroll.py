"""The unroll of a head over a pack, and its attention: what all algorithms share.

    row i, depth k      input                                     position   predicts    teacher
    k = 0               emb(x_{i+1}),   project(states_i)          i          x_{i+2}     head(last_{i+1})
    k                   emb(x_{i+1+k}), row i's state of k-1       i+k        x_{i+2+k}   head(last_{i+1+k})

states_i is what the head reads of the target at position i (EAGLE-3: its streams; EAGLE-1: its last state). This is
what the engines run: after a verification the draft is run over the accepted tokens with the target's true states
(depth 0), then rolls out on its own. A (row, depth) is trained iff x_{i+1} … x_{i+2+k} all belong to one answer span:
exactly the rows an engine visits, because it drafts only after the target has emitted an answer token.

A trained row i at depth k sees the depth-0 keys of rows ≤ i of its own document, and its own keys of depths 1 … k.
Nothing else. Trained rows lie in spans [a, b) of neighbours; a span of the document that starts at s is

    keys     s ……… a ……… b        one fused call without a mask over [s, a),
    rows           a ……… b        one fused causal call over [a, b),
    deeper         ╲╲╲╲╲╲╲        and one score per row and deeper depth (the diagonals), elementwise,

and the parts are joined as softmax joins them: each weighs exp(its log-sum-exp − the joint one). The backward calls the
same kernels with the joint output and log-sum-exp. No T × kT mask is ever built, and memory is linear in T.

N rows of the pack, R trained rows, H width, Q query heads, G key/value heads, D head size. `tests/parity/reference.py`
is the same with masks, which this is tested against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_train.data.pack import Pack
from eagle_train.device.attention import attention, attention_backward
from eagle_train.device.shapes import rounded
from eagle_train.draft.head import DraftHead


@dataclass(frozen=True)
class DepthRows:
    """One depth of the unroll: `rows` [R] places in the pack, `hidden` [R, H] what `step` gave for them."""

    depth: int
    rows: Tensor
    hidden: Tensor


def unroll(
    head: DraftHead, pack: Pack, depths: int, runs: Tensor, *, states: Tensor | None = None, detach: bool = False
) -> Iterator[DepthRows]:
    """Run `head` over `pack`, yielding depth 0 … depths−1 with the rows that are trained at each.

    `runs` [N]: as `Pack.runs` gives them; `states` [N, S]: taken instead of what the head reads of the pack (noise);
    `detach`: no gradient passes from a depth into the state that it was fed. Every depth computes the rows that depth 0
    trains; those whose reach ends earlier (the last k of a span) are computed for their shape and not yielded. Row
    counts are rounded up with rows that nothing sees.
    """
    taught = (runs >= 2).nonzero()[:, 0]
    if not len(taught):
        return
    states = head.reads(pack) if states is None else states
    n = pack.ids.shape[0]
    filled = torch.arange(rounded(n), device=pack.ids.device)
    here, ahead = filled.clamp(max=n - 1), (filled + 1).clamp(max=n - 1)
    chosen = torch.cat([taught, taught[-1:].expand(rounded(len(taught)) - len(taught))])
    memory = UnrollMemory(spans_of(taught.tolist(), pack.bounds), pack.bounds, head.config.num_layers)
    # Row i looks at token i+1; a document's last row has none: it is computed for its shape and never trained or seen.
    state = head.project(states[here])
    hidden = head.step(head.embed(pack.ids[ahead]), state, pack.positions[here], memory.attend, chosen)
    for k in range(depths):
        if k:
            emb, state = head.embed(pack.ids[(chosen + 1 + k).clamp(max=n - 1)]), head.feedback(hidden)
            state = state.detach() if detach else state
            hidden = head.step(emb, state, pack.positions[chosen] + k, memory.attend)
        reach = (runs[taught] >= k + 2).nonzero()[:, 0]
        if not len(reach):
            return
        yield DepthRows(k, taught[reach], hidden[reach])


@dataclass(frozen=True)
class Span:
    """Query rows [first, first + b − a) stand at places [a, b) of the pack; their document starts at `start`."""

    start: int
    a: int
    b: int
    first: int

    @property
    def stop(self) -> int:
        """The query row after the last."""
        return self.first + self.b - self.a


def spans_of(rows: Sequence[int], bounds: Sequence[tuple[int, int]]) -> list[Span]:
    """Ascending places `rows` → their unbroken runs, none across the border of two documents."""
    out: list[Span] = []
    document = 0
    for n, place in enumerate(rows):
        while place >= bounds[document][1]:
            document += 1
        start = bounds[document][0]
        if out and out[-1].b == place and out[-1].start == start:
            out[-1] = Span(start, out[-1].a, place + 1, out[-1].first)
        else:
            out.append(Span(start, place, place + 1, n))
    return out


class UnrollMemory:
    """The keys and values of one pack's unroll. `attend` is what `step` is given at every depth.

    `spans`: the trained rows. At depth 0 all layers but the last one run over all N rows (their outputs are the next
    layer's keys); the last layer's queries, and everything deeper, are the R trained rows. Query rows that no span
    names are there for their shape: they get zeros.
    """

    def __init__(self, spans: Sequence[Span], bounds: Sequence[tuple[int, int]], num_layers: int) -> None:
        self.spans = list(spans)
        self.everything = [Span(a, a, b, a) for a, b in bounds]
        self.base: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self.own: list[list[Tensor]] = [[] for _ in range(num_layers)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R or N, Q, D], k and v [N, G, D] at depth 0, [R, G, D] after it → like q; the new keys are kept."""
        base = self.base[layer]
        if base is None:
            self.base[layer] = base = (k, v)
            last = layer == len(self.base) - 1
            return _Merged.apply(self.spans if last else self.everything, q, *base)  # type: ignore[no-any-return]
        self.own[layer] += [k, v]
        return _Merged.apply(self.spans, q, *base, *self.own[layer])  # type: ignore[no-any-return]


class _Merged(torch.autograd.Function):
    """q, the depth-0 keys and values, then keys and values of each deeper depth in turn."""

    @staticmethod
    def forward(ctx: Any, spans: list[Span], q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_zeros(q.shape), q.new_zeros(q.shape[:2], dtype=wide)
        for span in spans:
            _span_forward(span, q, k, v, out, lse, scale)
        keys = values = q.new_empty(0)
        if own:
            keys, values = torch.stack(own[::2], 2), torch.stack(own[1::2], 2)  # [R, G, J, D]
            scores = _diagonals(q, keys) * scale  # [R, Q, J]
            joint = torch.logsumexp(torch.cat([lse[..., None], scores], -1), -1)
            out *= (lse - joint).exp()[..., None].to(out.dtype)
            shares = _grouped((scores - joint[..., None]).exp().to(q.dtype), keys)
            out += (shares @ values).flatten(1, 2)
            lse = joint
        ctx.spans, ctx.scale = spans, scale
        ctx.save_for_backward(q, k, v, out, lse, keys, values)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, keys, values = ctx.saved_tensors
        grad, scale = grads[0].contiguous(), ctx.scale
        gq, gk, gv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for span in ctx.spans:
            _span_backward(span, (q, k, v, out, lse), grad, (gq, gk, gv), scale)
        if not keys.numel():
            return None, gq, gk, gv
        delta = (grad.to(lse.dtype) * out).sum(-1)  # [R, Q]
        shares = (_diagonals(q, keys) * scale - lse[..., None]).exp()
        ds = shares * (_diagonals(grad, values) - delta[..., None]) * scale
        ds, shares = _grouped(ds.to(q.dtype), keys), _grouped(shares.to(q.dtype), keys)  # [R, G, Q/G, J]
        gq += (ds @ keys).flatten(1, 2)
        gkeys, gvalues = ds.mT @ _grouped(q, keys), shares.mT @ _grouped(grad, keys)  # [R, G, J, D]
        deeper = [x for pair in zip(gkeys.unbind(2), gvalues.unbind(2), strict=True) for x in pair]
        return None, gq, gk, gv, *deeper


def _span_forward(span: Span, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
    rows = slice(span.first, span.stop)
    mine, diagonal = _heads(q[rows]), slice(span.a, span.b)
    part, inner = attention(mine, _heads(k[diagonal]), _heads(v[diagonal]), True, scale)
    if span.a > span.start:
        before = slice(span.start, span.a)
        other, outer = attention(mine, _heads(k[before]), _heads(v[before]), False, scale)
        joint = torch.logaddexp(inner, outer)
        near, far = ((x - joint).exp()[..., None].to(part.dtype) for x in (inner, outer))
        part, inner = part * near + other * far, joint
    out[rows] = part[0].transpose(0, 1)
    lse[rows] = inner[0].transpose(0, 1)


def _span_backward(
    span: Span, saved: tuple[Tensor, ...], grad: Tensor, into: tuple[Tensor, Tensor, Tensor], scale: float
) -> None:
    q, k, v, out, lse = saved
    gq, gk, gv = into
    rows = slice(span.first, span.stop)
    joint = lse[rows].transpose(0, 1)[None]
    for keys, causal in ((slice(span.a, span.b), True), (slice(span.start, span.a), False)):
        if keys.stop > keys.start:
            dq, dk, dv = attention_backward(
                _heads(grad[rows]), _heads(q[rows]), _heads(k[keys]), _heads(v[keys]), _heads(out[rows]), joint,
                causal, scale,
            )  # fmt: skip
            gq[rows] += dq[0].transpose(0, 1)
            gk[keys] += dk[0].transpose(0, 1)
            gv[keys] += dv[0].transpose(0, 1)


def _heads(x: Tensor) -> Tensor:
    """[R, heads, D] → [1, heads, R, D], a view."""
    return x.transpose(0, 1)[None]


def _grouped(x: Tensor, keys: Tensor) -> Tensor:
    """[R, Q, …] → [R, G, Q/G, …], a view."""
    return x.unflatten(1, (keys.shape[1], -1))


def _diagonals(q: Tensor, keys: Tensor) -> Tensor:
    """q [R, Q, D] · each of its row's own keys [R, G, J, D] → [R, Q, J], in at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return (_grouped(q, keys).to(wide) @ keys.to(wide).mT).flatten(1, 2)
