"""The draft vocabulary map."""

from __future__ import annotations

import pytest
import torch

from eagle_train.draft.vocab import DraftVocab, count_draft_vocab, tokens_to_keep
from eagle_train.errors import UserError


def sample(prompt: list[int], answer: list[int]) -> tuple[list[int], list[bool]]:
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def test_most_frequent_supervised_tokens_and_their_coverage() -> None:
    rows = [sample([9] * 50, [5, 5, 5, 7, 7, 3]), sample([9], [7, 2])]
    vocab, coverage = count_draft_vocab(iter(rows), 20, 3, always=[19])
    assert vocab.ids.tolist() == [5, 7, 19]
    assert vocab.d2t.tolist() == [5, 6, 17]
    assert vocab.t2d.nonzero().flatten().tolist() == [5, 7, 19]
    assert coverage == 6 / 8
    assert not vocab.is_full


def test_ties_go_to_the_lower_id_whatever_the_order_of_rows() -> None:
    rows = [sample([0], [i]) for i in (8, 4, 6, 2)]
    forwards, _ = count_draft_vocab(rows, 10, 2, always=[])
    backwards, _ = count_draft_vocab(rows[::-1], 10, 2, always=[])
    assert forwards.ids.tolist() == backwards.ids.tolist() == [2, 4]
    assert forwards.hash() == backwards.hash()


def test_ten_distinct_tokens_and_a_draft_vocabulary_of_32() -> None:
    vocab, coverage = count_draft_vocab([sample([1], list(range(100, 110)))], 1024, 32, always=[3, 1000])
    assert (vocab.size, vocab.vocab_size, coverage) == (32, 1024, 1.0)
    ids = vocab.ids.tolist()
    assert ids == sorted(set(ids))
    assert ids == [*range(21), *range(100, 110), 1000]
    assert int(vocab.t2d.sum()) == 32


def test_special_tokens_seen_in_answers_are_kept() -> None:
    rows = [sample([50, 51], [7] * 9 + [52]), sample([53], [8] * 9)]
    keep = tokens_to_keep(rows, ends=[2], special=[2, 50, 51, 52, 53])
    assert keep == {2, 52}
    vocab, coverage = count_draft_vocab(rows, 60, 3, keep)
    assert vocab.ids.tolist() == [2, 7, 52]
    assert coverage == 10 / 19


@pytest.mark.parametrize("size", [0, 60])
def test_full_vocabulary(size: int) -> None:
    vocab, coverage = count_draft_vocab([sample([1], [2, 3])], 60, size, always=[2])
    assert vocab.is_full
    assert coverage == 1.0
    assert torch.equal(vocab.ids, torch.arange(60))
    assert vocab.hash() == DraftVocab.full(60).hash()


@pytest.mark.parametrize(
    ("size", "always", "answer", "message"),
    [
        (61, [], [2], "expected 0 .* to 60"),
        (-1, [], [2], "expected 0 .* to 60"),
        (2, [1, 2, 3], [2], "3 must always be in"),
        (2, [60], [2], r"\[60\] lie outside"),
        (2, [], [99], r"\[99\] lie outside"),
        (2, [], [], "no supervised token"),
    ],
)
def test_refusals(size: int, always: list[int], answer: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        count_draft_vocab([sample([1], answer)], 60, size, always)


def test_hash_tells_maps_apart_and_a_torn_map_is_refused() -> None:
    one, two = DraftVocab.of([1, 5], 8), DraftVocab.of([1, 6], 8)
    assert one.hash() != two.hash()
    assert one.hash() == DraftVocab.of({5, 1}, 8).hash()
    with pytest.raises(AssertionError):
        DraftVocab(one.d2t, two.t2d)
