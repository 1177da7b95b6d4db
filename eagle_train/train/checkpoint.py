"""Checkpoints of a run: whole or not there, and enough to go on bit for bit.

    RUN/checkpoints/step-000200/head/       the head in the exported form, float32 (config.json, model.safetensors)
                               /optimizer.pt
                               /state.json  step, seconds, processes, the settings that must match
    RUN/checkpoints/latest                  the name of the newest whole one

The data order is a function of the step, and the only chance after the first weights (an algorithm's noise) one of
seed, epoch and conversation: so no random state is kept.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_train.config.schema import Config
from eagle_train.draft.checkpoint import read_head, write_head
from eagle_train.draft.head import DraftHead
from eagle_train.errors import UserError
from eagle_train.train.optimizer import Optimizers

KEEP = 2
# Settings that may differ between a checkpoint and the run that goes on from it: they change no trained number.
FREE = ("recipe", "run", "train.save_every", "train.log_every", "train.device", "train.threads")
FREE_SECTIONS = ("eval", "track")


@dataclass(frozen=True)
class Progress:
    """Where a run stands: optimizer steps done, seconds trained, whether it came to its end.

    `losses`: those of the steps since the last log line, so that the next line is the same after a restart.
    """

    step: int = 0
    seconds: float = 0.0
    finished: bool = False
    losses: tuple[float, ...] = ()


def latest(run: Path) -> Path | None:
    """The newest whole checkpoint of `run`: the one `latest` names or, if that is gone, the newest.

    Raises:
        UserError: there are checkpoints, but none is whole: to start anew in silence would lose the run.
    """
    folder = run / "checkpoints"
    pointer, steps = folder / "latest", sorted(folder.glob("step-*"), reverse=True)
    named = [folder / pointer.read_text().strip()] if pointer.exists() else []
    for found in [*named, *steps]:
        if (found / "state.json").exists():
            return found
    if steps:
        raise UserError(f"{folder} holds no whole checkpoint", hint="move it away to start anew, or give another run=…")
    return None


def save(
    run: Path,
    head: DraftHead,
    optimizer: Optimizers,
    progress: Progress,
    settings: dict[str, Any],
    processes: int,
) -> Path:
    """Write the checkpoint of `progress.step` beside the others, point `latest` at it, keep the newest two."""
    folder = run / "checkpoints" / f"step-{progress.step:06d}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    tmp = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        write_head(tmp / "head", head)
        torch.save(optimizer.state_dict(), tmp / "optimizer.pt")
        state = {
            "step": progress.step,
            "seconds": progress.seconds,
            "finished": progress.finished,
            "losses": progress.losses,
            "processes": processes,
            "settings": settings,
        }
        (tmp / "state.json").write_text(json.dumps(state, indent=2) + "\n")
        tmp.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(tmp, folder)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    pointer = folder.parent / ".latest"
    pointer.write_text(folder.name + "\n")
    os.replace(pointer, folder.parent / "latest")
    for old in sorted(folder.parent.glob("step-*"))[:-KEEP]:
        shutil.rmtree(old)
    return folder


def progress_of(folder: Path) -> Progress:
    """Where the run stood at this checkpoint."""
    state = _state(folder)
    return Progress(state["step"], state["seconds"], state["finished"], tuple(state["losses"]))


def _state(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / "state.json").read_text())
        missing = {"step", "seconds", "finished", "losses", "processes", "settings"} - state.keys()
    except (OSError, ValueError, AttributeError) as e:
        raise _damaged(folder / "state.json", e) from e
    if missing:
        raise _damaged(folder / "state.json", KeyError(f"{sorted(missing)} missing"))
    return state


def _damaged(path: Path, reason: Exception) -> UserError:
    said = (str(reason).splitlines() or [type(reason).__name__])[0]
    return UserError(
        f"{path} is damaged: {said}", hint=f"move {path.parent} away to go on from the checkpoint before it"
    )


def check_settings(folder: Path, settings: dict[str, Any], processes: int) -> None:
    """Refuse to go on under other settings, or on other data.

    Raises:
        UserError: naming every setting that differs, with its saved and its new value.
    """
    state = _state(folder)
    now, before = settings | {"processes": processes}, state["settings"] | {"processes": state["processes"]}
    changed = [f"{k}: {before.get(k)!r} then, {now.get(k)!r} now" for k in sorted(now) if before.get(k) != now.get(k)]
    if changed:
        raise UserError(
            f"{folder.parents[1]} holds a run with other settings: " + "; ".join(changed),
            hint="go on with the settings of then, or give another folder with run=…",
        )


def restore(folder: Path, head: DraftHead, optimizer: Optimizers) -> None:
    """Load weights and optimizer state in place.

    Raises:
        UserError: the checkpoint is damaged.
    """
    head.load_state_dict(read_head(folder / "head").state_dict())
    try:
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu"))
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as e:
        raise _damaged(folder / "optimizer.pt", e) from e


def must_match(config: Config) -> dict[str, Any]:
    """The settings, flat, without those that change no trained number."""
    plain = json.loads(json.dumps(config.flat()))  # as a checkpoint gives them back: tuples become lists
    return {k: v for k, v in plain.items() if k not in FREE and k.split(".")[0] not in FREE_SECTIONS}
