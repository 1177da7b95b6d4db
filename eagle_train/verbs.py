"""What the verbs do once their options are read: the rooms put together, and the last lines on the screen."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from eagle_inference.bench import Comparison, compare, continued, measure
from eagle_inference.engine import SpeculativeEngine
from eagle_inference.sampling import SamplingParams
from eagle_train import assets
from eagle_train.config.loader import load_config
from eagle_train.config.schema import Config
from eagle_train.data.prompts import load_prompts, render
from eagle_train.device.choice import choose
from eagle_train.draft.checkpoint import read_head
from eagle_train.draft.head import DraftHead
from eagle_train.errors import UserError
from eagle_train.formats.export import export_head
from eagle_train.options import BenchOptions, ExportOptions, GenerateOptions
from eagle_train.report import bars
from eagle_train.report.table import as_dict, show
from eagle_train.targets.hf import Target
from eagle_train.train import checkpoint
from eagle_train.train.evaluate import Decoded
from eagle_train.train.loop import train
from eagle_train.train.setup import stop_ids


def decode_for_training(
    target: Target, head: DraftHead, prompts: Sequence[list[int]], k: int, max_new_tokens: int
) -> Decoded:
    """The loop as an evaluation needs it: greedy, with each text continued so that it can be walked."""
    params = SamplingParams(max_new_tokens=max_new_tokens, stop_ids=stop_ids(target))
    found = measure(SpeculativeEngine(target, head, k), prompts, params)
    texts = []
    for i, (prompt, answer) in enumerate(zip(prompts, found.answers, strict=True)):
        if i not in found.looped:
            ids = continued(target, prompt, answer.tokens, k)
            texts.append((ids, len(prompt), len(prompt) + len(answer.tokens)))
    return Decoded(
        found.acceptance.acceptance_length,
        found.acceptance.rates,
        found.acceptance.drafts,
        len(found.looped),
        texts,
    )


def train_verb(config: Config, words: Sequence[str]) -> int:
    """Train; print where the head lies and the next command. 0, or 128 + the signal that stopped the run."""
    outcome = train(config, decode_for_training)
    if os.environ.get("RANK", "0") != "0":
        return 0
    run = shlex.quote(str(config.run_dir))
    if outcome.stopped_by:
        print(f"stopped by {outcome.stopped_by} after step {outcome.progress.step}; saved in {outcome.checkpoint}")
        print(f"go on with the same command: accelerate launch train.py {shlex.join(words)}")
        return 130 if outcome.stopped_by == "SIGINT" else 143
    print(f"head: {outcome.checkpoint}/head   metrics: {config.run_dir}/metrics.jsonl")
    print(f"next: eagle-train export run={run}")
    return 0


def export_verb(options: ExportOptions) -> int:
    """Export a run's newest head."""
    run = Path(options.run).expanduser()
    found = checkpoint.latest(run)
    if found is None:
        raise UserError(f"run={run} holds no checkpoint", hint="train first: accelerate launch train.py recipe=eagle3")
    config = load_config([f"recipe={run / 'config.yaml'}"]).config
    path = assets.resolve_target(config.target)
    out = Path(options.out).expanduser() if options.out else run / "export"
    done = export_head(
        found,
        out,
        run=run,
        name=config.target,
        target=path,
        dtype=getattr(torch, options.dtype),
        special=_special_ids(path),
    )
    print(f"exported {done.folder}: {done.tensors} tensors, all accounted for; reloaded logits equal (difference "
          f"{done.max_difference})")  # fmt: skip
    for warning in done.warnings:
        print(f"warning: {warning}")
    print(f"serve: {done.serve}")
    print(f"next:  eagle-train bench head={shlex.quote(str(out))} target={config.target}")
    return 0


def _special_ids(path: str) -> dict[str, object]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {n: getattr(config, n) for n in names if getattr(config, n, None) is not None}


def load_pair(head: str, target: str, dtype: str, device: str) -> tuple[Target, DraftHead]:
    """A head from disk and the target it belongs to, both in `dtype`, on `device`."""
    kind, place = getattr(torch, dtype), choose(device)
    loaded = read_head(head)
    path = assets.resolve_target(target)
    return Target.load(path, dtype=kind, device=place, layer_ids=loaded.config.layer_ids), loaded.to(place, kind)


def run_bench(options: BenchOptions) -> Comparison:
    """Load the pair and the prompts, and compare."""
    target, head = load_pair(options.head, options.target, options.dtype, options.device)
    prompts = load_prompts(options.prompts, target.tokenizer, options.limit)
    params = SamplingParams(max_new_tokens=options.max_new_tokens, stop_ids=stop_ids(target), seed=options.seed)
    modes, console = options.modes, Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(), console=console, disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        tasks: dict[str, TaskID] = {}

        def watch(mode: str, done: int) -> None:
            if mode not in tasks:
                tasks[mode] = bar.add_task(mode, total=len(prompts))
            bar.update(tasks[mode], completed=done)

        return compare(
            target, head, prompts, params, k=options.k, sampled="sampled" in modes, plain="plain" in modes,
            hf="hf" in modes, watch=watch,
        )  # fmt: skip


def bench_verb(options: BenchOptions, words: Sequence[str]) -> int:
    """Measure, show, and write the figures down where asked. Exit code 1 when a float32 answer differs from plain
    decoding's elsewhere than at a near-tie."""
    if options.out and not Path(options.out).expanduser().parent.is_dir():
        raise UserError(f"out={options.out}: its folder does not exist")
    found = run_bench(options)
    show(found, Console(width=None if sys.stdout.isatty() else 120))
    command = "eagle-train bench " + shlex.join(words)
    if options.out:
        figures = {"command": command, "machine": bars.machine(), "versions": bars.versions(), **as_dict(found)}
        Path(options.out).expanduser().write_text(json.dumps(figures, indent=2) + "\n")
    if options.bar:
        extra: dict[str, object] = {"sampled_t1": found.sampled.acceptance.acceptance_length if found.sampled else None}
        extra["sampled_mode"] = "temperature 1, greedy drafts"
        extra["per_position"] = [round(r, 4) for r in found.greedy.acceptance.rates]
        extra["drafts"] = found.greedy.acceptance.drafts
        extra["looped_left_out"] = len(found.greedy.looped)
        extra["identical_to_plain"] = f"{found.identical} of {found.prompts}" if found.plain else "not run"
        extra["near_ties"] = len(found.near_ties)
        bars.record(options.bar, round(found.greedy.acceptance.acceptance_length, 4), command, extra)
    return 1 if found.differing and options.dtype == "float32" else 0


def generate_verb(options: GenerateOptions) -> int:
    """Decode one prompt; the answer on stdout, the acceptance on stderr."""
    target, head = load_pair(options.head, options.target, options.dtype, options.device)
    params = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        max_new_tokens=options.max_new_tokens,
        stop_ids=stop_ids(target),
        seed=options.seed,
    )
    prompt = render([{"role": "user", "content": options.prompt}], target.tokenizer)
    answer = SpeculativeEngine(target, head, options.k).generate(prompt, params)
    print(target.tokenizer.decode(answer.tokens, skip_special_tokens=True))
    print(
        f"{len(answer.tokens)} tokens, acceptance length {answer.acceptance.acceptance_length:.2f}, "
        f"ended by {answer.finish}",
        file=sys.stderr,
    )
    return 0
