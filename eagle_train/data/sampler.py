"""Which samples make up pack n of an endless stream: arithmetic alone, so there is nothing to save for a resume.

Epoch e's order is a permutation drawn from the seed and e; packs are filled in that order up to `batch_tokens`, and
none crosses the end of an epoch, so every sample occurs exactly once in each.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence

Pack = tuple[int, ...]


class Schedule:
    """The stream of packs. `lengths` [S] in tokens; a sample longer than `batch_tokens` is a pack of its own."""

    def __init__(self, lengths: Sequence[int], batch_tokens: int, seed: int) -> None:
        assert min(lengths, default=0) > 0, f"{len(lengths)} samples; there must be some, and none may be empty"
        assert batch_tokens > 0, batch_tokens
        self._lengths = tuple(lengths)
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._starts = [0]  # number of the first pack of each epoch, as far as the stream was followed
        self._kept: dict[int, list[Pack]] = {}

    def order(self, epoch: int) -> Pack:
        """Epoch's permutation of the samples, the same on every platform and Python version."""
        rng = random.Random(f"{self._seed}/{epoch}")
        keys = [rng.random() for _ in self._lengths]
        return tuple(sorted(range(len(keys)), key=keys.__getitem__))

    def packs(self, epoch: int) -> list[Pack]:
        """All packs of one epoch, in order."""
        if epoch not in self._kept:
            packs: list[Pack] = []
            current: list[int] = []
            used = 0
            for i in self.order(epoch):
                if current and used + self._lengths[i] > self._batch_tokens:
                    packs.append(tuple(current))
                    current, used = [], 0
                current.append(i)
                used += self._lengths[i]
            packs.append(tuple(current))
            while len(self._kept) > 1:  # two epochs are kept: a window may lie across the border of two
                del self._kept[min(self._kept)]
            self._kept[epoch] = packs
        return self._kept[epoch]

    def epoch_start(self, epoch: int) -> int:
        """Number of the first pack of `epoch`."""
        while len(self._starts) <= epoch:
            self._starts.append(self._starts[-1] + len(self.packs(len(self._starts) - 1)))
        return self._starts[epoch]

    def epoch_of(self, n: int) -> int:
        """The epoch that pack n belongs to."""
        assert n >= 0, n
        while self._starts[-1] <= n:
            self.epoch_start(len(self._starts))
        return bisect_right(self._starts, n) - 1

    def pack(self, n: int) -> Pack:
        """Sample indices of the n-th pack, n ≥ 0."""
        epoch = self.epoch_of(n)
        return self.packs(epoch)[n - self._starts[epoch]]

    def window(self, step: int, accumulation: int, world: int) -> list[list[Pack]]:
        """Packs of optimizer step `step` as [accumulation][rank]: pack (step·A + a)·W + r.

        The same samples for every split of A·W.
        """
        assert min(accumulation, world) > 0, (accumulation, world)
        first = step * accumulation * world
        return [[self.pack(first + a * world + r) for r in range(world)] for a in range(accumulation)]
