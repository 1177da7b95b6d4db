"""The speculative loop for one request: draft a chain, verify it in one pass of the target, keep what is right.

Tokens x_0 … x_{L−1} are verified; the target's cache holds L−1 of them (the newest is not fed yet), the draft's cache
L−1 rows, row i = (embedding of x_{i+1}, what the head reads of the target at i). A cycle:

    draft     rows up to L−2 are run with true states; the last one's output proposes x_L, each further step, fed with
              its own state, one token more, at position L−2+k
    verify    the target reads x_{L−1} and the drafts in one pass; `verify` accepts a prefix and adds one token
    commit    both caches are rewound to what is true; the accepted rows are run again with true states next cycle

The same engine without a head decodes plainly, one token per pass, with the same cache, kernels and stop rules: that
is the baseline a speed-up is measured against.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_inference.cache import DraftCache, TargetCache
from eagle_inference.metrics import Acceptance, AcceptanceCounter
from eagle_inference.sampling import SamplingParams, SeededRandomness, probabilities
from eagle_inference.verify import Verdict, cut, verify_greedy, verify_one_hot
from eagle_train.draft.head import DraftHead
from eagle_train.errors import UserError
from eagle_train.targets.hf import Features, Target


@dataclass(frozen=True)
class Generation:
    """One answer. `finish`: "stop", "length" or "context"; `cycles`: target passes after the prefill."""

    tokens: list[int]
    finish: str
    acceptance: Acceptance
    cycles: int
    prefill_seconds: float
    decode_seconds: float


class SpeculativeEngine:
    """A target and, unless it decodes plainly, a head with a chain of `k` drafts per cycle (argmax drafts)."""

    def __init__(self, target: Target, head: DraftHead | None, k: int = 3) -> None:
        if head is not None:
            check_pair(target, head)
            if k < 1:
                raise UserError(f"k={k}: a chain has at least one draft", hint="leave the head out to decode plainly")
            head.attach(target)
        self.target, self.head, self.k = target, head, k if head is not None else 0
        self.limit: int = target.config.max_position_embeddings

    @torch.no_grad()
    def generate(self, prompt: list[int], params: SamplingParams) -> Generation:
        """Decode one answer to `prompt` (token ids, whole: the template is already rendered).

        Raises:
            UserError: an empty prompt, one that leaves no room in the target's context, or ids out of range.
        """
        self._check_prompt(prompt)
        room = min(params.max_new_tokens, self.limit - len(prompt))
        request = _Request(self, prompt, params, len(prompt) + room)
        start = time.perf_counter()
        finish = request.prefill()
        middle = time.perf_counter()
        while finish is None:
            finish = request.cycle()
        if finish == "length" and len(request.answer) < params.max_new_tokens:
            finish = "context"
        end = time.perf_counter()
        return Generation(
            request.answer, finish, request.counter.result(), request.cycles, middle - start, end - middle
        )

    def _check_prompt(self, prompt: list[int]) -> None:
        vocabulary = self.target.config.vocab_size
        if not prompt:
            raise UserError("the prompt is empty; give at least one token")
        if len(prompt) >= self.limit:
            raise UserError(f"the prompt has {len(prompt)} tokens; the target's context holds {self.limit}")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise UserError(f"prompt ids run from {min(prompt)} to {max(prompt)}; the vocabulary has {vocabulary}")


class _Request:
    """One request's state between cycles."""

    def __init__(self, engine: SpeculativeEngine, prompt: list[int], params: SamplingParams, end: int) -> None:
        self.engine, self.params, self.end = engine, params, end
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.chance = SeededRandomness(params.seed)
        self.counter = AcceptanceCounter()
        self.cycles = 0
        target, head = engine.target, engine.head
        self.target_cache = TargetCache(target.num_layers, min(end + engine.k, engine.limit))
        layers = head.config.num_layers if head is not None else 0
        self.draft_cache = DraftCache(layers, min(end + engine.k, engine.limit))
        self.states: Tensor | None = None  # the target's, of rows that the draft has not been run over yet

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def prefill(self) -> str | None:
        features = self._target(self.tokens)
        self._remember(features, len(self.tokens))
        return self._commit(self._judge([], features))

    def cycle(self) -> str | None:
        drafts = self._draft()
        features = self._target([self.tokens[-1], *drafts])
        verdict = self._judge(drafts, features)
        self.cycles += 1
        self.counter.add(len(drafts), verdict.accepted)
        self._remember(features, verdict.accepted + 1)
        self.target_cache.rewind(len(self.tokens) + verdict.accepted)
        before = len(self.answer)
        finish = self._commit(verdict)
        if drafts:
            self.counter.add_kept(min(verdict.accepted, len(self.answer) - before))
        return finish

    def _remember(self, features: Features, rows: int) -> None:
        """Keep what the head will read of the first `rows`."""
        if self.engine.head is not None:
            self.states = self.engine.head.reads(features)[:rows]

    def _target(self, ids: list[int]) -> Features:
        target = self.engine.target
        return target.forward(torch.tensor(ids, device=target.device), self.target_cache.cache)

    def _judge(self, drafts: list[int], features: Features) -> Verdict:
        """The target's verdict on `drafts`, from the last len(drafts)+1 rows."""
        logits = self.engine.target.head(features.last[-(len(drafts) + 1) :])
        if self.params.greedy:
            return verify_greedy(drafts, logits)
        return verify_one_hot(drafts, probabilities(logits, self.params), self.chance)

    def _commit(self, verdict: Verdict) -> str | None:
        limited = self.params.max_new_tokens
        room = self.end - len(self.tokens)
        # A bonus token can lie just outside the context: it is dropped before it could count as a stop.
        kept, finish = cut(verdict.tokens[:room], len(self.answer), self.params)
        if len(kept) >= room and finish is None:
            finish = "length"
        assert len(kept) <= limited, (len(kept), limited)
        self.tokens += kept
        return finish

    def _draft(self) -> list[int]:
        """A chain after the verified tokens; shorter where the context ends."""
        head, count = self.engine.head, min(self.engine.k, self.engine.limit - len(self.tokens))
        if head is None or count < 1:
            return []
        assert self.states is not None
        device, first, rows = self.engine.target.device, self.draft_cache.length, self.states.shape[0]
        ids = torch.tensor(self.tokens[first + 1 :], device=device)
        assert len(ids) == rows, f"{rows} rows of true states for {len(ids)} tokens"
        positions = torch.arange(first, first + rows, device=device)
        state = head.project(self.states)
        newest = torch.tensor([rows - 1], device=device)
        hidden = head.step(head.embed(ids), state, positions, self.draft_cache.attend, newest)
        self.draft_cache.advance(rows)
        true_rows, drafts = self.draft_cache.length, []
        for depth in range(1, count + 1):
            token = head.target_ids(head.logits(hidden).argmax(-1))
            drafts.append(int(token))
            if depth < count:
                position = torch.tensor([true_rows - 1 + depth], device=device)
                hidden = head.step(head.embed(token), head.feedback(hidden), position, self.draft_cache.attend)
                self.draft_cache.advance(1)
        self.draft_cache.rewind(true_rows)
        return drafts


def check_pair(target: Target, head: DraftHead) -> None:
    """Refuse a head that was made for another target.

    Raises:
        UserError: width, vocabulary or layer ids do not fit.
    """
    ours, theirs = head.config, target.config
    pairs = [
        ("width", ours.target_hidden_size, theirs.hidden_size),
        ("vocabulary", ours.vocab_size, theirs.vocab_size),
    ]
    wrong = [f"{name} {a} against the target's {b}" for name, a, b in pairs if a != b]
    if ours.layer_ids and tuple(ours.layer_ids) != target.layer_ids:
        wrong.append(f"layer ids {list(ours.layer_ids)} against {list(target.layer_ids)} that are captured")
    if wrong:
        raise UserError(f"head and target do not belong together: {'; '.join(wrong)}")
