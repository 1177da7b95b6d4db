"""From a run's checkpoint to a folder that vLLM, vllm-ascend and SGLang load: written, reloaded, compared.

The form's rules are in `eagle_train.draft.checkpoint`; here the result is proven before anyone is told it is there.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_train.draft.checkpoint import read_head, write_head
from eagle_train.draft.eagle import EagleHead
from eagle_train.draft.head import DraftHead
from eagle_train.errors import UserError
from eagle_train.formats.card import cannot_serve, last_evaluation, model_card, serve_lines


@dataclass(frozen=True)
class Exported:
    """`folder` as written; `max_difference`: largest |Δ logit| between the head and its reloaded copy on a probe."""

    folder: Path
    tensors: int
    max_difference: float
    warnings: tuple[str, ...]
    serve: str


def export_head(
    checkpoint: Path, out: Path, *, run: Path, name: str, target: str, dtype: torch.dtype, special: dict[str, Any]
) -> Exported:
    """Write the head of `checkpoint` to `out` in vLLM's plain form, with a model card.

    `name`: the target as the user names it; `target`: how the server is to be given it; `special`: its token ids for
    config.json.

    Raises:
        UserError: `out` exists, the checkpoint is damaged, or the reloaded head does not give the same logits.
    """
    if out.exists():
        raise UserError(f"{out} exists; nothing was written.", hint="give another folder with out=…, or move it away")
    head = read_head(checkpoint / "head").to(dtype)
    if isinstance(head, EagleHead) and head.config.fc_bias:
        raise UserError(
            f"{checkpoint / 'head'} has a bias in `fc` (draft.fc_bias), which vLLM would drop without a word; it is "
            "not exported",
            hint="train with draft.fc_bias=false; `eagle-train bench head=…` takes the checkpoint's own folder",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    tmp = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        write_head(tmp / "head", head, dtype=dtype, extra=special)
        difference = compare(head, read_head(tmp / "head"))
        step = int(checkpoint.name.rpartition("-")[2])
        card = model_card(
            head, name=name, target=target, run=run, dtype=dtype, evaluation=last_evaluation(run), step=step, folder=out
        )
        (tmp / "head" / "README.md").write_text(card)
        os.replace(tmp / "head", out)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return Exported(
        folder=out,
        tensors=len(json.loads(_header(out / "model.safetensors"))) - 1,
        max_difference=difference,
        warnings=(
            *(path_warnings(out) if head.method == "eagle3" else ()),
            *(f"{engine} cannot serve it: {why}" for engine, why in cannot_serve(head).items()),
        ),
        serve=serve_lines(target, out, head.method)["vLLM"],
    )


def _header(path: Path) -> bytes:
    with path.open("rb") as f:
        return f.read(int.from_bytes(f.read(8), "little"))


@dataclass(frozen=True)
class _Probe:
    """Made-up states of a target, as `States` has them."""

    streams: torch.Tensor
    last: torch.Tensor


@torch.no_grad()
def compare(one: DraftHead, other: DraftHead, rows: int = 16) -> float:
    """Largest |Δ logit| over two depths on seeded random inputs.

    For a head that ends in its target's lm_head: of what that reads, which gives equal logits where it is equal.

    Raises:
        UserError: they differ at all: the same tensors in the same dtype give the same bits.
    """
    config, generator, kind = one.config, torch.Generator().manual_seed(0), one.dtype
    width = config.target_hidden_size
    streams = torch.randn(rows, width * len(config.layer_ids), generator=generator).to(kind)
    probe = _Probe(streams, torch.randn(rows, width, generator=generator).to(kind))
    emb = torch.randn(rows, config.hidden_size, generator=generator).to(kind)
    positions = torch.arange(rows)

    def alone(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Each row sees itself only, plus its rotated key's sum with the query, so that q and k matter too."""
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return v * torch.sigmoid((q * k).sum(-1, keepdim=True))

    worst = 0.0
    states = [head.project(head.reads(probe)) for head in (one, other)]
    for _ in range(2):
        hidden = [h.step(emb, s, positions, alone) for h, s in zip((one, other), states, strict=True)]
        a, b = (h.logits(x) if h.owns_lm_head else h.output(x) for h, x in zip((one, other), hidden, strict=True))
        if not bool(a.isfinite().all()):
            raise UserError("the head's logits are not finite on a probe; the export was not kept")
        worst = max(worst, float((a - b).nan_to_num(float("inf")).abs().max()))
        states = [h.feedback(x) for h, x in zip((one, other), hidden, strict=True)]
    if worst != 0.0:
        raise UserError(f"the reloaded head's logits differ by up to {worst:.3g}; the export was not kept")
    return worst


def path_warnings(folder: Path) -> tuple[str, ...]:
    """What about the place may mislead a server."""
    if "eagle-" in str(folder.resolve()):
        return (
            f"{folder.resolve()} contains `eagle-`: vLLM takes a head in such a path for EAGLE-1 unless the serve line "
            "names the method (the one below does)",
        )
    return ()
