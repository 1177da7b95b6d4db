"""What a run goes on from, and what it refuses: edited data, damaged checkpoints. Splitting changes nothing."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from eagle_train.cli import main
from tests.e2e.test_cli import DATA, ROOT, SMALL, losses

CHANGED = ("data.train", "train.log_every", "eval.")
SHORT = ["eval.prompts=1", "eval.max_new_tokens=8", "eval.heldout_rows=2"]
BASE = [w for w in SMALL if not w.startswith(CHANGED)] + SHORT
ROWS = gzip.decompress((DATA / "glassllm_train.jsonl.gz").read_bytes()).decode().splitlines()[:120]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(ROWS) + "\n")
    return path


def words(run: Path, data: Path, *more: str) -> list[str]:
    return ["train", *BASE, f"data.train={data}", f"run={run}", *more]


def weights(run: Path) -> dict:
    name = (run / "checkpoints" / "latest").read_text().strip()
    return load_file(run / "checkpoints" / name / "head" / "model.safetensors")


def difference(one: Path, other: Path) -> float:
    a, b = weights(one), weights(other)
    pairs = [(a[k].double(), b[k].double()) for k in a if a[k].is_floating_point()]
    return max(float((x - y).norm() / x.norm()) for x, y in pairs)


def test_a_log_line_that_spans_the_restart(glassllm: Path, data: Path, tmp_path: Path) -> None:
    """Saves and log lines do not fall together: the line after the restart still averages all its steps."""
    common = ("train.steps=12", "train.log_every=5", "train.save_every=4")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(words(whole, data, *common)) == 0
    assert main(words(broken, data, *common)) == 0
    for name in ("step-000012", "latest"):
        path = broken / "checkpoints" / name
        if path.is_dir():
            path.rename(tmp_path / "gone")
        else:
            path.unlink()
    assert main(words(broken, data, *common)) == 0  # goes on from step 8, four of five losses of the line known
    assert losses(broken) == losses(whole)
    assert difference(whole, broken) == 0.0


def test_data_edited_in_place_is_refused(
    glassllm: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, common = tmp_path / "run", ("train.steps=4", "train.save_every=2")
    assert main(words(run, data, *common)) == 0
    data.write_text("\n".join(ROWS[::-1]) + "\n")
    assert main(words(run, data, *common)) == 2
    assert "the training data's hash" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["optimizer.pt", "state.json", "head/model.safetensors"])
def test_a_damaged_checkpoint_is_named(
    glassllm: Path, data: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(words(run, data, "train.steps=2")) == 0
    path = run / "checkpoints" / "step-000002" / name
    path.write_bytes(path.read_bytes()[:40])
    before = (run / "metrics.jsonl").read_bytes()
    assert main(words(run, data, "train.steps=2")) == 2
    said = capsys.readouterr().err
    assert "damaged" in said and "Traceback" not in said
    assert (run / "metrics.jsonl").read_bytes() == before, "nothing they had is lost"


def test_online_trains_as_hybrid(glassllm: Path, data: Path, tmp_path: Path) -> None:
    common = ("train.steps=6", "train.log_every=1")
    assert main(words(tmp_path / "a", data, *common)) == 0
    assert main(words(tmp_path / "b", data, *common, "train.features=online")) == 0
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-5)


def test_two_processes_are_one_with_accumulation(glassllm: Path, data: Path, tmp_path: Path) -> None:
    """The same packs, split over micro-batches or over two gloo processes: the same weights."""
    common = ("train.steps=6", "train.log_every=1", "train.batch_tokens=512", "train.threads=1")
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(words(one, data, *common, "train.accumulation=2")) == 0
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'inference'}", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, str(ROOT / "train.py"), *words(two, data, *common)[1:]],
        capture_output=True, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "processes 2" in done.stderr
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert difference(one, two) < 1e-5
    assert json.loads((two / "metrics.jsonl").read_text().splitlines()[-1])["kind"] == "eval"
