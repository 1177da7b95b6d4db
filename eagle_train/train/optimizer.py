"""AdamW over the head's float32 weights, and the learning rate as a function of progress."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from eagle_train.config.schema import TrainConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; torch's fused kernel where the device has one (it has on CPU and CUDA)."""
    chosen = [p for p in parameters if p.requires_grad]
    fused = all(p.device.type in ("cpu", "cuda") for p in chosen)
    return torch.optim.AdamW(
        chosen, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=fused
    )


def learning_rate(config: TrainConfig, step: int, seconds: float) -> float:
    """The rate of optimizer step `step` (0-based).

    Progress is step / steps; under a time limit it is at least seconds / max_seconds, so that a run which time ends
    has come down its schedule too (such a run is not repeatable to the bit).
    """
    progress = step / config.steps
    if config.max_seconds:
        progress = max(progress, seconds / config.max_seconds)
    progress = min(progress, 1.0)
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    shape = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "constant": 1.0,
    }[config.schedule]
    floor = config.min_lr_share if config.schedule != "constant" else 0.0
    return config.lr * warm * (floor + (1 - floor) * shape)
