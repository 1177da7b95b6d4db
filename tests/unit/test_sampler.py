"""The stateless stream of packs."""

from __future__ import annotations

import random

import pytest

from eagle_train.data.sampler import Schedule

LENGTHS = [random.Random(1).randint(1, 60) for _ in range(200)] + [500]


def test_every_sample_once_per_epoch_and_none_over_budget() -> None:
    schedule = Schedule(LENGTHS, 100, seed=3)
    for epoch in range(3):
        first, end = schedule.epoch_start(epoch), schedule.epoch_start(epoch + 1)
        packs = [schedule.pack(n) for n in range(first, end)]
        assert sorted(i for p in packs for i in p) == list(range(len(LENGTHS)))
        assert all(sum(LENGTHS[i] for i in p) <= 100 for p in packs if len(p) > 1)
        assert (200,) in packs
        assert all(schedule.epoch_of(n) == epoch for n in range(first, end))
        for a, b in zip(packs, packs[1:], strict=False):
            assert sum(LENGTHS[i] for i in a) + LENGTHS[b[0]] > 100, "a pack was closed though the next sample fitted"


def test_orders_differ_by_epoch_and_seed_and_are_pinned() -> None:
    schedule = Schedule([1] * 10, 100, seed=7)
    assert schedule.order(0) != schedule.order(1)
    assert schedule.order(0) != Schedule([1] * 10, 100, seed=8).order(0)
    # Pinned: a run resumed on another machine or Python must see the same stream.
    assert schedule.order(0) == (2, 4, 5, 7, 8, 1, 6, 9, 0, 3)


def test_a_resumed_schedule_sees_the_same_tail() -> None:
    whole = Schedule(LENGTHS, 100, seed=3)
    stream = [whole.pack(n) for n in range(250)]
    fresh = Schedule(LENGTHS, 100, seed=3)
    assert [fresh.pack(n) for n in range(180, 250)] == stream[180:]
    assert [fresh.pack(n) for n in (249, 3, 120, 0)] == [stream[n] for n in (249, 3, 120, 0)]


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("world", [1, 2, 8])
def test_few_rows_on_many_ranks_lose_nothing(rows: int, world: int) -> None:
    schedule = Schedule([10] * rows, 20, seed=0)
    per_epoch = schedule.epoch_start(1)
    assert per_epoch == -(-rows // 2)
    steps = -(-per_epoch // world)
    packs = [p for s in range(steps) for row in schedule.window(s, 1, world) for p in row]
    assert sorted(i for p in packs[:per_epoch] for i in p) == list(range(rows))
    assert all(packs), "a rank got an empty pack"


def test_window_is_the_same_stream_for_every_split() -> None:
    schedule = Schedule(LENGTHS, 100, seed=3)
    for step in (0, 5, 40):
        flat = [schedule.pack(step * 4 + i) for i in range(4)]
        assert schedule.window(step, 4, 1) == [[p] for p in flat]
        assert schedule.window(step, 1, 4) == [flat]
        assert schedule.window(step, 2, 2) == [flat[:2], flat[2:]]


def test_nonsense_is_refused() -> None:
    for lengths, budget in (([], 10), ([3, 0], 10), ([3], 0)):
        with pytest.raises(AssertionError):
            Schedule(lengths, budget, seed=0)
