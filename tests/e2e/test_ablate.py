"""scripts/ablate.py on the 0.85 M model: what is finished is not run again, and the table has one line per setting."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "ablate.py"
DATA = ROOT / "tests" / "data" / "glassllm_"


def ablate(out: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "target=glassllm", "losses=kl", "steps=2", "limit=1", "new_tokens=8",
         "prompts=written", f"folder={out.parent / 'runs'}", f"out={out}", "draft.layer_ids=[1,2,3]",
         "draft.vocab_size=256", "data.max_rows=8", "eval.prompts=1", "eval.max_new_tokens=8", "train.device=cpu",
         f"data.train={DATA}train.jsonl.gz", f"data.heldout={DATA}heldout.jsonl.gz", *words],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_a_rerun_does_only_what_is_missing(glassllm: Path, tmp_path: Path) -> None:
    out = tmp_path / "ablation.jsonl"
    ablate(out, "seeds=0")
    said = ablate(out, "seeds=0,1")
    assert said.count("done before") == 1
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [e["settings"]["seed"] for e in found] == [0, 1]
    assert all(e["test"] >= 1 and e["steps"] == 2 and e["identical"] == "1 of 1" for e in found)
    rows = [line for line in out.with_suffix(".md").read_text().splitlines() if line.startswith("| eagle3 | kl")]
    assert len(rows) == 1 and "| 2 |" in rows[0] and "±" in rows[0]


def test_interval() -> None:
    spec = importlib.util.spec_from_file_location("ablate", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.interval([1.5]) == "1.500"
    # mean 2, sample deviation 1: 4.303 / √3
    assert module.interval([1.0, 2.0, 3.0]) == f"2.000 ± {4.303 / 3**0.5:.3f}"
    with pytest.raises(IndexError):
        module.interval([])
