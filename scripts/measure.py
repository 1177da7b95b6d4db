"""Measure the bars that are not a single command, and write them into docs/results/bars.json.

    python scripts/measure.py quickstart [EXTRA=…]   fresh clone, empty cache, `make quickstart`: its minutes
    python scripts/measure.py truth RUN              |training's last acceptance − bench's on the exported folder|
    python scripts/measure.py test                   `make test`: its minutes

The acceptance bars are one command each: `eagle-train bench head=… bar=quickstart.acceptance_greedy_k3`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from eagle_train.formats.card import last_evaluation
from eagle_train.report import bars

ROOT = Path(__file__).resolve().parents[1]


def quickstart(extra: list[str]) -> None:
    """Making the environment is installation and downloads: not counted. Fetching and converting the model is."""
    with tempfile.TemporaryDirectory(prefix="quickstart.") as tmp:
        clone, cache = Path(tmp) / "clone", Path(tmp) / "cache"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        environment = {**os.environ, "EAGLE_TRAIN_HOME": str(cache)}
        environment.pop("PYTHONPATH", None)
        subprocess.run(["make", "env"], cwd=clone, env=environment, check=True)
        subprocess.run(["make", "quickstart", *extra], cwd=clone, env=environment, check=True)
        made = json.loads((clone / "runs" / "quickstart" / "quickstart.json").read_text())
        keep = ROOT / "runs" / f"quickstart-{int(time.time())}"
        keep.parent.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", str(clone / "runs" / "quickstart"), str(keep)], check=True)
    bars.record("quickstart.minutes", round(made["minutes"], 2), "python scripts/measure.py quickstart")
    print(f"{made['minutes']:.2f} minutes; the run is kept in {keep}")


def truth(run: Path) -> None:
    """The same prompts, float32, greedy: the difference must be exactly 0."""
    evaluation = last_evaluation(run)
    assert evaluation is not None, f"{run} has no evaluation"
    import yaml

    config = yaml.safe_load((run / "config.yaml").read_text())
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp) / "bench.json"
        words = [f"head={run / 'export'}", f"target={config['target']}", f"prompts={run / 'eval_prompts.json'}"]
        words += [f"k={config['eval']['k']}", f"max_new_tokens={config['eval']['max_new_tokens']}", "modes=[plain]"]
        subprocess.run([sys.executable, "-m", "eagle_train", "bench", *words, f"out={out}"], check=True)
        found = json.loads(out.read_text())
    difference = abs(found["greedy"]["acceptance_length"] - evaluation["acceptance_length"])
    extra = {"acceptance_length": evaluation["acceptance_length"], "walked_length": evaluation["walked_length"]}
    bars.record("truth.train_vs_bench_diff", difference, f"python scripts/measure.py truth {run}", extra)
    print(f"difference {difference}")


def test() -> None:
    """The environment is made before the clock starts."""
    subprocess.run(["make", "env"], cwd=ROOT, check=True)
    started = time.time()
    subprocess.run(["make", "test"], cwd=ROOT, check=True)
    bars.record("test.minutes", round((time.time() - started) / 60, 2), "python scripts/measure.py test")


if __name__ == "__main__":
    step, *words = sys.argv[1:] or [""]
    if step == "quickstart":
        quickstart(words)
    elif step == "truth" and words:
        truth(Path(words[0]))
    elif step == "test":
        test()
    else:
        raise SystemExit(__doc__)
