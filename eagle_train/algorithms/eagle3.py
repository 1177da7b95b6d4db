"""EAGLE-3's training-time test: the unroll on the head's own states, and the loss against the target at every depth.

The loss of a row at depth k is what `losses.Loss` says (the default: soft cross-entropy to the teacher renormalised on
the draft vocabulary), weighted by the depth. Gradients pass through the states from depth to depth. The rows are those
of `algorithms/unroll.py`. Source: EAGLE-3 (arXiv 2503.01840) section 3 and its released code, where the depths weigh
0.8^k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from eagle_train.algorithms.grade import Terms, grade
from eagle_train.algorithms.interface import Results
from eagle_train.algorithms.losses import Loss
from eagle_train.algorithms.teacher import Teacher
from eagle_train.algorithms.unroll import unroll
from eagle_train.config.schema import AlgorithmConfig
from eagle_train.data.pack import Pack
from eagle_train.draft.head import DraftHead


class Eagle3:
    """How an EAGLE-3 head is taught: one weight per depth of the unroll, a loss, and what weighs the same in it."""

    teaches: ClassVar[str] = "eagle3"

    def __init__(self, weights: Sequence[float], loss: Loss | None = None, *, by_token: bool = False) -> None:
        self.terms = Terms(tuple(weights), loss or Loss(), by_token=by_token)

    @classmethod
    def configured(cls, settings: AlgorithmConfig) -> Eagle3:
        """From the section `algorithm` of the settings."""
        terms = Terms.of(settings)
        return cls(terms.weights, terms.loss, by_token=terms.by_token)

    def share(self, taught_rows: int) -> int:
        """What a conversation with so many depth-0 rows adds to the divisor of its optimizer window."""
        return self.terms.share(taught_rows)

    def results(self, head: DraftHead, pack: Pack, teacher: Teacher, *, detailed: bool = False) -> Results | None:
        """Loss and figures; None where the pack trains nothing."""
        depths = list(unroll(head, pack, len(self.terms.weights), pack.runs()))
        return grade(head, pack, teacher, depths, self.terms, detailed=detailed)
