"""Where a pack's features come from: captured from the target, and with `hybrid` kept after the first time.

Features do not depend on what a conversation is packed with: with `online` it is captured alone, with `hybrid`
together with its neighbours in length (padded on the right, where a causal model does not look).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_train.algorithms.teacher import Teacher
from eagle_train.data.pack import Pack, answer_runs, layout
from eagle_train.data.types import Sample
from eagle_train.errors import UserError
from eagle_train.targets.hf import Features, Target


@dataclass(frozen=True)
class _Kept:
    """One conversation's features: streams [T, A·H], last [T, H], top [T] and lse [T] as `Pack` has them."""

    streams: Tensor
    last: Tensor
    top: Tensor
    lse: Tensor

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.streams, self.last, self.top, self.lse))


class FeatureSource:
    """Packs of `samples` with the target's features. `budget`: bytes that may be kept; 0 keeps nothing (online).

    Which conversations are kept, and which are captured together, follows from their lengths alone and not from the
    order in which they are asked for: so a resumed run sees the same bits as one that was never stopped.
    """

    def __init__(self, samples: Sequence[Sample], target: Target, teacher: Teacher, *, budget: int) -> None:
        self.samples, self.target, self.teacher = samples, target, teacher
        size = target.embedding.element_size() * target.config.hidden_size * (len(target.layer_ids) + 1) + 12
        self._groups = _groups([len(s.ids) for s in samples], budget // size)
        self._kept: dict[int, _Kept] = {}
        self.kept_bytes = 0
        self.broken: dict[int, str] = {}  # conversations whose states are not finite: number → id

    @property
    def over_budget(self) -> int:
        """Conversations for which there is no room: captured anew each time."""
        return len(self.samples) - len(self._groups)

    def pack(self, indices: Sequence[int], draws: Sequence[str] = ()) -> Pack:
        """The conversations `indices`, in this order, as one pack on the target's device; `draws` as in `Pack`.

        One whose states are not finite (NaN or overflow) lies in it as zeros that train nothing, and is in `broken`.

        Raises:
            UserError: more than `MAX_BROKEN` of all conversations are like that.
        """
        parts = [self._features(i) for i in indices]
        samples = [self.samples[i] for i in indices]
        masks = [m and i not in self.broken for i, s in zip(indices, samples, strict=True) for m in s.mask]
        device = self.target.device
        positions, document, bounds = layout([len(s.ids) for s in samples])
        return Pack(
            ids=torch.tensor([t for s in samples for t in s.ids], device=device),
            positions=positions.to(device),
            document=document.to(device),
            mask=torch.tensor(masks, device=device),
            bounds=bounds,
            streams=torch.cat([p.streams for p in parts]),
            last=torch.cat([p.last for p in parts]),
            top=torch.cat([p.top for p in parts]),
            lse=torch.cat([p.lse for p in parts]),
            draws=tuple(draws),
        )

    def _features(self, index: int) -> _Kept:
        if index in self._kept:
            return self._kept[index]
        group = self._groups.get(index)
        if group is None:
            return self._capture([index])[0]  # no room: captured anew each time
        for i, made in zip(group, self._capture(group), strict=True):
            self._kept[i] = made
            self.kept_bytes += made.nbytes
        return self._kept[index]

    def _capture(self, indices: Sequence[int]) -> list[_Kept]:
        samples, device, out = [self.samples[i] for i in indices], self.target.device, []
        made = self.target.capture([s.ids for s in samples])
        for index, sample, features in zip(indices, samples, made, strict=True):
            if not bool(features.last.isfinite().all() and features.streams.isfinite().all()):
                self._note_broken(index)
                features = Features(torch.zeros_like(features.streams), torch.zeros_like(features.last))
            runs = answer_runs(torch.tensor(sample.mask), [(0, len(sample.ids))])
            taught = (runs >= 2).nonzero()[:, 0].to(device) + 1
            top = torch.full((len(sample.ids),), -1, dtype=torch.int64, device=device)
            found, sums = self.teacher.whole(features.last[taught])
            top[taught] = found
            lse = sums.new_zeros(len(sample.ids))
            lse[taught] = sums
            out.append(_Kept(features.streams, features.last, top, lse))
        return out

    def _note_broken(self, index: int) -> None:
        self.broken[index] = self.samples[index].id
        if len(self.broken) > max(MAX_BROKEN * len(self.samples), 1):
            raise UserError(
                f"the target's states for {len(self.broken)} of {len(self.samples)} conversations are not finite (NaN "
                f"or overflow), e.g. {self.samples[index].id!r}",
                hint="use train.target_dtype=float32, or take those conversations out",
            )


MAX_BROKEN = 0.01  # of all conversations


def _groups(lengths: Sequence[int], room: int) -> dict[int, list[int]]:
    """Conversation → the ones it is captured with: neighbours in length, CAPTURE_TOKENS at most, padding included.

    Only those that fit `room` (tokens) together, in this order; the others have no entry.
    """
    groups: dict[int, list[int]] = {}
    current: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        room -= lengths[i]
        if room < 0:
            break
        if current and lengths[i] * (len(current) + 1) > CAPTURE_TOKENS:
            current = []
        current.append(i)
        groups[i] = current
    return groups


CAPTURE_TOKENS = 2048
