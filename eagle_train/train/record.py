"""What a run writes down: metrics.jsonl always, trackers when asked for, one line on the screen."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from eagle_train.config.schema import Config
from eagle_train.errors import UserError


class Recorder:
    """One per process; only the main one writes. A run that goes on drops the lines its checkpoint does not cover."""

    def __init__(self, config: Config, accelerator: Accelerator, *, resumed_at: int) -> None:
        self.path = config.run_dir / "metrics.jsonl"
        self.accelerator, self.main = accelerator, accelerator.is_main_process
        self.tracking = bool(config.track.trackers)
        if self.main:
            config.run_dir.mkdir(parents=True, exist_ok=True)
            _keep_until(self.path, resumed_at)
        if self.tracking:
            missing = [t for t in config.track.trackers if importlib.util.find_spec(t) is None]
            if missing:  # accelerate would leave them out without a word
                raise UserError(f"track.trackers: {', '.join(missing)} is not installed", f"pip install {missing[0]}")
            if config.track.wandb_mode == "offline" or not os.environ.get("WANDB_API_KEY"):
                if "wandb" in config.track.trackers and config.track.wandb_mode == "online" and self.main:
                    print("wandb: WANDB_API_KEY is not set; writing offline (`wandb sync` sends it later)")
                os.environ["WANDB_MODE"] = "offline"  # never a login prompt in a worker
            accelerator.init_trackers(
                config.track.project, init_kwargs={"wandb": {"dir": str(config.run_dir), "name": config.run_dir.name}}
            )
        self.console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(), console=self.console, disable=not (self.main and sys.stderr.isatty()),
        )  # fmt: skip
        # Under a time limit the bar runs by the clock: the number of steps is then only an upper bound.
        self.seconds = config.train.max_seconds
        self.task = self.bar.add_task("train", total=self.seconds or config.train.steps, completed=0)

    def progress(self, step: int, seconds: float) -> None:
        """Move the bar."""
        self.bar.update(self.task, completed=min(round(seconds), self.seconds) if self.seconds else step)

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Append one record {"step", "kind", …} and hand its numbers to the trackers."""
        if self.main:
            with self.path.open("a") as f:
                f.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        if self.tracking:
            self.accelerator.log(_numbers(values, kind), step=step)

    def say(self, text: str) -> None:
        """One line for the person who watches (main process only)."""
        if self.main:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """End the bar and the trackers."""
        self.bar.stop()
        if self.tracking:
            self.accelerator.end_training()


def _numbers(values: dict[str, Any], kind: str) -> dict[str, float]:
    out: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, (int, float)):
            out[f"{kind}/{key}"] = float(value)
        elif isinstance(value, list):
            out |= {f"{kind}/{key}/{i}": float(v) for i, v in enumerate(value)}
    return out


def _keep_until(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (json.JSONDecodeError, KeyError):
            continue  # the line that was being written when the process died
    tmp = path.with_suffix(".tmp")
    tmp.write_text("".join(line + "\n" for line in kept) if step else "")
    os.replace(tmp, path)
