"""The fused core against its plainest form, on ragged packs: exact in float64, near in bfloat16."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle_train.algorithms import fused
from eagle_train.algorithms import unroll as unrolling
from eagle_train.algorithms.eagle3 import Eagle3
from eagle_train.algorithms.losses import Loss
from eagle_train.algorithms.unroll import Span, UnrollMemory, spans_of
from eagle_train.config.schema import LOSSES
from eagle_train.data.pack import Pack
from eagle_train.device import attention as device_attention
from eagle_train.device.attention import attention, attention_backward, blocked, blocked_backward
from eagle_train.draft.eagle3 import Eagle3Head
from eagle_train.draft.layers import RMSNorm
from eagle_train.targets.hf import Target
from tests.parity import reference, tiny

WEIGHTS = (1.0, 0.8, 0.64, 0.5)
# Answers at the start, in turns, of one token (nothing to train), of two, up to the last token; a silent document.
RAGGED = ["uaaaaauuaaaa", "aaaau", "uuu", "uuaaaaa", "auaauaaauaaaaua", "uuuuuuaaaaaaaaaaaa"]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@pytest.fixture(scope="module", params=[1, 2], ids=["one layer", "two layers"])
def head(request: pytest.FixtureRequest, target: Target) -> Eagle3Head:
    return tiny.head(target, replace(tiny.head_config(target, 40), num_layers=request.param, qk_norm=True))


@pytest.fixture(scope="module")
def pack(target: Target, head: Eagle3Head) -> Pack:
    documents = [(tiny.tokens(len(d), seed), tiny.answers(d)) for seed, d in enumerate(RAGGED)]
    return tiny.pack(target, documents, tiny.teacher(target, head))


@contextmanager
def masks_instead() -> Iterator[None]:
    kept = unrolling.UnrollMemory
    unrolling.UnrollMemory = reference.MaskedMemory  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        unrolling.UnrollMemory = kept  # type: ignore[misc]


def gradients(loss: Tensor, head: Eagle3Head) -> dict[str, Tensor]:
    named = dict(head.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor], rtol: float = 1e-10) -> None:
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0, name
        gap = (ours[name] - gradient).norm() / gradient.norm()
        assert gap <= rtol, f"{name}: {gap:.2e}"


@pytest.mark.parametrize("mean", ["conversation", "token"])
@pytest.mark.parametrize("text", [*[((kind, 1.0),) for kind in LOSSES], (("kl", 0.7), ("lk", 0.2), ("top_k", 0.1))])
def test_core_is_the_plain_one(
    head: Eagle3Head, pack: Pack, target: Target, text: tuple[tuple[str, float], ...], mean: str
) -> None:
    teacher = tiny.teacher(target, head)
    algorithm = Eagle3(WEIGHTS, Loss(text, top_k=5), by_token=mean == "token")
    found = algorithm.results(head, pack, teacher)
    assert found is not None
    with masks_instead():
        expected = reference.losses(algorithm.terms, head, pack, teacher)
    torch.testing.assert_close([d.loss for d in found.depths], [e.detach() for e in expected], rtol=1e-10, atol=1e-12)
    same(gradients(found.loss, head), gradients(torch.stack(expected).sum(), head))


@pytest.mark.parametrize("rows", [16, 40, 4096])
def test_slices_change_nothing(
    head: Eagle3Head, pack: Pack, target: Target, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures, losses and gradients, whatever the slice: the teacher's positions are cut at every possible place."""
    teacher, algorithm = tiny.teacher(target, head), Eagle3(WEIGHTS, Loss((("lk_hybrid", 1.0),)))
    whole = algorithm.results(head, pack, teacher, detailed=True)
    monkeypatch.setattr(fused, "SLICE_ROWS", rows)
    parts = algorithm.results(head, pack, teacher, detailed=True)
    assert whole is not None and parts is not None
    for a, b in zip(whole.depths, parts.depths, strict=True):
        torch.testing.assert_close((a.loss, a.accept, a.alpha), (b.loss, b.accept, b.alpha), rtol=1e-12, atol=1e-14)
        assert torch.equal(a.correct, b.correct) and a.outside == b.outside and len(a.correct) == len(a.rows)
    same(gradients(parts.loss, head), gradients(whole.loss, head), rtol=1e-12)


def test_without_gradients_the_loss_is_the_same(head: Eagle3Head, pack: Pack, target: Target) -> None:
    teacher, algorithm = tiny.teacher(target, head), Eagle3(WEIGHTS)
    with torch.no_grad():
        silent = algorithm.results(head, pack, teacher)
    learning = algorithm.results(head, pack, teacher)
    assert silent is not None and learning is not None
    assert torch.equal(silent.loss, learning.loss.detach()) and not silent.loss.requires_grad


def test_a_scaled_loss_has_scaled_gradients(head: Eagle3Head, pack: Pack, target: Target) -> None:
    teacher, algorithm = tiny.teacher(target, head), Eagle3(WEIGHTS)
    one, three = algorithm.results(head, pack, teacher), algorithm.results(head, pack, teacher)
    assert one is not None and three is not None
    ones, threes = gradients(one.loss, head), gradients(three.loss * 3, head)
    same(threes, {name: g * 3 for name, g in ones.items()}, rtol=1e-12)


def test_a_second_backward_is_refused(head: Eagle3Head, pack: Pack, target: Target) -> None:
    found = Eagle3(WEIGHTS).results(head, pack, tiny.teacher(target, head))
    assert found is not None
    found.loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="ran before"):
        found.loss.backward()
    head.zero_grad(set_to_none=True)


def test_a_frozen_lm_head_gets_no_gradient(head: Eagle3Head, pack: Pack, target: Target) -> None:
    teacher, algorithm = tiny.teacher(target, head), Eagle3(WEIGHTS)
    first = algorithm.results(head, pack, teacher)
    head.lm_head.weight.requires_grad_(False)
    try:
        second = algorithm.results(head, pack, teacher)
        assert first is not None and second is not None
        name = "midlayer.mlp.up_proj.weight"
        weight = dict(head.named_parameters())[name]
        torch.testing.assert_close(torch.autograd.grad(second.loss, weight), torch.autograd.grad(first.loss, weight))
    finally:
        head.lm_head.weight.requires_grad_(True)


def test_bfloat16_stays_near(target: Target) -> None:
    """Autocast against float32: the loss within 2 %, each gradient within 10 % of its norm."""
    head = tiny.head(target, tiny.head_config(target, 40)).float()
    documents = [(tiny.tokens(len(d), seed), tiny.answers(d)) for seed, d in enumerate(RAGGED)]
    pack = tiny.pack(target, documents, tiny.teacher(target, head))
    pack = replace(pack, streams=pack.streams.float(), last=pack.last.float())
    given = tiny.teacher(target, head)
    teacher = replace(given, head=lambda x: x @ target.head_weight.float().mT, draft_rows=given.draft_rows.float())
    algorithm = Eagle3(WEIGHTS)
    exact = algorithm.results(head, pack, teacher)
    with torch.autocast("cpu", torch.bfloat16):
        rough = algorithm.results(head, pack, teacher)
    assert exact is not None and rough is not None
    torch.testing.assert_close(rough.loss, exact.loss, rtol=0.02, atol=0)
    same(gradients(rough.loss, head), gradients(exact.loss, head), rtol=0.1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_the_kernel_is_the_blocked_attention(
    heads: tuple[int, int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, the backward with a log-sum-exp that counts keys the kernel never sees."""
    monkeypatch.setattr(device_attention, "BLOCK_SCORES", 1)  # blocks of 32 rows: the last one is a short one
    generator = torch.Generator().manual_seed(0)
    queries, groups = heads
    q = torch.randn(37, queries, 12, generator=generator, dtype=torch.float64).transpose(0, 1)[None]
    length = 37 if causal else 21
    k, v = (
        torch.randn(length, groups, 12, generator=generator, dtype=torch.float64).transpose(0, 1)[None] for _ in "kv"
    )
    ours, theirs = attention(q, k, v, causal, 0.3), blocked(q, k, v, causal, 0.3)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    out, lse = torch.randn(37, queries, 12, generator=generator, dtype=torch.float64), ours[1] + 0.5
    lse = lse[0].t().contiguous().t()[None]
    grad = torch.randn(37, queries, 12, generator=generator, dtype=torch.float64)
    merged = (grad.transpose(0, 1)[None], q, k, v, out.transpose(0, 1)[None], lse, causal, 0.3)
    torch.testing.assert_close(attention_backward(*merged), blocked_backward(*merged), rtol=1e-12, atol=1e-12)


def test_rows_that_no_span_names_give_and_get_nothing() -> None:
    memory = UnrollMemory([Span(0, 2, 4, 0)], [(0, 5)], 1)
    q, k, v = (torch.randn(3, 2, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    base = [torch.randn(5, 2, 4, dtype=torch.float64).requires_grad_() for _ in "kv"]
    memory.attend(0, q, *base)
    out = memory.attend(0, q, k, v)
    gq, gk, gbase = torch.autograd.grad(out[:2].sum(), [q, k, base[0]])
    assert gq[:2].abs().min() > 0 and not gq[2].any() and not gk[2].any()
    assert not gbase[4].any(), "the key after the span's last row"


def test_spans() -> None:
    assert spans_of([1, 2, 3, 4, 7, 9, 10], [(0, 3), (3, 8), (8, 12)]) == [
        Span(0, 1, 3, 0), Span(3, 3, 5, 2), Span(3, 7, 8, 4), Span(8, 9, 11, 5),
    ]  # fmt: skip
    assert spans_of([], [(0, 3)]) == []


def test_norm_has_the_right_gradient() -> None:
    norm = RMSNorm(7, 1e-5).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 3, 7, dtype=torch.float64, requires_grad=True)  # [rows, heads, size], as q/k norms have it
    assert torch.autograd.gradcheck(norm, (x,))
    theirs = torch.nn.functional.rms_norm(x, (7,), norm.weight, 1e-5)
    torch.testing.assert_close(norm(x), theirs, rtol=1e-12, atol=1e-12)
    grad = torch.randn(5, 3, 7, dtype=torch.float64)
    ours = torch.autograd.grad(norm(x), norm.weight, grad)
    torch.testing.assert_close(ours, torch.autograd.grad(theirs, norm.weight, grad), rtol=1e-12, atol=1e-12)


def test_split_as_you_like() -> None:
    """scripts/invariance.py: 20 steps, packed or apart, in another order, in two micro-batches, padded twice as far."""
    path = Path(__file__).resolve().parents[2] / "scripts" / "invariance.py"
    spec = importlib.util.spec_from_file_location("invariance", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["invariance"] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    found = module.distances()
    assert len(found) == 4 and max(found.values()) <= 1e-9, found
