"""`docs/results/bars.json`: one figure per bar, written by what measured it, with all that is needed to redo it."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

FILE = Path("docs") / "results" / "bars.json"


def record(bar_id: str, value: float, command: str, extra: dict[str, Any] | None = None) -> None:
    """Write bar `bar_id` into the checkout at hand, leaving the others as they are."""
    path = _checkout() / FILE
    bars = json.loads(path.read_text()) if path.exists() else {}
    bars[bar_id] = {
        "value": value,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain") else ""),
        "machine": machine(),
        "versions": versions(),
        **(extra or {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_suffix(".tmp")
    tmp.write_text(json.dumps(dict(sorted(bars.items())), indent=2, ensure_ascii=False) + "\n")
    os.replace(tmp, path)


def machine() -> str:
    """Processor, cores and memory, in words."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {gigabytes:.0f} GiB"


def versions() -> dict[str, str]:
    """Of Python and the packages whose version may change a figure."""
    out = {"python": platform.python_version()}
    for package in ("torch", "transformers", "accelerate", "eagle-train"):
        try:
            out[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            out[package] = "not installed"
    return out


def _checkout() -> Path:
    top = _git("rev-parse", "--show-toplevel")
    return Path(top) if top else Path.cwd()


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
