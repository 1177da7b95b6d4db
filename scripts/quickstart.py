"""The whole line on one machine: fetch a model, train a head, export it, measure it, show what it is worth.

    make quickstart              about a quarter of an hour on two cores
    make quickstart STEPS=20     the same line in a minute or two (the head is then not worth much)

    python scripts/quickstart.py [steps=N] [seconds=N] [run=FOLDER] [target=…] [key=value … for training]

Each stage is the public command, shown as it is run; an interrupted quickstart goes on where it stopped.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600  # of training; with set-up, export and bench the whole line stays under a quarter of an hour
PROMPTS, NEW_TOKENS = 8, 64


def main(words: list[str]) -> int:
    """Run the stages; returns the first failing stage's exit code."""
    given = dict(w.split("=", 1) for w in words if "=" in w)
    wrong = [w for w in words if "=" not in w]
    if wrong:
        print(f"error: expected key=value, was given {' '.join(wrong)}", file=sys.stderr)
        return 2
    started = time.time()
    steps, seconds = given.pop("steps", ""), given.pop("seconds", "")
    target = given.pop("target", "smollm2")
    run = given.pop("run", "runs/quickstart-short" if steps else "runs/quickstart")
    overrides = [f"{k}={v}" for k, v in given.items()]
    # Three depths for chains of three; small steps and a part of the sample, so that it is seen more than once in time.
    settings = {"algorithm.depths": "3", "train.batch_tokens": "512", "data.max_rows": "1500", "train.log_every": "50"}
    if steps:  # the short form: fewer rows are enough to see the line work
        settings |= {"train.steps": steps, "data.max_rows": "64", "eval.prompts": "2", "train.log_every": "5"}
    else:
        settings |= {"train.steps": "20000", "train.max_seconds": seconds or str(SECONDS)}
    overrides += [f"{k}={v}" for k, v in settings.items() if k not in given]
    prompts, new_tokens = (2, 24) if steps else (PROMPTS, NEW_TOKENS)
    export = Path(run) / "export"
    eagle, python = [sys.executable, "-m", "eagle_train"], sys.executable
    stages = [
        [*eagle, "assets", target] if target in ("smollm2", "glassllm") else [],
        [python, "-m", "accelerate.commands.launch", "--quiet", "--num_processes", "1", "--num_machines", "1",
         "--mixed_precision", "no", "--dynamo_backend", "no", str(ROOT / "train.py"), "recipe=eagle3",
         f"target={target}", f"run={run}", *overrides],
        [*eagle, "export", f"run={run}"],
        [*eagle, "bench", f"head={export}", f"target={target}", "prompts=written", f"limit={prompts}",
         f"max_new_tokens={new_tokens}", f"out={Path(run) / 'bench.json'}"],
    ]  # fmt: skip
    for stage in filter(None, stages):
        print(f"\n$ {readable(stage)}", flush=True)
        if "export" in stage and export.exists():  # made from the run beside it: ours to renew, now that it can be
            shutil.rmtree(export)
        code = subprocess.run(stage).returncode
        if code:
            return code
    minutes = (time.time() - started) / 60
    figures = json.loads((Path(run) / "bench.json").read_text())
    (Path(run) / "quickstart.json").write_text(json.dumps({"minutes": minutes, "bench": figures}, indent=2) + "\n")
    print(f"\nhead: {export}   ({minutes:.1f} minutes)")
    print(f'next: eagle-train generate head={export} target={target} prompt="Why is the sky blue?"')
    return 0


def readable(stage: list[str]) -> str:
    """The command as a person would type it."""
    text = shlex.join(stage).replace(shlex.quote(sys.executable) + " -m eagle_train", "eagle-train")
    launcher = shlex.quote(sys.executable) + " -m accelerate.commands.launch"
    plain = " --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
    return text.replace(launcher + plain, "accelerate launch").replace(shlex.quote(str(ROOT / "train.py")), "train.py")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
