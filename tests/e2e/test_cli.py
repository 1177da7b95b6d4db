"""The real command line on the 0.85 M model: train, pinned losses, export, bench, generate; mistakes exit with 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_train.cli import main

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
# What every run here shares: float32, so that the losses can be pinned.
SMALL = [
    "recipe=eagle3",
    "target=glassllm",
    "draft.layer_ids=[1,2,3]",
    "draft.vocab_size=512",
    f"data.train={DATA / 'glassllm_train.jsonl.gz'}",
    f"data.heldout={DATA / 'glassllm_heldout.jsonl.gz'}",
    "train.precision=fp32",
    "train.target_dtype=float32",
    "train.device=cpu",
    "algorithm.depths=3",
    "eval.prompts=6",
    "eval.max_new_tokens=48",
    "eval.heldout_rows=16",
    "train.log_every=10",
    "train.optimizer=adamw",
    "train.lr=1e-3",
]


def losses(run: Path) -> dict[int, float]:
    """Step → the mean loss of the steps since the last line, from metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["loss"] for r in records if r["kind"] == "train"}


def last_eval(run: Path) -> dict:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if r["kind"] == "eval"][-1]


@pytest.fixture(scope="module")
def trained(glassllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 steps, exported."""
    run = tmp_path_factory.mktemp("runs") / "small"
    assert main(["train", *SMALL, f"run={run}", "train.steps=60", "train.save_every=25"]) == 0
    assert main(["export", f"run={run}"]) == 0
    return run


def test_losses_are_pinned(trained: Path) -> None:
    assert losses(trained) == pytest.approx(PINNED, rel=1e-3)


def test_it_learns_and_the_loop_agrees_with_the_unroll(trained: Path) -> None:
    e = last_eval(trained)
    assert e["acceptance_length"] > 1.2
    assert e["walked_length"] == e["acceptance_length"], "the unroll's walk and the loop visit the same rows"
    assert e["walked_drafts"] == e["acceptance_drafts"]


def test_training_prints_what_bench_measures(trained: Path, tmp_path: Path) -> None:
    """The number of the last evaluation is the exported head's number, exactly."""
    out = tmp_path / "bench.json"
    words = [
        f"head={trained / 'export'}",
        "target=glassllm",
        f"prompts={trained / 'eval_prompts.json'}",
        "modes=[plain]",
    ]
    assert main(["bench", *words, "max_new_tokens=48", f"out={out}"]) == 0
    found, e = json.loads(out.read_text()), last_eval(trained)
    assert found["greedy"]["acceptance_length"] == e["acceptance_length"]
    assert found["greedy"]["rates"] == e["acceptance_rates"]
    assert found["identical"] == found["prompts"] == e["acceptance_prompts"]


def test_generate_answers(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"head={trained / 'export'}", "target=glassllm", "prompt=The Queen", "max_new_tokens=20"]
    assert main(["generate", *words]) == 0
    shown = capsys.readouterr()
    assert "20 tokens" in shown.err and len(shown.out) > 20


def test_a_finished_run_says_so(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (trained / "metrics.jsonl").read_bytes()
    assert main(["train", *SMALL, f"run={trained}", "train.steps=60", "train.save_every=25"]) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert (trained / "metrics.jsonl").read_bytes() == before


def test_changed_settings_are_named(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [w for w in SMALL if not w.startswith("algorithm.depths")]
    assert main(["train", *words, "algorithm.depths=2", f"run={trained}", "train.steps=60"]) == 2
    said = capsys.readouterr().err
    assert "algorithm.depths: 3 then, 2 now" in said and "run=" in said


def test_export_never_overwrites(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (trained / "export" / "model.safetensors").read_bytes()
    assert main(["export", f"run={trained}"]) == 2
    assert "exists" in capsys.readouterr().err
    assert (trained / "export" / "model.safetensors").read_bytes() == before


def test_mistakes_end_with_code_2_and_no_traceback(glassllm: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n{"mess\n')
    nothing = tmp_path / "nothing.jsonl"
    nothing.write_text('{"prompt_ids": [5, 6, 7], "answer_ids": [8]}\n')
    other = [w for w in SMALL if not w.startswith("data.train")]
    cases = {
        ("train", *SMALL, "train.learning_rate=1e-3"): "train.lr",
        ("train", "recipe=eagle33"): "eagle3",
        ("train", *[w for w in SMALL if not w.startswith("target")], f"target={tmp_path}"): "config.json",
        ("train", *other, f"data.train={bad}", f"run={tmp_path}/r"): ":2",
        ("train", *other, f"data.train={nothing}", f"run={tmp_path}/r"): "train",
        ("train", *[w for w in SMALL if "layer_ids" not in w], f"run={tmp_path}/r"): "too shallow",
        ("export", f"run={tmp_path}/none"): "no checkpoint",
        ("bench", f"head={tmp_path}"): "config.json",
        ("frobnicate",): "unknown verb",
    }  # fmt: skip
    for words, expected in cases.items():
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'inference'}"}
        program = "import sys; from eagle_train.cli import main; sys.exit(main(sys.argv[1:]))"
        done = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        assert done.returncode == 2, (words, done.stderr)
        assert expected in done.stderr and "Traceback" not in done.stderr, (words, done.stderr)


PINNED = {1: 19.7543, 10: 18.8575, 20: 15.5908, 30: 13.3786, 40: 12.7679, 50: 12.5304, 60: 12.3971}
