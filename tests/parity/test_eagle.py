"""EAGLE-1 and HASS on the EAGLE-1 head: alignment by gradients, one loss by two roads, decoding, noise.

    row i, depth k      input                                  position   output       and by the target's lm_head
    k = 0               emb(x_{i+1}),   last_i                 i          last_{i+1}   x_{i+2}
    k                   emb(x_{i+1+k}), row i's output at k−1  i+k        last_{i+1+k} x_{i+2+k}

The drawn conversation and its trained rows are those of test_alignment.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from eagle_inference.cache import DraftCache
from eagle_inference.engine import SpeculativeEngine
from eagle_inference.sampling import SamplingParams
from eagle_train.algorithms.choose import BUILT_IN
from eagle_train.algorithms.eagle import Eagle
from eagle_train.algorithms.grade import Terms
from eagle_train.algorithms.hass import Hass
from eagle_train.algorithms.interface import Algorithm
from eagle_train.algorithms.losses import Loss
from eagle_train.algorithms.metrics import walked_acceptance
from eagle_train.algorithms.noise import Noise
from eagle_train.algorithms.teacher import Teacher
from eagle_train.algorithms.unroll import unroll
from eagle_train.config.applies import ALGORITHMS
from eagle_train.data.pack import Pack
from eagle_train.draft.checkpoint import read_head, write_head
from eagle_train.draft.eagle import EagleHead
from eagle_train.draft.head import DraftHead
from eagle_train.targets.hf import Target
from tests.parity import reference, tiny
from tests.parity.test_alignment import CELLS, DRAWN, IDS, places
from tests.parity.test_core import RAGGED, gradients, masks_instead, same

KL = Loss((("kl", 0.1),))
WITH_TOP_K = Loss((("kl", 0.1), ("top_k", 0.5)), top_k=5)
SILENT = Noise()


def hass(depths: int = 3, only: int | None = None) -> Hass:
    return Hass(Terms(tuple(float(only in (None, k)) for k in range(depths)), WITH_TOP_K, 1.0), SILENT)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target(layer_ids=())


@pytest.fixture(scope="module", params=[1, 2], ids=["one layer", "two layers"])
def head(request: pytest.FixtureRequest, target: Target) -> EagleHead:
    return tiny.eagle_head(target, num_layers=request.param)


@pytest.fixture(scope="module")
def pack(target: Target) -> Pack:
    documents = [(tiny.tokens(len(d), seed), tiny.answers(d)) for seed, d in enumerate(RAGGED)]
    return tiny.pack(target, documents)


@dataclass(frozen=True)
class Scene:
    """The drawn conversation behind another one that has no loss: `pack`, and where the drawn one starts."""

    target: Target
    head: EagleHead
    teacher: Teacher
    pack: Pack
    start: int


@pytest.fixture(scope="module")
def scene(target: Target) -> Scene:
    before, head = (IDS[20:27], tiny.answers("uuuuuuu")), tiny.eagle_head(target)
    pack = tiny.pack(target, [before, (IDS[: len(DRAWN)], tiny.answers(DRAWN))])
    return Scene(target, head, tiny.teacher(target, head), pack, len(before[0]))


def by_inputs(scene: Scene, algorithm: Algorithm, head: EagleHead, row: int) -> tuple[set[int], set[int], set[int]]:
    """What the loss of one row depends on: rows of `last` as input, as teacher, and rows of the embedding table.

    The others' losses are taken away by ending the answer after this row's reach, and beginning it there.
    """
    table = scene.target.embedding.clone().requires_grad_()
    read = scene.pack.last.clone().requires_grad_()
    fed = _Reads(head, read)
    head.attach(SimpleNamespace(embedding=scene.target.embedding, head_weight=scene.target.head_weight))
    head._embedding = table  # attach would detach it
    try:
        depth = len(algorithm.terms.weights) - 1  # type: ignore[attr-defined]
        mask = torch.zeros_like(scene.pack.mask)
        mask[scene.start + row + 1 : scene.start + row + 3 + depth] = True
        pack = replace(scene.pack, mask=mask)
        found = algorithm.results(fed, pack, scene.teacher)  # type: ignore[arg-type]
        assert found is not None and found.depths[depth].rows.tolist() == [scene.start + row]
        a, b = torch.autograd.grad(found.loss, [read, table])
        changed = set()
        for j in range(len(pack.ids)):
            last = pack.last.clone()
            last[j] = last[j].flip(0)
            other = algorithm.results(fed, replace(pack, last=last), scene.teacher)  # type: ignore[arg-type]
            changed |= {j} if other is not None and not torch.equal(other.loss, found.loss) else set()
    finally:
        head.attach(scene.target)
    return places(a), changed, places(b)


class _Reads:
    """A head that reads other states than the pack's, so that input and teacher can be told apart."""

    def __init__(self, head: EagleHead, states: Tensor) -> None:
        self._head, self._states = head, states

    def reads(self, _pack: Pack) -> Tensor:
        return self._states

    def __getattr__(self, name: str) -> object:
        return getattr(self._head, name)


@pytest.mark.parametrize("row", [1, 2, 3, 8, 9])
def test_what_one_loss_of_eagle_depends_on(scene: Scene, row: int) -> None:
    """Row i: last of the document's places 0…i; tokens 1…i+1; compared with last_{i+1} alone."""
    a, i = scene.start, scene.start + row
    read, teachers, tokens = by_inputs(scene, Eagle(Terms((1.0,), KL, 1.0), SILENT), scene.head, row)
    assert read == set(range(a, i + 1))
    assert teachers == {i + 1}
    assert tokens == {IDS[j] for j in range(1, row + 2)}


@pytest.mark.parametrize(("row", "depth"), [c for c in CELLS if c[1]])
def test_what_one_loss_of_hass_depends_on(scene: Scene, row: int, depth: int) -> None:
    """Row i at depth k: last 0…i and tokens 1…i+1+k, both through keys; compared with last_{i+1+k} alone."""
    a, i = scene.start, scene.start + row
    read, teachers, tokens = by_inputs(scene, hass(depth + 1, only=depth), scene.head, row)
    assert read == set(range(a, i + 1)), "through the depth-0 keys"
    assert teachers == {i + 1 + depth}
    assert tokens == {IDS[j] for j in range(1, row + 2 + depth)}, "the last ones through its own deeper keys"


def test_states_are_detached_between_depths(scene: Scene) -> None:
    """Without attention a deeper loss reaches the inputs only through the states: not at all, and it would if fed."""
    head = tiny.eagle_head(scene.target)
    with torch.no_grad():
        head.layers[0].self_attn.o_proj.weight.zero_()  # type: ignore[union-attr, operator]
    read, _, tokens = by_inputs(scene, hass(3, only=2), head, 1)
    assert read == set() and tokens == {IDS[1 + 1 + 2]}
    fed = scene.pack.last.clone().requires_grad_()
    deepest = list(unroll(head, scene.pack, 3, scene.pack.runs(), states=fed))[2]
    assert places(torch.autograd.grad(deepest.hidden.sum(), fed)[0]) == {scene.start + 1}, "undetached: its own"


@pytest.mark.parametrize("by_token", [False, True], ids=["conversation", "token"])
@pytest.mark.parametrize("depths", [1, 3])
def test_losses_are_the_plain_ones(head: EagleHead, pack: Pack, target: Target, depths: int, by_token: bool) -> None:
    """Values and gradients against masks and autograd, in float64; the target's lm_head gets no gradient."""
    teacher = tiny.teacher(target, head)
    terms = Terms(tuple(0.7**k for k in range(depths)), WITH_TOP_K, 1.3, by_token)
    algorithm: Algorithm = Eagle(terms, SILENT) if depths == 1 else Hass(terms, SILENT)
    found = algorithm.results(head, pack, teacher)
    assert found is not None and not head.output_weight.requires_grad
    with masks_instead():
        expected = reference.losses(terms, head, pack, teacher, detach=depths > 1)
    torch.testing.assert_close([d.loss for d in found.depths], [e.detach() for e in expected], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.loss.detach(), sum(expected).detach(), rtol=1e-10, atol=1e-12)  # type: ignore[union-attr]
    same(gradients(found.loss, head), gradients(torch.stack(expected).sum(), head))


@torch.no_grad()
def test_unroll_is_step_by_step_decoding(head: EagleHead, pack: Pack) -> None:
    """A fresh cache for each row: rows up to i with true states, then step after step on the row's own."""
    seen, depths = 0, 4
    for found in unroll(head, pack, depths, pack.runs()):
        for i, hidden in zip(found.rows.tolist(), found.hidden, strict=True):
            start = next(a for a, b in pack.bounds if a <= i < b)
            cache, rows = DraftCache(head.config.num_layers, i - start + depths), slice(start, i + 1)
            state, emb = head.project(pack.last[rows]), head.embed(pack.ids[start + 1 : i + 2])
            ours = head.step(emb, state, pack.positions[rows], cache.attend)[-1:]
            cache.advance(i + 1 - start)
            for k in range(1, found.depth + 1):
                emb, position = head.embed(pack.ids[i + 1 + k, None]), torch.tensor([i - start + k])
                ours = head.step(emb, head.feedback(ours), position, cache.attend)
                cache.advance(1)
            torch.testing.assert_close(hidden, ours[0], rtol=1e-10, atol=1e-10)
            seen += 1
    assert seen == sum(len(rows) for rows in tiny.trained(pack.mask, pack.bounds, depths))


@torch.no_grad()
def test_the_step_by_its_definition(target: Target) -> None:
    """One row alone: fc on [embedding, state], attention without a norm before it (one key: its own value), the MLP."""
    head = tiny.eagle_head(target)
    w, emb, state = head.state_dict(), target.embedding[5, None], torch.randn(1, tiny.WIDTH, dtype=torch.float64)
    x = torch.cat([emb, state], 1) @ w["fc.weight"].mT
    value = (x @ w["layers.0.self_attn.v_proj.weight"].mT).view(2, 12).repeat_interleave(2, 0).flatten()[None]
    x = x + value @ w["layers.0.self_attn.o_proj.weight"].mT
    normed = torch.nn.functional.rms_norm(x, (tiny.WIDTH,), w["layers.0.post_attention_layernorm.weight"], tiny.EPS)
    gate = torch.nn.functional.silu(normed @ w["layers.0.mlp.gate_proj.weight"].mT)
    x = x + (gate * (normed @ w["layers.0.mlp.up_proj.weight"].mT)) @ w["layers.0.mlp.down_proj.weight"].mT
    ours = head.step(emb, state, torch.tensor([7]), DraftCache(1, 1).attend)
    torch.testing.assert_close(ours, x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(head.logits(ours), target.head(x), rtol=1e-12, atol=1e-12)


def heads(target: Target) -> Iterator[DraftHead]:
    """A random head, and one that repeats the target's state, which is right where the target repeats itself."""
    yield tiny.eagle_head(target, num_layers=2, qkv_bias=True)
    copying = tiny.eagle_head(target)
    with torch.no_grad():
        for p in copying.parameters():
            p.zero_()
        copying.fc.weight[:, tiny.WIDTH :] = torch.eye(tiny.WIDTH)
    yield copying


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_engine_serves_it_without_loss(family: str, k: int) -> None:
    """Greedy answers are the target's own; what the engine counts is what the unroll's walk counts."""
    target, params = tiny.target(family, layer_ids=(), vocab=7), SamplingParams(max_new_tokens=20)
    accepted = 0
    for head in heads(target):
        for seed in range(3):
            prompt = tiny.tokens(2 + seed, seed, vocab=7)
            plain = SpeculativeEngine(target, None).generate(prompt, params)
            answer = SpeculativeEngine(target, head, k).generate(prompt, params)
            assert answer.tokens == plain.tokens
            more = SpeculativeEngine(target, None).generate(prompt + answer.tokens, SamplingParams(max_new_tokens=k))
            text = (prompt + answer.tokens + more.tokens, len(prompt), len(prompt) + len(answer.tokens))
            walked = walked_acceptance(head, target, [text], k)
            assert (walked.drafts, walked.per_position) == (answer.acceptance.drafts, answer.acceptance.per_position)
            accepted += answer.acceptance.accepted
    assert accepted > 0


def test_a_head_read_from_its_folder_decodes_the_same(target: Target, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("eagle") / "head"
    head, prompt, params = tiny.eagle_head(target), tiny.tokens(6, 1), SamplingParams(max_new_tokens=15)
    write_head(folder, head, dtype=torch.float64)
    one, two = (SpeculativeEngine(target, h, 3).generate(prompt, params) for h in (head, read_head(folder)))
    assert one.tokens == two.tokens and one.acceptance == two.acceptance


def test_noise_is_a_function_of_the_draw_alone(pack: Pack) -> None:
    """Whatever it is packed with: the same name, the same bits; another name, others; none, none."""
    noise, names = Noise(0.1), tuple(f"0/3/{d}" for d in range(len(pack.bounds)))
    drawn = noise.on(pack.last, replace(pack, draws=names)) - pack.last
    assert 0.09 < drawn.abs().max() <= 0.1 and abs(float(drawn.mean())) < 0.01
    a, b = pack.bounds[3]
    alone = SimpleNamespace(draws=names[3:4], bounds=((0, b - a),))
    again = noise.on(pack.last[a:b], alone) - pack.last[a:b]  # type: ignore[arg-type]
    assert torch.equal(drawn[a:b], again)
    other = noise.on(pack.last, replace(pack, draws=tuple(f"0/4/{d}" for d in range(len(pack.bounds))))) - pack.last
    assert not torch.equal(drawn[a:b], other[a:b])
    assert noise.on(pack.last, pack) is pack.last, "an evaluation has no draws"
    assert Noise().on(pack.last, replace(pack, draws=names)) is pack.last


def test_noise_by_length(pack: Pack) -> None:
    """The released code's: 512 over the conversation's length, times the half-width."""
    names = tuple(map(str, range(len(pack.bounds))))
    drawn = Noise(0.1, 512).on(torch.zeros_like(pack.last), replace(pack, draws=names))
    for a, b in pack.bounds:
        assert 0.9 < float(drawn[a:b].abs().max()) / (0.1 * 512 / (b - a)) <= 1


def test_noise_is_on_the_input_only(head: EagleHead, pack: Pack, target: Target) -> None:
    """A noisy run's loss is the plain one of noisy inputs against clean targets."""
    teacher, terms = tiny.teacher(target, head), Terms((1.0, 1.0), WITH_TOP_K, 1.0)
    drawn = replace(pack, draws=tuple(map(str, range(len(pack.bounds)))))
    found = Hass(terms, Noise(0.3)).results(head, drawn, teacher)
    states = Noise(0.3).on(pack.last, drawn)
    with masks_instead():
        expected = reference.losses(terms, head, pack, teacher, states=states, detach=True)
    assert found is not None
    torch.testing.assert_close(found.loss, torch.stack(expected).sum(), rtol=1e-10, atol=1e-12)
    clean = Hass(terms, Noise(0.3)).results(head, pack, teacher)
    assert clean is not None and clean.loss != found.loss


def test_the_tables_are_never_trained_or_saved(target: Target) -> None:
    head = tiny.eagle_head(target)
    names = {name.split(".")[0] for name, _ in head.named_parameters()}
    assert names == {"fc", "layers"} == {name.split(".")[0] for name in head.state_dict()}


def test_each_algorithm_teaches_the_head_that_the_settings_say() -> None:
    assert {name: kind.teaches for name, kind in BUILT_IN.items()} == ALGORITHMS
