"""What an algorithm is to the loop, and what it hands back: one file each beside this one, or a file of the user's.

A class of your own, named as `algorithm.name=path/to/file.py:Class`, needs exactly what `Algorithm` lists. It may build
on `unroll` and `grade`, as those here do; docs/training.md has an example.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from eagle_train.algorithms.teacher import Teacher
from eagle_train.config.schema import AlgorithmConfig
from eagle_train.data.pack import Pack
from eagle_train.draft.head import DraftHead


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


class Algorithm(Protocol):
    """How a head is taught. `teaches`: the kind of head, `eagle3` or `eagle`."""

    teaches: ClassVar[str]

    @classmethod
    def configured(cls, settings: AlgorithmConfig) -> Algorithm:
        """From the section `algorithm` of the settings.

        Raises:
            UserError: a setting that this algorithm cannot follow.
        """
        ...

    def share(self, taught_rows: int) -> int:
        """What a conversation with so many depth-0 rows adds to the divisor of its optimizer window."""
        ...

    def results(self, head: DraftHead, pack: Pack, teacher: Teacher, *, detailed: bool = False) -> Results | None:
        """Loss and figures; None where the pack trains nothing.

        The sum of the losses, divided by the sum of `share` over the whole optimizer window and all ranks, is the loss
        of a step. Whatever is random must follow from `pack.draws` alone, so that a resumed run sees the same.
        """
        ...
