"""Interrupted is normal: kill -9 and SIGTERM, then the same command, and the tail is the same bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from eagle_train.cli import main
from tests.e2e.test_cli import ROOT, SMALL

STEPS = ["train.steps=24", "train.save_every=6", "train.log_every=1", "eval.prompts=2", "eval.max_new_tokens=8"]
WORDS = [w for w in SMALL if not w.startswith(("train.log_every", "eval.prompts", "eval.max_new"))] + STEPS


def start(run: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'inference'}"}
    command = [sys.executable, str(ROOT / "train.py"), *WORDS, f"run={run}"]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    """Until metrics.jsonl has a line of `step` or later."""
    deadline = time.time() + 240
    while time.time() < deadline:
        path = run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        if any(f'"step": {n},' in line for n in range(step, 25) for line in lines[-3:]):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def tail(run: Path) -> list[tuple[int, float, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records if r["kind"] == "train"]


@pytest.fixture(scope="module")
def whole(glassllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", *WORDS, f"run={run}"]) == 0
    return run


def test_kill_9_and_the_same_command(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run)
    wait_for_step(run, 9, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (run / "checkpoints" / "latest").read_text().strip() in ("step-000006", "step-000012", "step-000018")
    assert main(["train", *WORDS, f"run={run}"]) == 0
    assert tail(run) == tail(whole), "the tail differs from the run that was never killed"
    last = "checkpoints/step-000024/head/model.safetensors"
    ours, theirs = load_file(run / last), load_file(whole / last)
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[k] == theirs[k]).all()) for k in ours)


def test_sigterm_saves_and_says_how_to_go_on(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run)
    wait_for_step(run, 2, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "go on with the same command" in out and f"run={run}" in out
    assert main(["train", *WORDS, f"run={run}"]) == 0
    assert tail(run) == tail(whole)
