"""Recipes × losses × seeds on the same rows: which teaches best, and by how much more than chance.

    python scripts/ablate.py [recipes=eagle3,eagle3_1] [losses=kl,lk_hybrid] [seeds=0,1,2] [key=value … for every run]
    python scripts/ablate.py table                 only write the table anew

Each run is trained, exported and measured by the public commands. Validation: the last evaluation in training, on
held-out conversations; test: `bench` on its own prompts (`prompts=`, default bundled). A finished run is appended to
docs/results/ablation.jsonl, so a rerun does only what is missing; docs/results/ablation.md is the table. Choose by the
validation column, report the test column.

Options of this script: recipes, losses, seeds, target, seconds (of training per run, default 600) or steps, prompts,
new_tokens (128), limit, folder (runs/ablate), out (docs/results/ablation.jsonl).
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from eagle_train.report import bars

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = {
    "recipes": "eagle3", "losses": "kl,lk_hybrid", "seeds": "0,1,2", "target": "smollm2", "seconds": "600", "steps": "",
    "prompts": "bundled", "new_tokens": "128", "limit": "0", "folder": "runs/ablate",
    "out": str(ROOT / "docs" / "results" / "ablation.jsonl"),
}  # fmt: skip
# Student's t for a 95 % interval of a mean, by the number of runs less one.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def main(words: list[str]) -> int:
    """Do what is missing, then write the table."""
    table_only = words[:1] == ["table"]
    given = dict(w.split("=", 1) for w in words if "=" in w)
    wrong = [w for w in words if "=" not in w and w != "table"]
    if wrong:
        print(f"error: expected key=value, was given {' '.join(wrong)}", file=sys.stderr)
        return 2
    options = {key: given.pop(key, value) for key, value in DEFAULTS.items()}
    out = Path(options["out"])
    if not table_only:
        for recipe, loss, seed in itertools.product(*(options[k].split(",") for k in ("recipes", "losses", "seeds"))):
            settings = {"recipe": recipe, "loss": loss, "seed": int(seed), "target": options["target"], "keys": given}
            settings["length"] = f"{options['steps']} steps" if options["steps"] else f"{options['seconds']} s"
            if any(entry["settings"] == settings for entry in entries(out)):
                print(f"done before: {settings}")
                continue
            code = one(settings, options, given, out)
            if code:
                return code
    out.with_suffix(".md").write_text(table(entries(out)))
    print(out.with_suffix(".md").read_text())
    return 0


def entries(out: Path) -> list[dict[str, Any]]:
    """All finished runs."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def one(settings: dict[str, Any], options: dict[str, str], keys: dict[str, str], out: Path) -> int:
    """Train, export, measure and append one run; returns a failing command's exit code."""
    name = "-".join([settings["recipe"], settings["loss"].replace("*", "").replace(" ", ""), str(settings["seed"])])
    run = Path(options["folder"]) / name
    length = [f"train.steps={options['steps']}"] if options["steps"] else []
    length = length or ["train.steps=100000", f"train.max_seconds={options['seconds']}"]
    train = ["train", f"recipe={settings['recipe']}", f"algorithm.loss={settings['loss']}", f"seed={settings['seed']}"]
    train += [f"target={options['target']}", f"run={run}", *length, *(f"{k}={v}" for k, v in keys.items())]
    bench = ["bench", f"head={run / 'export'}", f"target={options['target']}", f"prompts={options['prompts']}"]
    bench += [f"limit={options['limit']}", f"max_new_tokens={options['new_tokens']}", "modes=[sampled,plain]"]
    commands = [train, ["export", f"run={run}"], [*bench, f"out={run / 'bench.json'}"]]
    for words in commands:
        if words[0] == "export" and (run / "export").exists():
            continue
        print(f"\n$ eagle-train {shlex.join(words)}", flush=True)
        code = subprocess.run([sys.executable, "-m", "eagle_train", *words]).returncode
        if code:
            return code
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [r for r in records if r["kind"] == "eval"][-1]
    found = json.loads((run / "bench.json").read_text())
    entry = {
        "settings": settings,
        "steps": last["step"],
        "validation": last["acceptance_length"],
        "test": found["greedy"]["acceptance_length"],
        "test_drafts": found["greedy"]["drafts"],
        "test_sampled": found["sampled_t1_greedy_drafts"]["acceptance_length"],
        "identical": f"{found['identical']} of {found['prompts']}",
        "machine": bars.machine(),
        "versions": bars.versions(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as f:
        f.write(json.dumps(entry) + "\n")
    return 0


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: one line per recipe, loss and settings; mean ± half of a 95 % interval over the seeds."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in found:
        key = {k: v for k, v in entry["settings"].items() if k != "seed"}
        groups.setdefault(json.dumps(key, sort_keys=True), []).append(entry)
    lines = [
        "# Recipes and losses, like for like",
        "",
        "Acceptance length at K = 3, greedy and at temperature 1 (greedy drafts): mean ± half of the 95 % interval",
        "over the seeds. Chosen by validation (held-out conversations), reported on test. Made by scripts/ablate.py.",
        "",
        "| recipe | loss | target | length | other keys | seeds | validation | test | test, temperature 1 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    order = sorted(groups, key=lambda key: -mean(e["validation"] for e in groups[key]))
    for key in order:
        s, part = json.loads(key), groups[key]
        keys = ", ".join(f"`{k}={v}`" for k, v in s["keys"].items())
        columns = " | ".join(interval([e[kind] for e in part]) for kind in ("validation", "test", "test_sampled"))
        lines.append(
            f"| {s['recipe']} | {s['loss']} | {s['target']} | {s['length']} | {keys} | {len(part)} | {columns} |"
        )
    return "\n".join(lines) + "\n"


def interval(values: list[float]) -> str:
    """`1.523 ± 0.021`, or the value alone where there is only one."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    half = T95.get(len(values) - 1, 1.96) * stdev(values) / math.sqrt(len(values))
    return f"{mean(values):.3f} ± {half:.3f}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
