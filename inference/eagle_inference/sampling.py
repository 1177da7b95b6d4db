"""From logits to the distribution that is sampled, and the source of chance that samples it.

Shapes: N rows, V target vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle_train.errors import UserError

# Below this a float32 logit gap of one is already e^100000: the user means greedy and should say so.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Raises UserError for a value that has no meaning.

    temperature: 0 is greedy. top_k: tokens kept, 0 is off. top_p: probability mass kept, 1 is off.
    max_new_tokens: tokens. stop_ids: the token ids that end an answer. seed: None takes fresh entropy.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature} is not a number of 0 or more", "0 is greedy")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise UserError(f"temperature={self.temperature} is below {MIN_TEMPERATURE}", "for greedy give exactly 0")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} is negative", "0 switches it off")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} is not in (0, 1]", "1 switches it off")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens={self.max_new_tokens} is below 1", "ask for at least one token")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UserError(f"seed={self.seed} is not in [0, 2^63)", "leave it out for fresh entropy")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution of each row [N, V] after temperature, top-k and top-p, in this order as in HF `generate`.

    float64 logits give float64, all others float32. `params` must not be greedy.
    """
    assert not params.greedy, "temperature 0 has no distribution: greedy rows are compared by argmax"
    assert logits.dim() == 2, f"logits are {tuple(logits.shape)}, not [N, V]"
    warpers = LogitsProcessorList()
    if params.temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    scores = logits if logits.dtype == torch.float64 else logits.float()
    # None of the three looks at the prefix, so it may be empty.
    prefix = torch.empty(logits.shape[0], 0, dtype=torch.long, device=logits.device)
    warped = warpers(cast(torch.LongTensor, prefix), cast(torch.FloatTensor, scores))
    return torch.softmax(warped, dim=-1)


class Randomness(Protocol):
    """Every decision that chance makes in verification, so that a proof can branch where a run draws."""

    def accept(self, p: float) -> bool:
        """True with probability p: never at 0, always at 1."""
        ...

    def choose(self, p: Tensor) -> int:
        """An index drawn from p [V], which sums to one up to rounding."""
        ...


class SeededRandomness:
    """Chance from one CPU generator: a seed gives the same answers on every device.

    seed: the one in use, so that a run without a given seed can still be repeated.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._generator = torch.Generator()
        self.seed: int = self._generator.seed() if seed is None else seed
        self._generator.manual_seed(self.seed)

    def accept(self, p: float) -> bool:
        return self._uniform() < p

    def choose(self, p: Tensor) -> int:
        # float64 on the CPU (accelerators may lack it): a float32 running sum over 150k tokens would lose the tail.
        cumulative = p.detach().cpu().double().cumsum(0)
        total = float(cumulative[-1])
        assert 0 < total < math.inf, f"cannot draw from a distribution whose sum is {total}"
        # The first entry strictly above the draw: a token of probability 0 raises nothing and is never it.
        return int(torch.searchsorted(cumulative, self._uniform() * total, right=True))

    def _uniform(self) -> float:
        """In [0, 1), 53 bits."""
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))
