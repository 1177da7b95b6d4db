"""Acceptance as vLLM counts it: every draft in full, before an answer is cut at a stop token or a length limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Acceptance:
    """Counts over a run; the figures follow from them.

    drafts: chains verified. drafted, accepted: tokens. per_position: drafts whose token at that place was accepted.
    accepted_kept: accepted tokens that also survived the cut, None where the cut was not recorded.
    """

    drafts: int
    drafted: int
    accepted: int
    per_position: tuple[int, ...]
    accepted_kept: int | None = None

    def __post_init__(self) -> None:
        assert sum(self.per_position) == self.accepted <= self.drafted, f"counts do not add up: {self!r}"
        assert self.accepted_kept is None or 0 <= self.accepted_kept <= self.accepted, f"kept too many: {self!r}"

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification, the target's own included; 1 without a draft."""
        return 1.0 + _share(self.accepted, self.drafts)

    @property
    def acceptance_length_kept(self) -> float | None:
        """The same with only the accepted tokens that were kept (the target's own token is counted in every draft)."""
        return None if self.accepted_kept is None else 1.0 + _share(self.accepted_kept, self.drafts)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted tokens over drafted tokens."""
        return _share(self.accepted, self.drafted)

    @property
    def rates(self) -> tuple[float, ...]:
        """Accepted at each position over all drafts."""
        return tuple(_share(count, self.drafts) for count in self.per_position)

    @property
    def conditional_rates(self) -> tuple[float, ...]:
        """Accepted at each position over accepted at the one before; 0 where none was."""
        before = (self.drafts, *self.per_position)[: len(self.per_position)]
        return tuple(_share(count, reached) for count, reached in zip(self.per_position, before, strict=True))

    def to_dict(self) -> dict[str, object]:
        """Counts and figures, ready for JSON."""
        return {
            "drafts": self.drafts,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_kept": self.accepted_kept,
            "per_position": list(self.per_position),
            "acceptance_length": self.acceptance_length,
            "acceptance_length_kept": self.acceptance_length_kept,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "rates": list(self.rates),
            "conditional_rates": list(self.conditional_rates),
        }

    @staticmethod
    def merge(parts: Iterable[Acceptance]) -> Acceptance:
        """The counts of several runs as one. Runs with and without a recorded cut do not mix."""
        every = list(parts)
        kept = [part.accepted_kept for part in every if part.drafts > 0]
        known = [count for count in kept if count is not None]
        assert len(known) in (0, len(kept)), f"only {len(known)} of {len(kept)} runs recorded what the cut kept"
        return Acceptance(
            drafts=sum(part.drafts for part in every),
            drafted=sum(part.drafted for part in every),
            accepted=sum(part.accepted for part in every),
            per_position=_add_up([part.per_position for part in every]),
            accepted_kept=sum(known) if known else None,
        )


class AcceptanceCounter:
    """Counts while a run goes on; `result()` may be taken at any time."""

    def __init__(self) -> None:
        self._drafts = 0
        self._drafted = 0
        self._per_position: list[int] = []
        self._kept: int | None = None

    def add(self, drafted: int, accepted: int) -> None:
        """One verified chain, before the cut. A cycle that drafted nothing is no draft, as in vLLM."""
        assert 0 <= accepted <= drafted, f"accepted {accepted} of {drafted}"
        if drafted == 0:
            return
        self._drafts += 1
        self._drafted += drafted
        self._per_position.extend([0] * (drafted - len(self._per_position)))
        for place in range(accepted):
            self._per_position[place] += 1

    def add_kept(self, kept_accepted: int) -> None:
        """Of the chain just added, the accepted tokens that the cut left."""
        assert kept_accepted >= 0, f"kept {kept_accepted}"
        self._kept = (self._kept or 0) + kept_accepted

    def result(self) -> Acceptance:
        places = tuple(self._per_position)
        return Acceptance(self._drafts, self._drafted, sum(places), places, self._kept)


def _add_up(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    depth = max((len(each) for each in counts), default=0)
    return tuple(sum(each[place] for each in counts if place < len(each)) for place in range(depth))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
