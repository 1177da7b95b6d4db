"""Measuring: acceptance on a list of prompts, and speed against plain decoding and `generate`, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from transformers import GenerationConfig

from eagle_inference.engine import Generation, SpeculativeEngine
from eagle_inference.metrics import Acceptance
from eagle_inference.sampling import SamplingParams
from eagle_train.draft.head import DraftHead
from eagle_train.targets.hf import Target

# How far the target's two best logits may lie apart for the order of a sum to decide between them. In bfloat16 the
# numbers themselves are this coarse at the size that logits have (16 to 32).
TIES = {torch.float32: 1e-4, torch.bfloat16: 0.125}

Watch = Callable[[str, int], None]  # (what is being decoded, prompts done): for whoever shows progress


@dataclass(frozen=True)
class Measured:
    """One mode on one list of prompts. `looped`: numbers of the prompts left out as their answer fell into a loop."""

    acceptance: Acceptance
    looped: tuple[int, ...]
    answers: tuple[Generation, ...]

    @property
    def tokens_per_second(self) -> float:
        """New tokens after the first over decoding seconds, prefill apart: the median over the prompts."""
        rates = [(len(a.tokens) - 1) / a.decode_seconds for a in self.answers if len(a.tokens) > 1]
        return median(rates) if rates else 0.0


def loops(ids: Sequence[int], n: int = 8, times: int = 3) -> bool:
    """Whether some n-gram occurs `times` times or more: decoding has fallen into a loop, which flatters drafts."""
    count: dict[tuple[int, ...], int] = {}
    for i in range(len(ids) - n + 1):
        gram = tuple(ids[i : i + n])
        count[gram] = count.get(gram, 0) + 1
        if count[gram] >= times:
            return True
    return False


def measure(
    engine: SpeculativeEngine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    watch: Callable[[int], None] | None = None,
) -> Measured:
    """Decode every prompt, one after the other; prompt i is sampled with seed + i. Looped answers do not count.

    `watch` is told how many prompts are done.
    """
    answers, looped, counts = [], [], []
    for i, prompt in enumerate(prompts):
        seed = None if params.seed is None else params.seed + i
        answers.append(engine.generate(prompt, replace(params, seed=seed)))
        if loops(answers[-1].tokens):
            looped.append(i)
        else:
            counts.append(answers[-1].acceptance)
        if watch is not None:
            watch(i + 1)
    return Measured(Acceptance.merge(counts), tuple(looped), tuple(answers))


def continued(target: Target, prompt: list[int], answer: list[int], extra: int) -> list[int]:
    """prompt + answer + `extra` greedy tokens, whatever ended the answer (shorter only at the context's end)."""
    engine = SpeculativeEngine(target, None)
    if len(prompt) + len(answer) >= engine.limit:
        return prompt + answer
    more = engine.generate(prompt + answer, SamplingParams(max_new_tokens=extra))
    return prompt + answer + more.tokens


@dataclass(frozen=True)
class Baseline:
    """Hugging Face `generate`, greedy: the median decoding speed (prefill apart) and the answers.

    `same`: answers equal to the speculative ones, near-ties included.
    """

    tokens_per_second: float
    answers: tuple[list[int], ...]
    same: int = 0


@torch.no_grad()
def hf_generate(
    target: Target,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    watch: Callable[[int], None] | None = None,
) -> Baseline:
    """`generate` on the same prompts, limits and stop tokens; its prefill is timed apart and taken off.

    What the target's generation config may add to greedy decoding is set to nothing. One prompt first, unmeasured.
    """
    rates, answers = [], []
    pad = target.tokenizer.pad_token_id if target.tokenizer is not None else None
    stop, pad = list(params.stop_ids) or None, pad if pad is not None else 0
    for i, prompt in enumerate([prompts[0], *prompts]):
        ids = torch.tensor([prompt], device=target.device)
        spent = []
        for limit in (1, params.max_new_tokens if i else 2):
            greedy = GenerationConfig(
                do_sample=False, num_beams=1, repetition_penalty=1.0, no_repeat_ngram_size=0,
                max_new_tokens=limit, eos_token_id=stop, pad_token_id=pad,
            )  # fmt: skip
            start = time.perf_counter()
            out = target.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
            spent.append(time.perf_counter() - start)
        if not i:
            continue
        answers.append(out[0, len(prompt) :].tolist())
        if len(answers[-1]) > 1:
            rates.append((len(answers[-1]) - 1) / max(spent[1] - spent[0], 1e-9))
        if watch is not None:
            watch(i)
    return Baseline(median(rates) if rates else 0.0, tuple(answers))


@dataclass(frozen=True)
class Comparison:
    """Everything one `bench` shows.

    `identical`: prompts whose speculative greedy answer equals plain decoding's; `near_ties`: prompts that part where
    the target's two best logits lie within `TIES`, so that the order of a sum decides; `differing`: all others.
    """

    k: int
    prompts: int
    greedy: Measured
    sampled: Measured | None
    plain: Measured | None
    hf: Baseline | None
    identical: int
    near_ties: tuple[int, ...]
    differing: tuple[int, ...]


def part_at_tie(target: Target, prompt: list[int], one: list[int], other: list[int]) -> bool:
    """Whether two answers first differ where the target's two best logits lie within `TIES` of each other."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    ids = torch.tensor(prompt + one[:at], device=target.device)
    best = target.head(target.forward(ids).last[-1:]).float().topk(2).values[0]
    return float(best[0] - best[1]) <= TIES.get(target.embedding.dtype, 0.0)


def compare(
    target: Target,
    head: DraftHead,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    k: int,
    sampled: bool = True,
    plain: bool = True,
    hf: bool = True,
    watch: Watch | None = None,
) -> Comparison:
    """Greedy with chains of `k`; beside it sampled at temperature 1, plain decoding by the same engine, `generate`."""

    def seen(mode: str) -> Callable[[int], None] | None:
        return None if watch is None else partial(watch, mode)

    speculative = SpeculativeEngine(target, head, k)
    greedy = measure(speculative, prompts, params, seen("greedy"))
    warm = replace(params, temperature=1.0, top_k=0, top_p=1.0, seed=params.seed or 0)
    drawn = measure(speculative, prompts, warm, seen("temperature 1")) if sampled else None
    base = measure(SpeculativeEngine(target, None), prompts, params, seen("plain")) if plain else None
    theirs = hf_generate(target, prompts, params, seen("generate")) if hf else None
    if theirs is not None:
        pairs_hf = zip(prompts, greedy.answers, theirs.answers, strict=True)
        same = sum(a.tokens == b or part_at_tie(target, list(p), a.tokens, b) for p, a, b in pairs_hf)
        theirs = replace(theirs, same=same)
    differing: list[int] = []
    ties: list[int] = []
    if base is not None:
        pairs = zip(greedy.answers, base.answers, strict=True)
        for i, (a, b) in enumerate(pairs):
            if a.tokens != b.tokens:
                (ties if part_at_tie(target, list(prompts[i]), a.tokens, b.tokens) else differing).append(i)
    identical = len(prompts) - len(ties) - len(differing)
    return Comparison(k, len(prompts), greedy, drawn, base, theirs, identical, tuple(ties), tuple(differing))
