"""Verification gives the target's own distribution: proved by enumeration, checked by draws, and both shown to fail.

V tokens; the target and the drafter are fixed tables of logits, one row for every prefix.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_inference.sampling import Randomness, SamplingParams, SeededRandomness, probabilities
from eagle_inference.verify import Verdict, cut, verify_greedy, verify_one_hot
from eagle_train.errors import UserError

V = 5
DEEPEST = 3
# Up to DEEPEST tokens are out when the last cycle starts, and as many drafts follow them.
LONGEST_PREFIX = 2 * DEEPEST
Prefix = tuple[int, ...]
Verifier = Callable[[Sequence[int], Tensor, Randomness], Verdict]

PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.0, top_k=3),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "together": SamplingParams(temperature=1.4, top_k=4, top_p=0.85),
}


def table(seed: int) -> dict[Prefix, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        prefix: torch.randn(V, generator=generator, dtype=torch.float64)
        for length in range(LONGEST_PREFIX + 1)
        for prefix in itertools.product(range(V), repeat=length)
    }


TARGET = table(1)
# Half of its opinion is the target's, so that chains of every accepted length carry weight.
DRAFTER = {prefix: row + 0.5 * TARGET[prefix] for prefix, row in table(2).items()}


@functools.cache
def draft(prefix: Prefix, k: int, vocabulary: tuple[int, ...] = tuple(range(V))) -> Prefix:
    out = prefix
    for _ in range(k):
        out += (max(vocabulary, key=lambda token: float(DRAFTER[out][token])),)
    return out[len(prefix) :]


def target_rows(prefix: Prefix, drafts: Prefix) -> Tensor:
    return torch.stack([TARGET[prefix + drafts[:j]] for j in range(len(drafts) + 1)])


@functools.cache
def target_probs(prefix: Prefix, drafts: Prefix, params: SamplingParams) -> Tensor:
    return probabilities(target_rows(prefix, drafts), params)


@dataclass(frozen=True)
class Setting:
    params: SamplingParams
    k: int
    verifier: Verifier = verify_one_hot
    vocabulary: tuple[int, ...] = tuple(range(V))

    @property
    def emitted(self) -> int:
        """At least three tokens, and enough to see the bonus after a chain that was accepted whole."""
        return max(3, self.k + 1)

    def decode(self, randomness: Randomness) -> tuple[Prefix, int]:
        """The first `emitted` tokens of an answer and the drafts that were accepted on the way."""
        tokens: Prefix = ()
        accepted = 0
        while len(tokens) < self.emitted:
            drafts = draft(tokens, self.k, self.vocabulary)
            verdict = self.verifier(drafts, target_probs(tokens, drafts, self.params), randomness)
            tokens += verdict.tokens
            accepted += verdict.accepted
        return tokens[: self.emitted], accepted


class Branch:
    """A Randomness that follows a script of outcomes, then the first possible one, noting the roads not taken."""

    def __init__(self, script: Prefix) -> None:
        self.script = script
        self.taken: Prefix = ()
        self.weight = 1.0
        self.others: list[Prefix] = []

    def accept(self, p: float) -> bool:
        return self._decide([1.0 - p, p]) == 1

    def choose(self, p: Tensor) -> int:
        return self._decide(p.tolist())

    def _decide(self, weights: list[float]) -> int:
        possible = [outcome for outcome, weight in enumerate(weights) if weight > 0]
        if len(self.taken) < len(self.script):
            outcome = self.script[len(self.taken)]
        else:
            outcome = possible[0]
            self.others += [(*self.taken, other) for other in possible[1:]]
        self.taken += (outcome,)
        self.weight *= weights[outcome]
        return outcome


@functools.cache
def every_outcome(setting: Setting) -> tuple[tuple[Prefix, int, float], ...]:
    """Tokens, accepted drafts and weight of every road that chance can take."""
    open_roads: list[Prefix] = [()]
    outcomes = []
    while open_roads:
        branch = Branch(open_roads.pop())
        outcomes.append((*setting.decode(branch), branch.weight))
        open_roads += branch.others
    return tuple(outcomes)


def reference(logits: Tensor, params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p written out plainly, without the code under test."""
    scaled = [float(value) / params.temperature for value in logits]
    ranked = sorted(range(len(scaled)), key=lambda token: -scaled[token])[: params.top_k or None]
    mass = {token: math.exp(scaled[token]) for token in ranked}
    total, kept, reached = sum(mass.values()), set[int](), 0.0
    for token in ranked:
        if reached < params.top_p * total:
            kept.add(token)
            reached += mass[token]
    return [mass[token] / reached if token in kept else 0.0 for token in range(len(scaled))]


@functools.cache
def ancestral(params: SamplingParams, length: int) -> dict[Prefix, float]:
    joint: dict[Prefix, float] = {(): 1.0}
    for _ in range(length):
        joint = {
            (*prefix, token): weight * p
            for prefix, weight in joint.items()
            for token, p in enumerate(reference(TARGET[prefix], params))
        }
    return joint


def largest_errors(setting: Setting) -> dict[int, float]:
    """For the first token, the first three and all: the largest error of a probability in their joint."""
    errors = {}
    for length in {1, 3, setting.emitted}:
        found = dict.fromkeys(itertools.product(range(V), repeat=length), 0.0)
        for tokens, _, weight in every_outcome(setting):
            found[tokens[:length]] += weight
        wanted = ancestral(setting.params, length)
        errors[length] = max(abs(found[tokens] - wanted[tokens]) for tokens in found)
    return errors


def biased(
    drafts: Sequence[int], probs: Tensor, randomness: Randomness,
    eager: float = 1.0, left: float = 0.0, renormalise: bool = True, bonus_row: int = -1, warmth: float = 1.0,
) -> Verdict:  # fmt: skip
    """The same sampling written again, with one fault for each argument that is not at its default."""
    probs = torch.softmax(probs.log() / warmth, dim=-1)
    for j, token in enumerate(drafts):
        if not randomness.accept(min(1.0, eager * float(probs[j, token]))):
            rest = probs[j].clone()
            rest[token] *= left
            return Verdict(j, (*drafts[:j], randomness.choose(rest / rest.sum() if renormalise else rest)))
    return Verdict(len(drafts), (*drafts, randomness.choose(probs[bonus_row])))


FAULTS: dict[str, Verifier] = {
    "too eager": functools.partial(biased, eager=1.3),
    "rejected token stays": functools.partial(biased, left=1.0),
    "not renormalised": functools.partial(biased, renormalise=False),
    "bonus of an old row": functools.partial(biased, bonus_row=-2),
    "another temperature": functools.partial(biased, warmth=1.1),
}


@pytest.mark.parametrize("vocabulary", [tuple(range(V)), (0, 2, 3)], ids=["full", "reduced"])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", PARAMS)
def test_emitted_distribution_is_the_targets(name: str, k: int, vocabulary: tuple[int, ...]) -> None:
    errors = largest_errors(Setting(PARAMS[name], k, vocabulary=vocabulary))
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("k", [1, 2, 3])
def test_enumeration_visits_every_accepted_length(k: int) -> None:
    # Without this the proof could be one of a drafter that is never right, or never wrong.
    setting = Setting(PARAMS["plain"], k)
    share = [0.0] * (setting.emitted * k + 1)
    for _, accepted, weight in every_outcome(setting):
        share[accepted] += weight
    assert sum(share) == pytest.approx(1, abs=1e-12)
    assert all(weight > 1e-3 for weight in share[: k + 1]), share


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_enumeration_catches_a_biased_verifier(fault: str, k: int) -> None:
    errors = largest_errors(Setting(PARAMS["plain"], k, FAULTS[fault]))
    assert max(errors.values()) > 1e-3, errors
    # and by nothing but its fault
    assert max(largest_errors(Setting(PARAMS["plain"], k, biased)).values()) < 1e-12


def chi_square_p_value(verifier: Verifier, draws: int) -> float:
    """Drawn answers against the target's joint of two tokens; the chance of a fit as bad as the one found."""
    # Hot, so that no pair is too rare for the test; K = 1, so that drafts, corrections and the bonus are all among two.
    setting = Setting(SamplingParams(temperature=1.6), 1, verifier)
    randomness = SeededRandomness(seed=5)
    found = dict.fromkeys(itertools.product(range(V), repeat=2), 0)
    for _ in range(draws):
        found[setting.decode(randomness)[0][:2]] += 1
    wanted = {tokens: draws * weight for tokens, weight in ancestral(setting.params, 2).items()}
    assert min(wanted.values()) > 5, f"a cell too thin for the test: {min(wanted.values())}"
    statistic = sum((found[tokens] - count) ** 2 / count for tokens, count in wanted.items())
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def test_draws_fit_the_target_and_catch_a_biased_verifier() -> None:
    assert chi_square_p_value(verify_one_hot, draws=20_000) > 1e-3
    assert chi_square_p_value(FAULTS["too eager"], draws=5_000) < 1e-9


def test_certain_and_impossible_drafts() -> None:
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.25, 0.0, 0.75], [0.5, 0.5, 0.0]])
    for seed in range(200):
        verdict = verify_one_hot([1, 1], probs, SeededRandomness(seed))
        assert verdict.accepted == 1
        assert verdict.tokens in {(1, 0), (1, 2)}
    # A source of chance that says "reject" where the probability is one is a fault of ours.
    with pytest.raises(AssertionError, match="no other has any"):
        verify_one_hot([1], torch.tensor([[0.0, 1.0], [0.5, 0.5]]), Branch((0,)))


def test_chains_of_none_and_of_one_right_draft() -> None:
    row = torch.tensor([[0.0, 3.0, 1.0]])
    assert verify_greedy([], row) == Verdict(0, (1,))
    assert verify_greedy([0, 3, 2], torch.eye(4)) == Verdict(1, (0, 1))
    drawn = verify_one_hot([], row.softmax(-1), SeededRandomness(0))
    assert drawn.tokens == (SeededRandomness(0).choose(row.softmax(-1)[0]),)


def test_unusable_rows() -> None:
    one_hot = functools.partial(verify_one_hot, randomness=SeededRandomness(0))
    verifiers: list[Callable[[Sequence[int], Tensor], Verdict]] = [verify_greedy, one_hot]
    for verify in verifiers:
        assert verify([0], torch.eye(3)[:2]).accepted == 1
        with pytest.raises(AssertionError, match="1 drafts, rows"):
            verify([0], torch.eye(3)[:1])
        for outside in (3, -1):
            with pytest.raises(AssertionError, match="vocabulary 3"):
                verify([outside], torch.eye(3)[:2])
        with pytest.raises(AssertionError, match="nan"):
            verify([0], torch.full((2, 3), math.nan))


def test_randomness_repeats_by_its_seed_and_is_exact_at_its_edges() -> None:
    p = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    fresh = SeededRandomness()
    again, other = SeededRandomness(fresh.seed), SeededRandomness()
    drawn, repeated, different = ([source.choose(p) for _ in range(400)] for source in (fresh, again, other))
    assert drawn == repeated != different
    assert set(drawn) == {1, 3}
    assert all(fresh.accept(1.0) and not fresh.accept(0.0) for _ in range(400))
    with pytest.raises(AssertionError, match="sum is 0.0"):
        fresh.choose(torch.zeros(3))


def plain_greedy(answer: Prefix, params: SamplingParams) -> tuple[Prefix, str]:
    whole = answer[: params.max_new_tokens]
    stops = [place for place, token in enumerate(whole) if token in params.stop_ids]
    return (whole[: stops[0] + 1], "stop") if stops else (whole, "length")


def speculative_greedy(params: SamplingParams, drafter: Callable[[Prefix], Prefix]) -> tuple[Prefix, str, list[int]]:
    tokens: Prefix = ()
    reason, accepted = None, []
    while reason is None:
        drafts = drafter(tokens)
        verdict = verify_greedy(drafts, target_rows(tokens, drafts))
        kept, reason = cut(verdict.tokens, len(tokens), params)
        tokens += kept
        accepted.append(verdict.accepted)
    return tokens, reason, accepted


def follow(prefix: Prefix, k: int, shift: int = 0) -> Prefix:
    """The target's own k greedy tokens; with a shift, every one of them wrong."""
    out = prefix
    for _ in range(k):
        out += ((int(TARGET[out].argmax()) + shift) % V,)
    return out[len(prefix) :]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_greedy_answer_is_unchanged_whatever_the_drafter(k: int) -> None:
    drafters: dict[str, Callable[[Prefix], Prefix]] = {
        "perfect": lambda prefix: follow(prefix, k),
        "wrong": lambda prefix: follow(prefix, k, shift=1),
        "trained": lambda prefix: draft(prefix, k),
    }
    answer = follow((), DEEPEST)
    # Every limit, every stop token: the end falls on each place of a chain, the bonus included.
    for limit, stop in itertools.product(range(1, DEEPEST + 1), [(), *((token,) for token in range(V))]):
        params = SamplingParams(max_new_tokens=limit, stop_ids=stop)
        wanted = plain_greedy(answer, params)
        for name, drafter in drafters.items():
            tokens, reason, accepted = speculative_greedy(params, drafter)
            assert (tokens, reason) == wanted, name
            assert name != "perfect" or set(accepted) == {k}
            assert name != "wrong" or set(accepted) == {0}


@pytest.mark.parametrize(
    ("tokens", "already", "limit", "stops", "kept", "reason"),
    [
        ((4, 5, 6), 0, 10, (9,), (4, 5, 6), None),
        ((4, 9, 6), 0, 10, (9,), (4, 9), "stop"),
        ((4, 5, 8), 0, 10, (9, 8), (4, 5, 8), "stop"),
        ((4, 5), 8, 10, (9,), (4, 5), "length"),
        ((4, 9, 6), 8, 10, (9,), (4, 9), "stop"),
        ((4, 5, 9), 8, 10, (9,), (4, 5), "length"),
        ((4,), 9, 10, (), (4,), "length"),
        ((4,), 8, 10, (), (4,), None),
    ],
)
def test_cut(tokens: Prefix, already: int, limit: int, stops: Prefix, kept: Prefix, reason: str | None) -> None:
    assert cut(tokens, already, SamplingParams(max_new_tokens=limit, stop_ids=stops)) == (kept, reason)
    with pytest.raises(AssertionError, match="had ended"):
        cut(tokens, limit, SamplingParams(max_new_tokens=limit))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 7, 1.0), (1.0, 0, 0.6), (1.7, 12, 0.7), (0.4, 200, 0.3)],
)
def test_probabilities_are_those_of_generate(temperature: float, top_k: int, top_p: float) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=1.0, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    out = LlamaForCausalLM(config).generate(
        torch.tensor([[1, 2, 3]]), attention_mask=torch.ones(1, 3, dtype=torch.long), do_sample=True, max_new_tokens=8,
        temperature=temperature, top_k=top_k, top_p=top_p,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    assert len(out.logits) == 8
    for logits, scores in zip(out.logits, out.scores, strict=True):
        assert torch.equal(probabilities(logits, params), scores.softmax(-1))


def test_order_of_the_warpers_shows() -> None:
    # Hot enough, top-p after the temperature keeps four tokens; before it, it would keep one.
    logits = torch.tensor([[3.0, 1.0, 0.0, -1.0, -2.0]], dtype=torch.float64)
    params = SamplingParams(temperature=10.0, top_k=4, top_p=0.8)
    p = probabilities(logits, params)
    assert p.count_nonzero() == 4
    assert p[0].tolist() == pytest.approx(reference(logits[0], params), abs=1e-14)
    assert reference(logits[0], SamplingParams(temperature=1.0, top_p=0.8))[1:] == [0.0] * 4


def test_precision_of_probabilities() -> None:
    params = SamplingParams(temperature=1, top_p=0.9)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    assert probabilities(logits.bfloat16(), params).dtype == torch.float32
    assert probabilities(logits.double(), params).dtype == torch.float64
    assert torch.equal(probabilities(logits.bfloat16(), params), probabilities(logits.bfloat16().float(), params))
    with pytest.raises(AssertionError, match="greedy"):
        probabilities(logits, SamplingParams())


@pytest.mark.parametrize(
    ("name", "values"),
    [("temperature", (-0.5, math.nan, math.inf, 1e-9)), ("top_p", (0.0, -0.1, 1.5, math.nan)), ("top_k", (-1,)),
     ("max_new_tokens", (0, -1)), ("seed", (-1, 2**63))],
)  # fmt: skip
def test_meaningless_params(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        with pytest.raises(UserError, match=f"{name}={value}"):
            SamplingParams(**{name: value})  # type: ignore[arg-type]
