"""Noise on a head's input, so that it learns to live with states that are not quite the target's (EAGLE, section 4.2).

The paper adds U(−0.1, 0.1) to each number. The released code scales that by 512 over the conversation's length, which
`length=512` does here. Targets and loss stay clean.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_train.data.pack import Pack


@dataclass(frozen=True)
class Noise:
    """Uniform in ±half_width, times length / (tokens of the conversation) where `length` is not 0."""

    half_width: float = 0.0
    length: int = 0

    def on(self, states: Tensor, pack: Pack) -> Tensor:
        """states [N, S] of the pack's N tokens → the same with noise; as they are where the pack has no `draws`.

        A function of each document's draw alone, drawn on the CPU: the same bits whatever a conversation is packed
        with, on every device, before and after a restart.
        """
        if not (self.half_width and pack.draws):
            return states
        assert len(pack.draws) == len(pack.bounds), (pack.draws, pack.bounds)
        parts = []
        for name, (start, end) in zip(pack.draws, pack.bounds, strict=True):
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
            width = self.half_width * (self.length / (end - start) if self.length else 1.0)
            drawn = torch.rand(end - start, states.shape[1], generator=torch.Generator().manual_seed(seed))
            parts.append((2 * drawn - 1) * width)
        return states + torch.cat(parts).to(states.device, states.dtype)
