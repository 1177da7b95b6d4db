"""Figures of a head from the unroll alone: per depth, estimated acceptance lengths, and the walked acceptance.

Averaged over all rows an estimate is too high, because an engine skips the easy rows inside an accepted run. Walked
acceptance repairs that: on text that the target wrote greedily it visits exactly the rows an engine would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_train.algorithms.interface import DepthResult
from eagle_train.algorithms.unroll import unroll
from eagle_train.data.pack import Pack, answer_runs
from eagle_train.draft.head import DraftHead
from eagle_train.targets.hf import Target


class DepthTotals:
    """Sums over packs of what `Algorithm.results` gives; `figures()` turns them into means."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._outside = 0

    def add(self, results: Sequence[DepthResult]) -> None:
        """One pack's detailed results."""
        if not results:
            return
        rows = results[0].rows.cpu()  # the sums are kept on the CPU, whatever the device
        chain = {"greedy": torch.ones(len(rows)), "one_hot": torch.ones(len(rows)), "sampled": torch.ones(len(rows))}
        for r in results:
            at = torch.searchsorted(rows, r.rows.cpu())
            self._bump("rows", r.depth, len(r.rows))
            self._bump("correct", r.depth, float(r.correct.sum()))
            self._bump("accept", r.depth, float(r.accept.sum()))
            self._bump("alpha", r.depth, float(r.alpha.sum()))
            self._outside += r.outside
            self._chain(chain, "greedy", r, at, r.correct)
            self._chain(chain, "one_hot", r, at, r.accept)
            self._chain(chain, "sampled", r, at, r.alpha)

    def _chain(self, chain: dict[str, Tensor], kind: str, r: DepthResult, at: Tensor, figure: Tensor) -> None:
        """Multiply each row's product by this depth's figure; rows that do not reach this depth leave the product."""
        product = torch.zeros_like(chain[kind])
        product[at] = chain[kind][at] * figure.to("cpu", torch.float32)
        chain[kind] = product
        self._bump(f"chain_{kind}", r.depth, float(product.sum()))

    def _bump(self, kind: str, depth: int, by: float) -> None:
        sums = self._sums.setdefault(kind, [])
        sums.extend([0.0] * (depth + 1 - len(sums)))
        sums[depth] += by

    def figures(self) -> dict[str, float | list[float]]:
        """Means per depth over that depth's rows; estimated lengths 1 + Σ_k mean of the product over depths ≤ k."""
        rows = self._sums.get("rows", [])
        out: dict[str, float | list[float]] = {"rows": rows, "outside": float(self._outside)}
        for kind, name in (("correct", "accuracy"), ("accept", "accept"), ("alpha", "alpha")):
            if kind in self._sums:
                out[name] = [s / max(n, 1) for s, n in zip(self._sums[kind], rows, strict=True)]
        greedy = self._sums.get("chain_greedy", [])
        before = [rows[0] if rows else 0.0, *greedy]
        out["accuracy_given_right"] = [s / b if b else 0.0 for s, b in zip(greedy, before, strict=False)]
        for kind in ("greedy", "one_hot", "sampled"):
            if f"chain_{kind}" in self._sums:
                sums = self._sums[f"chain_{kind}"]
                out[f"estimated_length_{kind}"] = 1 + sum(s / max(n, 1) for s, n in zip(sums, rows, strict=True))
        return out


@dataclass(frozen=True)
class Walked:
    """drafts: rows visited; per_position: how many of them were right up to and including that depth."""

    drafts: int
    per_position: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts, as an engine counts it."""
        return 1 + sum(self.per_position) / self.drafts if self.drafts else 1.0


def walk(right: Tensor, prompt_length: int, end: int) -> Walked:
    """right [K, T] bool: the draft of row i at depth k is x_{i+2+k}. Visits what an engine visits before token `end`.

    Starts at the row of the last prompt token; after a accepted drafts goes on at row i + a + 1; stops when the answer
    (tokens prompt_length … end−1) is complete.
    """
    depths, counts, drafts, i = right.shape[0], [0] * right.shape[0], 0, prompt_length - 1
    leading = right.to(torch.int64).cumprod(0).sum(0).tolist()
    while i + 2 < end:
        drafts += 1
        accepted = min(leading[i], depths)
        for k in range(accepted):
            counts[k] += 1
        i += accepted + 1
    return Walked(drafts, tuple(counts))


@torch.no_grad()
def walked_acceptance(head: DraftHead, target: Target, texts: Sequence[tuple[list[int], int, int]], k: int) -> Walked:
    """Walk every text (ids, prompt length, end of the answer) with chains of `k`; the counts are added up.

    The ids run on for `k` greedy tokens after the answer's end, because an engine's last draft is counted whole.
    """
    total, counts = 0, [0] * k
    for ids, prompt_length, end in texts:
        tokens = torch.tensor(ids, device=target.device)
        features = target.forward(tokens)
        mask = torch.arange(len(ids)) >= prompt_length
        nothing = torch.zeros(len(ids), dtype=torch.int64)
        pack = Pack(
            ids=tokens,
            positions=torch.arange(len(ids), device=target.device),
            document=nothing,
            mask=mask.to(target.device),
            bounds=((0, len(ids)),),
            streams=features.streams,
            last=features.last,
            top=nothing,
            lse=features.last.new_zeros(len(ids)),
        )
        right = torch.zeros(k, len(ids), dtype=torch.bool)
        for depth in unroll(head, pack, k, answer_runs(pack.mask, pack.bounds)):
            choice = head.target_ids(head.logits(depth.hidden).argmax(-1))
            right[depth.depth, depth.rows.cpu()] = (choice == tokens[depth.rows + 2 + depth.depth]).cpu()
        one = walk(right, prompt_length, end)
        total += one.drafts
        counts = [a + b for a, b in zip(counts, one.per_position, strict=True)]
    return Walked(total, tuple(counts))
