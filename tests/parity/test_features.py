"""A conversation whose states are not finite is left out and counted; its pack and its neighbours stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from eagle_train.algorithms.eagle3 import Eagle3
from eagle_train.data.types import Sample
from eagle_train.errors import UserError
from eagle_train.targets.hf import Features, Target
from eagle_train.train.features import FeatureSource
from tests.parity import tiny


def source(target: Target, count: int, broken: set[int], budget: int = 1 << 20) -> FeatureSource:
    """`count` conversations; the target gives NaN for the numbers in `broken`."""
    samples = [Sample(f"row {i}", tuple(tiny.tokens(12, i)), tuple(tiny.answers("uuuaaaaaaaaa"))) for i in range(count)]
    numbers = {s.ids: i for i, s in enumerate(samples)}
    whole = target.capture

    def capture(conversations: Sequence[Sequence[int]]) -> list[Features]:
        found = whole(conversations)
        return [
            replace(f, last=f.last * torch.nan) if numbers[tuple(ids)] in broken else f
            for ids, f in zip(conversations, found, strict=True)
        ]

    target.capture = capture  # type: ignore[method-assign]
    head = tiny.head(target, tiny.head_config(target, 40))
    return FeatureSource(samples, target, tiny.teacher(target, head), budget=budget)


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_one_is_left_out_and_counted(budget: int) -> None:
    target = tiny.target()
    found = source(target, 4, {2}, budget)
    head = tiny.head(target, tiny.head_config(target, 40))
    pack = found.pack([1, 2, 3])
    assert found.broken == {2: "row 2"}
    assert not pack.mask[12:24].any() and pack.mask[:12].any()
    results = Eagle3([1.0, 0.8]).results(head, pack, found.teacher)
    without = Eagle3([1.0, 0.8]).results(head, found.pack([1, 3]), found.teacher)
    assert results is not None and without is not None
    torch.testing.assert_close(results.loss, without.loss, rtol=1e-12, atol=0)
    for a, b in zip(
        torch.autograd.grad(results.loss, list(head.parameters())),
        torch.autograd.grad(without.loss, list(head.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_many_stop_the_run() -> None:
    found = source(tiny.target(), 6, {1, 2, 4})
    with pytest.raises(UserError, match=r"(?s)2 of 6 conversations are not finite.*train\.target_dtype=float32"):
        found.pack(range(6))
