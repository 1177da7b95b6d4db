"""An evaluation: figures of the unroll on held-out conversations, the real acceptance, and the walked one beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle_train.algorithms.metrics import DepthTotals, walked_acceptance
from eagle_train.config.schema import Config
from eagle_train.draft.head import DraftHead
from eagle_train.errors import UserError
from eagle_train.targets.hf import Target
from eagle_train.train.features import FeatureSource
from eagle_train.train.setup import Materials


@dataclass(frozen=True)
class Decoded:
    """What the speculative loop measured on some prompts (greedy): vLLM's counts, before the cut.

    `texts`: per prompt that counted, (ids that run on for k tokens after the answer, prompt length, answer's end).
    `looped`: prompts left out because their answer fell into a loop.
    """

    acceptance_length: float
    rates: tuple[float, ...]
    drafts: int
    looped: int
    texts: list[tuple[list[int], int, int]]


# (target, head, prompts, k, max_new_tokens) → Decoded. The loop lives above this room, so it is handed in.
DecodeFn = Callable[[Target, DraftHead, Sequence[list[int]], int, int], Decoded]


def eval_prompts(materials: Materials, config: Config) -> list[list[int]]:
    """The first `eval.prompts` held-out conversations that fit, each up to its first answer token."""
    limit = materials.target.config.max_position_embeddings - config.eval.max_new_tokens - config.eval.k
    found = [list(s.ids[: s.mask.index(True)]) for s in materials.heldout if True in s.mask]
    fit = [p for p in found if 0 < len(p) <= limit]
    if not fit:
        raise UserError(
            f"no held-out prompt leaves room for eval.max_new_tokens={config.eval.max_new_tokens} in the target's "
            f"context of {materials.target.config.max_position_embeddings} tokens",
            hint="lower eval.max_new_tokens, or give other data.heldout",
        )
    return fit[: config.eval.prompts]


def evaluate(materials: Materials, heldout: FeatureSource, config: Config, decode: DecodeFn | None) -> dict[str, Any]:
    """One flat record: loss figures per depth, `acceptance_length` (the loop's), `walked_length`."""
    totals, loss, divisor = DepthTotals(), 0.0, 0
    algorithm, head = materials.algorithm, materials.head
    mixed = torch.autocast(materials.target.device.type, torch.bfloat16, config.train.precision == "bf16")
    with torch.no_grad(), mixed:
        for i in range(len(heldout.samples)):
            results = algorithm.results(head, heldout.pack([i]), materials.teacher, detailed=True)
            if results is not None:
                totals.add(results.depths)
                loss += float(results.loss)
                divisor += algorithm.share(len(results.depths[0].rows))
    record: dict[str, Any] = {"heldout_loss": loss / max(divisor, 1), **totals.figures()}
    if decode is None:
        return record
    dtype = getattr(torch, config.eval.dtype)
    exported = copy.deepcopy(head).to(dtype)
    target, k = materials.eval_target, config.eval.k
    prompts = eval_prompts(materials, config)
    found = decode(target, exported, prompts, k, config.eval.max_new_tokens)
    exported.attach(target)
    walked = walked_acceptance(exported, target, found.texts, k)
    return record | {
        "acceptance_length": found.acceptance_length,
        "acceptance_rates": list(found.rates),
        "acceptance_drafts": found.drafts,
        "acceptance_prompts": len(prompts),
        "acceptance_looped": found.looped,
        "walked_length": walked.acceptance_length,
        "walked_drafts": walked.drafts,
        "walked_per_position": list(walked.per_position),
        "k": k,
    }
