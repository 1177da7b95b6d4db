"""Verification of one drafted chain against the target, and the cut at the end of an answer.

Shapes: K drafts, V target vocabulary. Row j of the K + 1 target rows is what the target says after the prefix and the
first j drafts, so it judges draft j, and row K gives the token after the last draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_inference.sampling import Randomness, SamplingParams

# A softmax row may pass one by its last bits.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Verdict:
    """tokens: the accepted drafts and exactly one more, the correction or, when all were accepted, the bonus."""

    accepted: int
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.tokens) == self.accepted + 1, f"{self.accepted} accepted but {len(self.tokens)} tokens"


def verify_greedy(drafts: Sequence[int], logits: Tensor) -> Verdict:
    """Temperature 0: a draft is accepted iff it is the argmax of its row of logits [K + 1, V]."""
    _check_rows(drafts, logits)
    best = logits.argmax(dim=-1)
    top = logits.gather(1, best[:, None]).flatten().tolist()
    # argmax takes NaN for the largest value.
    assert all(value == value for value in top), f"a row of target logits has NaN, top values {top}"
    picks = best.tolist()
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == picks[accepted]:
        accepted += 1
    return Verdict(accepted, tuple(picks[: accepted + 1]))


def verify_one_hot(drafts: Sequence[int], probs: Tensor, randomness: Randomness) -> Verdict:
    """Exact rejection sampling for drafts that were chosen, not drawn: the draft distribution q is one-hot.

    probs [K + 1, V]: the target's rows as they are sampled, warpers applied. Draft x is accepted with p(x) =
    min(1, p(x)/q(x)); a rejected x leaves p, which is renormalised (max(p - q, 0) for a one-hot q), and the correction
    is drawn from that. After K acceptances the bonus is drawn from row K.
    """
    _check_rows(drafts, probs)
    chosen = torch.tensor(list(drafts), dtype=torch.long, device=probs.device)
    for accepted, p in enumerate(probs[:-1].gather(1, chosen[:, None]).flatten().tolist()):
        assert 0 <= p <= 1 + ROUNDING, f"row {accepted} gives its draft the probability {p}"
        if not randomness.accept(min(p, 1.0)):
            correction = randomness.choose(_without(probs[accepted], drafts[accepted]))
            return Verdict(accepted, (*drafts[:accepted], correction))
    return Verdict(len(drafts), (*drafts, randomness.choose(probs[len(drafts)])))


def cut(tokens: Sequence[int], already: int, params: SamplingParams) -> tuple[tuple[int, ...], str | None]:
    """What an answer keeps of newly verified tokens, and why it ended: "stop", "length" or None (it goes on).

    already: tokens the answer had before. A stop token is kept, nothing after it is. A stop token on the last place
    that max_new_tokens leaves is a "stop".
    """
    room = params.max_new_tokens - already
    assert room > 0, f"an answer of {already} tokens, limit {params.max_new_tokens}, had ended before"
    for place, token in enumerate(tokens[:room]):
        if token in params.stop_ids:
            return tuple(tokens[: place + 1]), "stop"
    return tuple(tokens[:room]), "length" if len(tokens) >= room else None


def _without(p: Tensor, token: int) -> Tensor:
    """p [V] with one token removed, renormalised."""
    residual = p.clone()
    residual[token] = 0
    mass = residual.sum()
    assert mass > 0, f"token {token} was rejected though its probability is {float(p[token])} and no other has any"
    return residual / mass


def _check_rows(drafts: Sequence[int], rows: Tensor) -> None:
    shape = tuple(rows.shape)
    assert shape[:-1] == (len(drafts) + 1,), f"{len(drafts)} drafts, rows {shape}"
    assert all(0 <= token < shape[-1] for token in drafts), f"drafts {list(drafts)}, vocabulary {shape[-1]}"
