"""Gates between training and serving: an overfitted head must accept nearly everything, through export and reload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_train.cli import main
from tests.e2e.test_cli import DATA, SMALL, last_eval


def test_overfit_one_conversation(glassllm: Path, tmp_path: Path) -> None:
    """Users of other trainers met 98 % training accuracy and 10 % served acceptance. Here it is one number."""
    import gzip

    import torch

    from eagle_inference.engine import SpeculativeEngine
    from eagle_inference.sampling import SamplingParams
    from eagle_train.targets.hf import Target

    rows = gzip.decompress((DATA / "glassllm_heldout.jsonl.gz").read_bytes()).decode().splitlines()
    prompt = json.loads(rows[5])["prompt_ids"]
    target = Target.load(glassllm, layer_ids=[1, 2, 3], dtype=torch.float32)
    answer = SpeculativeEngine(target, None).generate(prompt, SamplingParams(max_new_tokens=60)).tokens
    data = tmp_path / "one.jsonl"
    data.write_text(json.dumps({"prompt_ids": prompt, "answer_ids": answer}) + "\n")
    drop = ("data.", "eval.", "train.log_every", "train.lr")
    words = [w for w in SMALL if not w.startswith(drop)] + [f"data.train={data}", f"data.heldout={data}"]
    words += ["train.steps=150", "train.lr=3e-3", "train.log_every=50", "eval.prompts=1", "eval.max_new_tokens=40"]
    run, out = tmp_path / "run", tmp_path / "bench.json"
    assert main(["train", *words, f"run={run}"]) == 0
    assert main(["export", f"run={run}"]) == 0
    bench = [f"head={run / 'export'}", "target=glassllm", f"prompts={run / 'eval_prompts.json'}", "max_new_tokens=40"]
    assert main(["bench", *bench, "modes=[plain]", f"out={out}"]) == 0
    found = json.loads(out.read_text())
    assert found["greedy"]["acceptance_length"] >= 3 + 0.8
    assert found["greedy"]["acceptance_length"] == last_eval(run)["acceptance_length"]


def test_wandb_offline_never_asks(glassllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    words = [w for w in SMALL if not w.startswith(("eval.prompts", "eval.max_new", "train.log_every"))]
    words += ["eval.prompts=1", "eval.max_new_tokens=8", "train.steps=2", "train.log_every=1", "track.trackers=[wandb]"]
    assert main(["train", *words, f"run={run}"]) == 0
    assert list(run.glob("wandb/offline-run-*")), "wandb wrote nothing"
