"""HASS: an EAGLE-1 head taught on its own states too, each depth apart from the others.

    row i, depth k    input: emb(x_{i+1+k}), sg(f of row i at k−1)    position i+k    output f ≈ last_{i+1+k}

The rows and keys are those of `algorithms/unroll.py`: a row at depth k sees the depth-0 keys, made from true states, of
rows ≤ i and its own deeper ones, made from predicted states, as it will when it drafts. sg: the state is detached, so a
depth learns to live with the states it gets, not to make the next depth's easier. At each depth the loss is EAGLE-1's
plus w times the distillation term over the target's k likeliest tokens (K = 10):

    smooth_l1(f, last_{i+1+k}) + 0.1 · (−Σ p log q) + w · (−Σ_{top K of p} p log q)

which `algorithm.loss` writes as `smooth_l1 + 0.1*kl + top_k` for w = 1. Noise is EAGLE-1's, on the true states.
Source: HASS (arXiv 2408.15766); the released run has 40 epochs with w = 0, then 10 with w = 1 at a lower rate.
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


class Hass:
    """How an EAGLE-1 head is taught on its own states: one weight per depth, states detached between depths."""

    teaches: ClassVar[str] = "eagle"

    def __init__(self, terms: Terms, noise: Noise) -> None:
        self.terms, self.noise = terms, noise

    @classmethod
    def configured(cls, settings: AlgorithmConfig) -> Hass:
        """From the section `algorithm` of the settings."""
        return cls(Terms.of(settings), Noise(settings.noise, settings.noise_length))

    def share(self, taught_rows: int) -> int:
        """What a conversation with so many depth-0 rows adds to the divisor of its optimizer window."""
        return self.terms.share(taught_rows)

    def results(self, head: DraftHead, pack: Pack, teacher: Teacher, *, detailed: bool = False) -> Results | None:
        """Loss and figures; None where the pack trains nothing."""
        states = self.noise.on(head.reads(pack), pack)
        rows = unroll(head, pack, len(self.terms.weights), pack.runs(), states=states, detach=True)
        return grade(head, pack, teacher, list(rows), self.terms, detailed=detailed)
