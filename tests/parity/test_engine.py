"""The speculative loop against plain decoding, `generate`, fresh caches and the training unroll, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from eagle_inference.bench import continued
from eagle_inference.cache import DraftCache, TargetCache
from eagle_inference.engine import Generation, SpeculativeEngine, _Request
from eagle_inference.sampling import SamplingParams
from eagle_train.algorithms.metrics import walked_acceptance
from eagle_train.algorithms.unroll import unroll
from eagle_train.draft.checkpoint import read_head, write_head
from eagle_train.draft.eagle3 import Eagle3Head
from eagle_train.errors import UserError
from eagle_train.targets.hf import Target
from tests.parity import tiny

PROMPTS = [[5], tiny.tokens(4, seed=1), tiny.tokens(9, seed=2)]


def greedy(count: int, stop: Sequence[int] = ()) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, stop_ids=tuple(stop))


def plain(target: Target, prompt: list[int], params: SamplingParams) -> Generation:
    return SpeculativeEngine(target, None).generate(prompt, params)


def reference(target: Target, prompt: list[int], params: SamplingParams) -> list[int]:
    """`generate`'s answer."""
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=params.max_new_tokens,
        do_sample=False,
        eos_token_id=list(params.stop_ids) or None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def target(request: pytest.FixtureRequest) -> Target:
    return tiny.target(request.param)


@pytest.fixture(scope="module")
def llama() -> Target:
    return tiny.target()


@dataclass(frozen=True)
class Chain:
    """The hand-set target, float64, with heads that went through a folder: all right, partly right, all wrong."""

    target: Target
    perfect: Eagle3Head
    partial: Eagle3Head
    wrong: Eagle3Head
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    folder, hand = tmp_path_factory.mktemp("chain"), tiny.handset()
    target_path, head_path = hand.write_chain(folder)
    _, broken_path = hand.write_chain(folder, broken=True)
    target = Target.load(target_path, dtype=torch.float64, layer_ids=hand.LAYER_IDS)
    target.model.generation_config.eos_token_id = None
    with pytest.raises(UserError, match="disagree"):
        read_head(broken_path)
    perfect, partial, broken = (read_head(head_path) for _ in range(3))
    broken.d2t.zero_()
    with torch.no_grad():  # a third of the tokens is drafted as their neighbour in the vocabulary
        rows = torch.arange(0, len(partial.d2t) - 1, 3)
        swapped = partial.lm_head.weight.clone()
        swapped[rows], swapped[rows + 1] = partial.lm_head.weight[rows + 1], partial.lm_head.weight[rows]
        partial.lm_head.weight.copy_(swapped)
    heads = [through_folder(folder / f"again{n}", h) for n, h in enumerate((perfect, partial))]
    return Chain(target, *heads, broken.double(), hand.prompts(3))


def through_folder(folder: Path, head: Eagle3Head) -> Eagle3Head:
    """Written and read back, in float64."""
    write_head(folder, head.double(), dtype=torch.float64)
    return read_head(folder)


@pytest.fixture(scope="module")
def references(llama: Target) -> list[list[int]]:
    """21 tokens for each prompt, by `generate`; plain decoding says the same."""
    found = [reference(llama, prompt, greedy(21)) for prompt in PROMPTS]
    assert found == [plain(llama, prompt, greedy(21)).tokens for prompt in PROMPTS]
    return found


@pytest.mark.parametrize("k", range(1, 8))
def test_greedy_identity_for_every_k(llama: Target, references: list[list[int]], k: int) -> None:
    """Random heads of all kinds: whatever is drafted, the answer is the target's own."""
    options = [{}, {"num_layers": 2}, {"fc_norm": True, "norm_output": True}, {"norm_before_residual": True}]
    config = replace(tiny.head_config(llama, 20), **options[k % 4])
    engine, params = SpeculativeEngine(llama, tiny.head(llama, config, seed=k), k), greedy(21)
    for prompt, wanted in zip(PROMPTS, references, strict=True):
        answer = engine.generate(prompt, params)
        assert answer.tokens == wanted
        assert answer.finish == "length" and answer.acceptance.drafted == k * answer.cycles
        assert answer.acceptance.drafts == answer.cycles


def test_greedy_identity_for_every_family(target: Target, tmp_path: Path) -> None:
    """With stop tokens too, and a head with biases that was written and read."""
    head = tiny.head(target, replace(tiny.head_config(target), qkv_bias=True))
    engine = SpeculativeEngine(target, through_folder(tmp_path / "head", head), 3)
    for prompt in PROMPTS:
        free = plain(target, prompt, greedy(18))
        for params in (greedy(18), greedy(18, [free.tokens[11], free.tokens[7]]), greedy(18, free.tokens[:1])):
            answer = engine.generate(prompt, params)
            assert answer.tokens == plain(target, prompt, params).tokens == reference(target, prompt, params)
            assert answer.finish == ("stop" if params.stop_ids else "length")


def test_always_wrong_head_accepts_nothing(llama: Target, tmp_path: Path) -> None:
    """A draft vocabulary of tokens that the target never says."""
    params = greedy(20)
    said = {t for prompt in PROMPTS for t in plain(llama, prompt, params).tokens}
    never = sorted(set(range(tiny.VOCAB)) - said)
    head = tiny.head(llama, tiny.head_config(llama, len(never)), ids=never)
    engine = SpeculativeEngine(llama, through_folder(tmp_path / "head", head), 4)
    for prompt in PROMPTS:
        answer = engine.generate(prompt, params)
        assert answer.tokens == plain(llama, prompt, params).tokens
        assert answer.acceptance.acceptance_length == 1.0 and answer.acceptance.per_position == (0, 0, 0, 0)
        assert answer.cycles == 19, "the first token comes from the prefill"


@pytest.mark.parametrize("k", [1, 3, 6])
def test_perfect_head_accepts_everything(chain: Chain, k: int) -> None:
    engine, params = SpeculativeEngine(chain.target, chain.perfect, k), greedy(2 + 4 * (k + 1))
    for prompt in chain.prompts:
        answer = engine.generate(prompt, params)
        assert answer.tokens == plain(chain.target, prompt, params).tokens == reference(chain.target, prompt, params)
        assert answer.acceptance.acceptance_length == k + 1 and answer.cycles == 5
        assert answer.acceptance.per_position == (5,) * k


def test_broken_map_accepts_nothing(chain: Chain) -> None:
    answer = SpeculativeEngine(chain.target, chain.wrong, 3).generate(chain.prompts[1], greedy(12))
    assert answer.acceptance.acceptance_length == 1.0
    assert answer.tokens == plain(chain.target, chain.prompts[1], greedy(12)).tokens


@pytest.mark.parametrize("place", range(10))
def test_stop_and_limit_inside_a_draft(chain: Chain, place: int) -> None:
    """K = 4 and all accepted: chains end at places 0, 5, 10; an answer may end anywhere between."""
    engine, prompt = SpeculativeEngine(chain.target, chain.perfect, 4), chain.prompts[0]
    assert len(prompt) == 1
    free = plain(chain.target, prompt, greedy(14)).tokens
    for params, finish in ((greedy(14, [free[place]]), "stop"), (greedy(place + 1), "length")):
        answer = engine.generate(prompt, params)
        assert (answer.tokens, answer.finish) == (free[: place + 1], finish)
        assert answer.tokens == plain(chain.target, prompt, params).tokens == reference(chain.target, prompt, params)
        counted, cycles = answer.acceptance, -(-place // 5)
        assert (counted.drafts, counted.accepted) == (cycles, 4 * cycles), "counted before the cut"
        assert (counted.accepted_kept or 0) == place - place // 5, "of these, without the target's own"


@pytest.mark.parametrize("left", range(1, 9))
def test_context_edge(chain: Chain, left: int) -> None:
    """The context ends `left` tokens after the prompt; the token just outside must not count, even as a stop."""
    hand = tiny.handset()
    limit = chain.target.config.max_position_embeddings
    free = plain(chain.target, chain.prompts[1], greedy(12)).tokens
    chain.target.config.max_position_embeddings = len(chain.prompts[1]) + left
    try:
        for head in (chain.perfect, chain.partial, chain.wrong):
            engine = SpeculativeEngine(chain.target, head, 4)
            for stop in ([], free[left : left + 1], free[left - 1 : left]):
                params = greedy(12, stop)
                answer, baseline = (
                    engine.generate(chain.prompts[1], params),
                    plain(chain.target, chain.prompts[1], params),
                )
                assert (answer.tokens, answer.finish) == (baseline.tokens, baseline.finish)
                assert answer.tokens == free[:left]
                assert answer.finish == ("stop" if stop == free[left - 1 : left] else "context")
        assert (
            SpeculativeEngine(chain.target, chain.perfect, 4).generate(chain.prompts[1], greedy(left)).finish
            == "length"
        )
    finally:
        chain.target.config.max_position_embeddings = limit
    assert limit == hand.CONTEXT


def test_bad_requests(llama: Target) -> None:
    config = tiny.head_config(llama)
    engine = SpeculativeEngine(llama, tiny.head(llama, config), 2)
    for prompt, word in (
        ([], "empty"),
        ([1] * tiny.CONTEXT, "context"),
        ([tiny.VOCAB], "vocabulary"),
        ([-1], "run from"),
    ):
        with pytest.raises(UserError, match=word):
            engine.generate(prompt, greedy(3))
    with pytest.raises(UserError, match="at least one draft"):
        SpeculativeEngine(llama, tiny.head(llama, config), 0)
    with pytest.raises(UserError, match=r"layer ids \[1, 4, 5\] against \[2, 4, 5\]"):
        SpeculativeEngine(llama, tiny.head(llama, replace(config, layer_ids=(1, 4, 5))), 2)
    with pytest.raises(UserError, match="vocabulary 61 against the target's 50"):
        SpeculativeEngine(tiny.target(vocab=50), tiny.head(llama, config), 2)


class Watched(_Request):
    """A request that keeps what it drafted."""

    drafted: list[int]

    def _draft(self) -> list[int]:
        self.drafted = super()._draft()
        return self.drafted


@torch.no_grad()
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("kind", ["random", "partial", "perfect"])
def test_caches_and_drafts_after_every_cycle(llama: Target, chain: Chain, kind: str, k: int) -> None:
    """The target's cache is a fresh prefill's, the draft's a fresh run's, and the drafts are the unroll's."""
    if kind == "random":
        config = replace(tiny.head_config(llama, 30), num_layers=2, norm_output=True, qk_norm=True)
        target, head, prompt = llama, tiny.head(llama, config), PROMPTS[1]
    else:
        target, prompt = chain.target, chain.prompts[2]
        head = chain.partial if kind == "partial" else chain.perfect
    engine = SpeculativeEngine(target, head, k)
    request = Watched(engine, prompt, greedy(40), len(prompt) + 40)
    assert request.prefill() is None
    check_target_cache(request)
    for _ in range(7):
        before = list(request.tokens)
        assert request.cycle() is None
        check_target_cache(request)
        check_draft_cache(request, head)
        assert request.drafted == by_unroll(target, head, before, request.drafted)
    assert request.counter.result().drafts == 7


def check_target_cache(request: _Request) -> None:
    target, held = request.engine.target, request.tokens[:-1]
    assert request.target_cache.length == len(held), "all but the newest token"
    fresh = TargetCache(target.num_layers, len(held))
    target.forward(torch.tensor(held), fresh.cache)
    for ours, theirs in zip(request.target_cache.snapshot(), fresh.snapshot(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def check_draft_cache(request: _Request, head: Eagle3Head) -> None:
    rows = request.draft_cache.length
    assert request.states is not None and rows + request.states.shape[0] == len(request.tokens) - 1
    fresh = DraftCache(head.config.num_layers, rows)
    ids = torch.tensor(request.tokens[: rows + 1])
    streams = request.engine.target.forward(ids[:rows]).streams
    head.step(head.embed(ids[1:]), head.project(streams), torch.arange(rows), fresh.attend)
    for layer in range(head.config.num_layers):
        for ours, theirs in ((request.draft_cache._keys, fresh._keys), (request.draft_cache._values, fresh._values)):
            mine, new = ours[layer], theirs[layer]
            assert mine is not None and new is not None
            torch.testing.assert_close(mine[:rows], new, rtol=1e-9, atol=1e-9)


def by_unroll(target: Target, head: Eagle3Head, tokens: list[int], drafts: list[int]) -> list[int]:
    """What training's unroll proposes in the row that the engine drafted from, fed with the engine's own drafts."""
    row, ids = len(tokens) - 2, [*tokens, *drafts]
    pack = tiny.pack(target, [(ids, [j > row for j in range(len(ids))])])
    choices = []
    for depth in unroll(head, pack, len(drafts), pack.runs()):
        logits = head.logits(depth.hidden[depth.rows == row])
        choices.append(int(head.target_ids(logits.argmax(-1))))
    return choices


def texts(target: Target, answers: list[tuple[list[int], Generation]], k: int) -> list[tuple[list[int], int, int]]:
    """As an evaluation hands them to the walk."""
    return [(continued(target, p, a.tokens, k), len(p), len(p) + len(a.tokens)) for p, a in answers]


@pytest.mark.parametrize("k", [1, 3, 5])
def test_walked_is_what_the_engine_counts(chain: Chain, k: int) -> None:
    """Draft by draft: one free answer per prompt, and the same one stopped at several places, so inside drafts too."""
    target, head = chain.target, chain.partial
    engine, cut_inside = SpeculativeEngine(target, head, k), 0
    for prompt in chain.prompts:
        free = engine.generate(prompt, greedy(20))
        answers = [free] + [engine.generate(prompt, greedy(20, [free.tokens[place]])) for place in (4, 6, 9, 11)]
        for answer in answers:
            walked = walked_acceptance(head, target, texts(target, [(prompt, answer)], k), k)
            counted = answer.acceptance
            assert (walked.drafts, walked.per_position) == (counted.drafts, counted.per_position)
            assert walked.acceptance_length == counted.acceptance_length
            cut_inside += counted.accepted_kept != counted.accepted
        assert 0 < free.acceptance.accepted < free.acceptance.drafted, "neither perfect nor useless"
    assert cut_inside or k == 1, "some answers ended inside a draft"
    together = [(p, engine.generate(p, greedy(12))) for p in chain.prompts]
    walked = walked_acceptance(head, target, texts(target, together, k), k)
    assert walked.drafts == sum(a.acceptance.drafts for _, a in together)
    assert sum(walked.per_position) == sum(a.acceptance.accepted for _, a in together)


def test_walked_at_the_context_edge(chain: Chain) -> None:
    limit = chain.target.config.max_position_embeddings
    prompt = chain.prompts[2]
    try:
        for left in range(1, 12):
            chain.target.config.max_position_embeddings = len(prompt) + left
            answer = SpeculativeEngine(chain.target, chain.partial, 4).generate(prompt, greedy(30))
            assert answer.finish == "context"
            walked = walked_acceptance(chain.partial, chain.target, texts(chain.target, [(prompt, answer)], 4), 4)
            counted = answer.acceptance
            assert (walked.drafts, sum(walked.per_position)) == (counted.drafts, counted.accepted)
    finally:
        chain.target.config.max_position_embeddings = limit


def test_walked_on_random_text() -> None:
    """A small vocabulary, where a random head is right by chance now and then."""
    target = tiny.target("qwen3", vocab=7)
    head, accepted = tiny.head(target, replace(tiny.head_config(target), fc_norm=True)), 0
    engine = SpeculativeEngine(target, head, 3)
    for seed in range(6):
        prompt = tiny.tokens(3 + seed, seed, vocab=7)
        answer = engine.generate(prompt, greedy(25))
        walked = walked_acceptance(head, target, texts(target, [(prompt, answer)], 3), 3)
        assert (walked.drafts, walked.per_position) == (answer.acceptance.drafts, answer.acceptance.per_position)
        accepted += answer.acceptance.accepted
    assert accepted > 3
