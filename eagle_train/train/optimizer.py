"""The optimizer over the head's float32 weights, and its rate as a function of progress."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from eagle_train.config.schema import TrainConfig

Named = Iterable[tuple[str, nn.Parameter]]


class Optimizers:
    """One or two optimizers that step together; each keeps its own peak rate and all follow one schedule."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        self._peaks = [part.param_groups[0]["lr"] for part in parts]

    def step(self, share: float) -> None:
        """One step at `share` of the peak rates; the gradients are dropped."""
        for part, peak in zip(self.parts, self._peaks, strict=True):
            for group in part.param_groups:
                group["lr"] = peak * share
            part.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint.

        Raises:
            ValueError: of other optimizers.
        """
        for part, kept in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(kept)


def make_optimizer(named: Named, config: TrainConfig) -> Optimizers:
    """AdamW over everything or, with `muon`, torch's Muon over the matrices inside the head and AdamW over the rest.

    Muon (https://kellerjordan.github.io/posts/muon) is for hidden matrices; lm_head, norms and biases stay with AdamW.
    """
    chosen = [(name, p) for name, p in named if p.requires_grad]
    inside = [p for name, p in chosen if config.optimizer == "muon" and p.dim() == 2 and "lm_head" not in name]
    taken = {id(p) for p in inside}
    rest = [p for _, p in chosen if id(p) not in taken]
    # torch's fused kernel where the device has one
    fused = all(p.device.type in ("cpu", "cuda") for p in rest)
    parts: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            rest, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=fused
        )
    ]
    if inside:
        parts.append(torch.optim.Muon(inside, lr=config.muon_lr, weight_decay=config.weight_decay, momentum=0.95))
    return Optimizers(parts)


def rate_share(config: TrainConfig, step: int, seconds: float) -> float:
    """The share of the peak rate at optimizer step `step` (0-based).

    Progress is step / steps; under a time limit it is at least seconds / max_seconds, so that a run which time ends
    has come down its schedule too (such a run is not repeatable to the bit). `wsd` (warm-up, stable, decay) stays at
    the peak until the last `decay_share` of the run and falls linearly there.
    """
    progress = step / config.steps
    if config.max_seconds:
        progress = max(progress, seconds / config.max_seconds)
    progress = min(progress, 1.0)
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    shape = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "wsd": min(1.0, (1 - progress) / config.decay_share),
        "constant": 1.0,
    }[config.schedule]
    floor = config.min_lr_share if config.schedule != "constant" else 0.0
    return warm * (floor + (1 - floor) * shape)
