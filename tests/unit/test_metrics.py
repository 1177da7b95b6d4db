"""Acceptance figures against hand-counted runs."""

from __future__ import annotations

import json

import pytest

from eagle_inference.metrics import Acceptance, AcceptanceCounter


def count(chains: list[tuple[int, int]]) -> Acceptance:
    counter = AcceptanceCounter()
    for drafted, accepted in chains:
        counter.add(drafted, accepted)
    return counter.result()


def test_hand_counted_run() -> None:
    seen = count([(3, 3), (3, 1), (3, 0), (3, 1)])
    assert (seen.drafts, seen.drafted, seen.accepted, seen.per_position) == (4, 12, 5, (3, 1, 1))
    assert seen.acceptance_length == 2.25
    assert seen.draft_acceptance_rate == 5 / 12
    assert seen.rates == (0.75, 0.25, 0.25)
    assert seen.conditional_rates == (0.75, 1 / 3, 1.0)
    assert seen.acceptance_length == pytest.approx(1 + sum(seen.rates))


def test_zero_drafts() -> None:
    for seen in (AcceptanceCounter().result(), count([(0, 0)]), Acceptance.merge([])):
        assert (seen.drafts, seen.acceptance_length, seen.draft_acceptance_rate) == (0, 1.0, 0.0)
        assert seen.rates == seen.conditional_rates == ()
        json.dumps(seen.to_dict(), allow_nan=False)


def test_nothing_accepted_keeps_its_positions() -> None:
    seen = count([(3, 0), (3, 0)])
    assert seen.per_position == (0, 0, 0)
    assert seen.acceptance_length == 1.0
    assert seen.conditional_rates == (0.0, 0.0, 0.0)


def test_short_chain_counts_against_every_position() -> None:
    # A chain of one, cut short by the context's end, is still one of the "all drafts" under position 1 and 2.
    seen = count([(1, 1), (3, 3)])
    assert seen.rates == (1.0, 0.5, 0.5)
    assert seen.drafted == 4


def test_kept_figure_stands_beside() -> None:
    counter = AcceptanceCounter()
    for accepted, kept in ((3, 3), (3, 1)):
        counter.add(3, accepted)
        counter.add_kept(kept)
    seen = counter.result()
    assert (seen.acceptance_length, seen.acceptance_length_kept) == (4.0, 3.0)
    assert count([(3, 3)]).acceptance_length_kept is None


def test_merge_equals_one_count() -> None:
    first, second = [(3, 2), (3, 0)], [(2, 2), (1, 1), (4, 4)]
    merged = Acceptance.merge([count(first), count(second), count([])])
    assert merged == count(first + second)
    assert merged.per_position == (4, 3, 1, 1)


def test_merge_keeps_the_cut_and_refuses_a_mix() -> None:
    cut, plain = Acceptance(1, 3, 2, (1, 1, 0), 1), Acceptance(1, 3, 2, (1, 1, 0))
    assert Acceptance.merge([cut, cut, count([])]).accepted_kept == 2
    with pytest.raises(AssertionError, match="1 of 2 runs"):
        Acceptance.merge([cut, plain])


def test_dict_is_json_and_complete() -> None:
    seen = json.loads(json.dumps(count([(2, 1), (2, 2)]).to_dict()))
    assert seen["acceptance_length"] == 2.5
    assert seen["rates"] == [1.0, 0.5]
    assert seen["per_position"] == [2, 1]
    assert (seen["drafts"], seen["drafted"], seen["accepted"], seen["accepted_kept"]) == (2, 4, 3, None)


@pytest.mark.parametrize(("drafted", "accepted"), [(3, 4), (3, -1), (-1, 0)])
def test_impossible_counts(drafted: int, accepted: int) -> None:
    with pytest.raises(AssertionError):
        AcceptanceCounter().add(drafted, accepted)


def test_impossible_result() -> None:
    with pytest.raises(AssertionError, match="do not add up"):
        Acceptance(1, 3, 2, (1, 0, 0))
    with pytest.raises(AssertionError, match="kept too many"):
        Acceptance(1, 3, 2, (1, 1, 0), 3)
