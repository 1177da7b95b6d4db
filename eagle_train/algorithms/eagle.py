"""EAGLE-1: the head learns to predict the target's next state, and through it the next token, at depth 0 alone.

    row i      input: emb(x_{i+1}), last_i + noise      position i      output f_i      predicts last_{i+1}, so x_{i+2}

    loss of row i = smooth_l1(f_i, last_{i+1}) + 0.1 · (−Σ p log softmax(W f_i)),   p = softmax(W last_{i+1})

W is the target's lm_head, frozen, over its full vocabulary; last is clean in the loss. The two weights are those of
`algorithm.loss` (`smooth_l1 + 0.1*kl`). When it drafts, the head is fed its own f_i, which it never saw in training:
that is what HASS and EAGLE-3 change. Source: EAGLE (arXiv 2401.15077) and its released code; EAGLE-2 is the same
weights, served with a tree of drafts.
"""

from __future__ import annotations

from typing import ClassVar

from eagle_train.algorithms.grade import Terms, grade
from eagle_train.algorithms.interface import Results
from eagle_train.algorithms.noise import Noise
from eagle_train.algorithms.teacher import Teacher
from eagle_train.algorithms.unroll import unroll
from eagle_train.config.schema import AlgorithmConfig
from eagle_train.data.pack import Pack
from eagle_train.draft.head import DraftHead


class Eagle:
    """How an EAGLE-1 head is taught: on true states, one depth."""

    teaches: ClassVar[str] = "eagle"

    def __init__(self, terms: Terms, noise: Noise) -> None:
        assert len(terms.weights) == 1, terms
        self.terms, self.noise = terms, noise

    @classmethod
    def configured(cls, settings: AlgorithmConfig) -> Eagle:
        """From the section `algorithm` of the settings."""
        return cls(Terms.of(settings), Noise(settings.noise, settings.noise_length))

    def share(self, taught_rows: int) -> int:
        """What a conversation with so many trained rows adds to the divisor of its optimizer window."""
        return self.terms.share(taught_rows)

    def results(self, head: DraftHead, pack: Pack, teacher: Teacher, *, detailed: bool = False) -> Results | None:
        """Loss and figures; None where the pack trains nothing."""
        states = self.noise.on(head.reads(pack), pack)
        return grade(
            head, pack, teacher, list(unroll(head, pack, 1, pack.runs(), states=states)), self.terms, detailed=detailed
        )
