"""The draft vocabulary: the target tokens that a head can propose, counted from the supervised text alone."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from eagle_train.errors import UserError


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """d2t [Vd] int64 of offsets: draft token i is target token i + d2t[i]; t2d [V] bool: whether a target token is in.

    Target ids strictly increase with i.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __post_init__(self) -> None:
        dtypes = (self.d2t.dtype, self.t2d.dtype)
        assert dtypes == (torch.int64, torch.bool), dtypes
        found = self.t2d.nonzero().flatten()
        assert torch.equal(self.ids, found), f"d2t names {self.size} tokens, t2d {len(found)}, and they differ"

    @classmethod
    def full(cls, vocab_size: int) -> DraftVocab:
        """Every target token, in its own place."""
        return cls(torch.zeros(vocab_size, dtype=torch.int64), torch.ones(vocab_size, dtype=torch.bool))

    @classmethod
    def of(cls, ids: Collection[int], vocab_size: int) -> DraftVocab:
        """The map of a set of target ids, each in [0, vocab_size)."""
        assert len(set(ids)) == len(ids) > 0, f"{len(ids)} ids, {len(set(ids))} of them different"
        assert 0 <= min(ids) <= max(ids) < vocab_size, (min(ids), max(ids), vocab_size)
        target = torch.tensor(sorted(ids), dtype=torch.int64)
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[target] = True
        return cls(target - torch.arange(len(target)), t2d)

    @property
    def ids(self) -> torch.Tensor:
        """Target ids [Vd] int64, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def size(self) -> int:
        """Vd."""
        return len(self.d2t)

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.t2d)

    @property
    def is_full(self) -> bool:
        """Whether draft and target share one vocabulary, so that no map is needed."""
        return self.size == self.vocab_size

    def hash(self) -> str:
        """sha256 of t2d, which d2t follows from."""
        return hashlib.sha256(self.t2d.to(device="cpu", dtype=torch.uint8).numpy().tobytes()).hexdigest()


def tokens_to_keep(
    samples: Iterable[tuple[Sequence[int], Sequence[bool]]], ends: Iterable[int], special: Collection[int]
) -> set[int]:
    """What `count_draft_vocab` must always keep: `ends` (EOS, end of turn) and each special id seen in an answer."""
    known = frozenset(special)
    return set(ends) | {i for ids, mask in samples for i, m in zip(ids, mask, strict=True) if m and i in known}


def count_draft_vocab(
    samples: Iterable[tuple[Sequence[int], Sequence[bool]]], vocab_size: int, size: int, always: Iterable[int]
) -> tuple[DraftVocab, float]:
    """The `size` most frequent tokens of the supervised positions, and the share of those positions they cover.

    `always` is in whatever its count; ties go to the lower id; a text with fewer distinct tokens is filled up with the
    lowest unused ids; size 0 or `vocab_size` means the full vocabulary.

    Raises:
        UserError: `size` is negative, above `vocab_size` or too small for `always`, or nothing is supervised.
    """
    if not 0 <= size <= vocab_size:
        raise UserError(f"draft.vocab_size={size}: expected 0 (= full) to {vocab_size}, the target's vocabulary.")
    counts = Counter(i for ids, mask in samples for i, m in zip(ids, mask, strict=True) if m)
    total = sum(counts.values())
    if not total:
        raise UserError("no supervised token to count a draft vocabulary from.")
    kept = set(always)
    outside = [i for i in (*kept, *counts) if not 0 <= i < vocab_size]
    if outside:
        raise UserError(f"token ids {sorted(outside)[:8]} lie outside the target's vocabulary of {vocab_size}.")
    if size in (0, vocab_size):
        return DraftVocab.full(vocab_size), 1.0
    if len(kept) > size:
        raise UserError(f"draft vocabulary of {size} tokens: {len(kept)} must always be in (EOS, special tokens).")
    by_count = sorted(counts.keys() - kept, key=lambda i: (-counts[i], i))
    kept.update(by_count[: size - len(kept)])
    unused = (i for i in range(vocab_size) if i not in kept)
    kept.update([next(unused) for _ in range(size - len(kept))])
    return DraftVocab.of(kept, vocab_size), sum(counts[i] for i in kept) / total
