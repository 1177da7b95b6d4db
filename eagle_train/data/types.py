"""What the data room hands on: tokenized samples, and the account of every row that went in."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """One tokenized conversation: `ids` [T] and `mask` [T]; mask[j] is True iff the assistant wrote token j."""

    id: str
    ids: tuple[int, ...]
    mask: tuple[bool, ...]

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.mask), (self.id, len(self.ids), len(self.mask))


class RowError(Exception):
    """Why one row cannot be used: `reason` groups rows in the report, `detail` belongs to this row alone."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True)
class Report:
    """rows_in == rows_out + the drops, always; `first` names the first place of each reason."""

    rows_in: int
    rows_out: int
    drops: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    truncated: int = 0
    """Rows among rows_out that were cut at max_length."""

    def __post_init__(self) -> None:
        dropped = sum(self.drops.values())
        assert self.rows_in == self.rows_out + dropped, (self.rows_in, self.rows_out, self.drops)

    def lines(self) -> list[str]:
        """For printing: one line with the counts, then one per reason."""
        head = f"rows in {self.rows_in}, rows out {self.rows_out}"
        if self.truncated:
            head += f" (truncated at max_length: {self.truncated})"
        ordered = sorted(self.drops.items(), key=lambda kv: (-kv[1], kv[0]))
        return [head] + [f"  dropped {n}: {reason} (first: {self.first.get(reason, '?')})" for reason, n in ordered]
