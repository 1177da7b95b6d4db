"""What one row of logits costs, and its gradient, written out. C rows, Vd the draft vocabulary.

    q       the draft's logits [C, Vd];  Q = softmax(q)
    p       the target's distribution renormalised on the draft vocabulary [C, Vd] (Σ p = 1)
    mass    the share of the target's full distribution that lies there [C];  P = p · mass, the true probabilities
    best    the column of the target's argmax over the full vocabulary [C]; −1 where it lies outside

    term        loss of a row                               rows without a loss     source
    kl          −Σ p log Q (soft cross-entropy)             argmax outside          EAGLE-3 (2503.01840) and its code
    ce          −log Q(best)                                argmax outside          hard labels
    top_k       −Σ p log Q over the k largest p             argmax outside          HASS (2408.15766)
    tv          1 − α                                       none                    α = Σ min(P, Q)
    lk          −log α                                      none                    2602.23881
    lk_hybrid   λ·kl + (1 − λ)·tv, λ = exp(−3α) per row     none                    2602.23881

α is the probability that a sampled draft is accepted: on the full target vocabulary, where tokens outside the draft
vocabulary have Q = 0. λ is taken as given (no gradient), per row, so that splitting the work changes nothing. `tv` and
`lk` barely move from a random start; `lk_hybrid` begins as `kl` and turns to `tv` as the rows get good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

SKIPPING = ("kl", "ce", "top_k")


@dataclass(frozen=True)
class Loss:
    """A weighted sum of terms, e.g. (("kl", 1.0), ("tv", 0.5)); `top_k` for the term of that name."""

    terms: tuple[tuple[str, float], ...] = (("kl", 1.0),)
    top_k: int = 10

    def __post_init__(self) -> None:
        assert self.terms and all(name in _TERMS for name, _ in self.terms), self.terms

    @property
    def needs_mass(self) -> bool:
        """Whether a term reads the full vocabulary."""
        return any(name not in SKIPPING for name, _ in self.terms)

    def rows(self, q: Tensor, given: Given) -> tuple[Tensor, Tensor, Tensor]:
        """q [C, Vd] → losses [C], their gradient to q [C, Vd], and which rows count [C], 0 or 1.

        A row that does not count has a loss of 0 but, for speed, not a gradient of 0: the caller multiplies it by that.
        """
        seen = _Rows.of(q.to(given.p.dtype), given, self.top_k)
        inside = (given.best >= 0).to(given.p.dtype)
        alike = len({name in SKIPPING for name, _ in self.terms}) == 1
        losses, grads = [], []
        for name, factor in self.terms:
            kept = inside if name in SKIPPING else torch.ones_like(inside)
            loss, grad = _TERMS[name](seen)
            losses.append(loss * kept * factor)
            scale = None if alike and factor == 1.0 else factor if alike else (kept * factor)[:, None]
            grads.append(grad if scale is None else grad * scale)
        return reduce(torch.add, losses), reduce(torch.add, grads), kept if alike else torch.ones_like(inside)


@dataclass(frozen=True)
class Given:
    """The teacher of C rows: `p`, `mass` (None: not asked for) and `best` as above."""

    p: Tensor
    mass: Tensor | None
    best: Tensor

    def at(self, rows: Tensor) -> Given:
        """These rows, ascending; neighbours are not copied."""
        if int(rows[-1] - rows[0]) == len(rows) - 1:
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            return Given(self.p[part], None if self.mass is None else self.mass[part], self.best[part])
        return Given(self.p[rows], None if self.mass is None else self.mass[rows], self.best[rows])


@dataclass(frozen=True)
class _Rows:
    """C rows as every term reads them, and none changes them."""

    q: Tensor
    probs: Tensor
    lse: Tensor
    given: Given
    top_k: int

    @staticmethod
    def of(q: Tensor, given: Given, top_k: int) -> _Rows:
        probs = q.softmax(-1)
        # The largest probability is at least 1/Vd: its logarithm is safe, and cheaper than a log-sum-exp of its own.
        return _Rows(q, probs, q.amax(-1) - probs.amax(-1).log(), given, top_k)


def _kl(r: _Rows) -> tuple[Tensor, Tensor]:
    return r.lse - torch.linalg.vecdot(r.given.p, r.q), r.probs - r.given.p


def _ce(r: _Rows) -> tuple[Tensor, Tensor]:
    at = r.given.best.clamp(min=0)[:, None]
    return r.lse - r.q.gather(1, at)[:, 0], r.probs.scatter_add(1, at, -torch.ones_like(r.lse)[:, None])


def _top_k(r: _Rows) -> tuple[Tensor, Tensor]:
    p, at = r.given.p.topk(min(r.top_k, r.given.p.shape[1]), dim=-1)
    held = p.sum(-1)
    return held * r.lse - (p * r.q.gather(1, at)).sum(-1), (r.probs * held[:, None]).scatter_add_(1, at, -p)


def acceptance(given: Given, probs: Tensor) -> Tensor:
    """α = Σ min(P, Q) per row [C], Q = `probs`."""
    assert given.mass is not None, "α needs the full vocabulary's log-sum-exp"
    return torch.minimum(given.p * given.mass[:, None], probs).sum(-1)


def _alpha(r: _Rows) -> tuple[Tensor, Tensor]:
    """α, and its gradient to q: Q·([Q < P] − Σ Q [Q < P])."""
    alpha = acceptance(r.given, r.probs)
    assert r.given.mass is not None
    growing = torch.where(r.probs < r.given.p * r.given.mass[:, None], r.probs, 0.0)
    return alpha, growing - r.probs * growing.sum(-1)[:, None]


def _tv(r: _Rows) -> tuple[Tensor, Tensor]:
    alpha, slope = _alpha(r)
    return 1 - alpha, slope.neg_()


def _lk(r: _Rows) -> tuple[Tensor, Tensor]:
    alpha, slope = _alpha(r)
    alpha = alpha.clamp(min=torch.finfo(alpha.dtype).tiny)
    return -alpha.log(), slope.div_(-alpha[:, None])


def _lk_hybrid(r: _Rows) -> tuple[Tensor, Tensor]:
    alpha, slope = _alpha(r)
    kl, grad = _kl(r)
    share = (-3 * alpha).exp()
    loss = share * kl + (1 - share) * (1 - alpha)
    return loss, grad.mul_(share[:, None]).sub_(slope.mul_((1 - share)[:, None]))


_TERMS: dict[str, Callable[[_Rows], tuple[Tensor, Tensor]]] = {
    "kl": _kl, "ce": _ce, "top_k": _top_k, "tv": _tv, "lk": _lk, "lk_hybrid": _lk_hybrid,
}  # fmt: skip
