"""The training loop, top to bottom."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from eagle_train.algorithms.interface import Algorithm, DepthResult
from eagle_train.algorithms.metrics import DepthTotals
from eagle_train.algorithms.teacher import Teacher
from eagle_train.config.loader import dump_yaml
from eagle_train.config.schema import Config
from eagle_train.data.pack import Pack, answer_runs
from eagle_train.data.sampler import Schedule
from eagle_train.data.types import Sample
from eagle_train.device.choice import choose, peak_memory_gb, use_threads
from eagle_train.draft.head import DraftHead
from eagle_train.errors import UserError
from eagle_train.train import checkpoint
from eagle_train.train.checkpoint import Progress
from eagle_train.train.evaluate import DecodeFn, eval_prompts, evaluate
from eagle_train.train.features import FeatureSource
from eagle_train.train.optimizer import Optimizers, make_optimizer, rate_share
from eagle_train.train.record import Recorder
from eagle_train.train.setup import Materials, build


class Taught(nn.Module):
    """The head inside its algorithm, so that whatever wraps modules (DDP, autocast) wraps the whole forward."""

    def __init__(self, head: DraftHead, algorithm: Algorithm, teacher: Teacher) -> None:
        super().__init__()
        self.head, self.algorithm, self.teacher = head, algorithm, teacher

    def forward(self, pack: Pack, detailed: bool) -> tuple[Tensor, list[DepthResult]]:
        found = self.algorithm.results(self.head, pack, self.teacher, detailed=detailed)
        if found is None:  # nothing to learn here, but every process must still take part in the backward
            return sum((p.sum() * 0.0 for p in self.head.parameters()), torch.zeros(())), []
        return found.loss, found.depths


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its progress, the last evaluation's record, the checkpoint; `stopped_by`: a signal's name."""

    progress: Progress
    evaluation: dict[str, Any]
    checkpoint: Any
    stopped_by: str = ""


class Stop:
    """Ctrl-C and SIGTERM ask the loop to save and leave after the step at hand; the old handlers come back after it."""

    def __init__(self) -> None:
        self.name = ""
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: Any) -> None:
        if self.name:
            raise KeyboardInterrupt  # asked twice: leave at once
        self.name = signal.Signals(number).name


def train(config: Config, decode: DecodeFn | None) -> Outcome:
    """Train as `config` says, going on from the run folder's last checkpoint if there is one.

    Raises:
        UserError: whatever the user gave that cannot be used, settings that changed since the checkpoint, a loss that
            is not finite.
    """
    device = choose(config.train.device)
    mixed = {"bf16": "bf16", "fp32": "no"}[config.train.precision]
    accelerator = Accelerator(
        mixed_precision=mixed, cpu=device.type == "cpu", log_with=list(config.track.trackers) or None,
        project_dir=str(config.run_dir), gradient_accumulation_steps=1,
    )  # fmt: skip
    _check_launch(accelerator)
    world = accelerator.num_processes
    found = checkpoint.latest(config.run_dir)
    if found:
        checkpoint.check_settings(found, checkpoint.must_match(config), world)
    progress = checkpoint.progress_of(found) if found else Progress()
    torch.manual_seed(config.seed)
    stop = Stop()
    try:
        return _train(config, decode, accelerator, found, progress, stop)
    finally:
        stop.restore()


def _train(
    config: Config,
    decode: DecodeFn | None,
    accelerator: Accelerator,
    found: Path | None,
    progress: Progress,
    stop: Stop,
) -> Outcome:
    world, rank = accelerator.num_processes, accelerator.process_index
    threads = use_threads(config.train.threads, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    materials = build(config, accelerator.device)
    prompts = eval_prompts(materials, config)
    optimizer = make_optimizer(materials.head.named_parameters(), config.train)
    if found:
        checkpoint.check_settings(found, materials.identity, world)
        checkpoint.restore(found, materials.head, optimizer)
    recorder = Recorder(config, accelerator, resumed_at=progress.step)
    _announce(recorder, config, materials, progress, f"processes {world}, CPU threads {threads}")
    run = _Run(config, accelerator, materials, optimizer, recorder)
    run.losses = list(progress.losses)
    if accelerator.is_main_process:
        (config.run_dir / "config.yaml").write_text(dump_yaml(config))
        (config.run_dir / "eval_prompts.json").write_text(json.dumps(prompts) + "\n")
    schedule, last = run.schedule, {}
    with recorder.bar:
        stopped = ""  # what all processes agreed on; a signal that comes later is for the next step
        while not progress.finished and not stopped:
            started = time.perf_counter()
            run.step(progress, schedule.window(progress.step, config.train.accumulation, world), rank)
            seconds = progress.seconds + time.perf_counter() - started
            seconds, stopped = run.agree(seconds, stop.name)
            progress = replace(progress, step=progress.step + 1, seconds=seconds)
            out_of_time = 0 < config.train.max_seconds <= progress.seconds
            progress = replace(progress, finished=progress.step >= config.train.steps or out_of_time)
            recorder.progress(progress.step, progress.seconds)
            due = config.eval.every and progress.step % config.eval.every == 0
            if progress.finished or due:
                last = run.evaluate(progress, decode)
            if progress.finished or stopped or progress.step % config.train.save_every == 0:
                found = run.save(progress)
    recorder.close()
    return Outcome(progress, last, found, "" if progress.finished else stopped)


class _Run:
    """What stays the same from step to step."""

    def __init__(
        self,
        config: Config,
        accelerator: Accelerator,
        materials: Materials,
        optimizer: Optimizers,
        recorder: Recorder,
    ) -> None:
        self.config, self.accelerator, self.materials, self.recorder = config, accelerator, materials, recorder
        taught = Taught(materials.head, materials.algorithm, materials.teacher)
        self.taught = accelerator.prepare_model(taught)
        self.optimizer = optimizer
        budget = int(config.train.features_gb * 1e9) if config.train.features == "hybrid" else 0
        self.source = FeatureSource(materials.train, materials.target, materials.teacher, budget=budget)
        self.heldout = FeatureSource(materials.heldout, materials.target, materials.teacher, budget=budget // 4)
        self.schedule = Schedule([len(s.ids) for s in materials.train], config.train.batch_tokens, config.seed)
        self.packs_per_step = config.train.accumulation * accelerator.num_processes
        self.taught_rows = [_taught_rows(s) for s in materials.train]
        self.totals, self.window_seconds, self.window_tokens = DepthTotals(), 0.0, 0
        self.losses: list[float] = []
        self.said_broken = 0
        self.window_steps, self.feature_seconds = 0, 0.0

    def step(self, progress: Progress, window: list[list[tuple[int, ...]]], rank: int) -> None:
        """One optimizer step over `window` [accumulation][process] of packs."""
        config, started = self.config.train, time.perf_counter()
        # Every process knows the whole window, so the divisor needs no collective.
        weigh = self.materials.algorithm.share
        divisor = max(sum(weigh(self.taught_rows[i]) for packs in window for pack in packs for i in pack), 1)
        log = progress.step == 0 or (progress.step + 1) % config.log_every == 0 or progress.step + 1 == config.steps
        loss = 0.0
        first = progress.step * self.packs_per_step
        for number, packs in enumerate(window):
            waited = time.perf_counter()
            epoch = self.schedule.epoch_of(first + number * self.accelerator.num_processes + rank)
            pack = self.source.pack(packs[rank], [f"{self.config.seed}/{epoch}/{i}" for i in packs[rank]])
            self.feature_seconds += time.perf_counter() - waited
            part, results = self.taught(pack, log)
            # DDP averages over processes; the loss is a sum over all of them.
            scaled = part * (self.accelerator.num_processes / divisor)
            self.accelerator.backward(scaled)
            loss += float(part.detach()) / divisor
            if log:
                self.totals.add(results)
            self.window_tokens += len(pack.ids) * self.accelerator.num_processes
        norm = float(self.accelerator.clip_grad_norm_(self.taught.parameters(), config.clip_norm))
        if not (loss == loss and norm == norm and norm < float("inf")):
            raise UserError(
                f"loss {loss} and gradient norm {norm} at step {progress.step + 1} are not finite",
                hint="lower train.lr, or use train.precision=fp32; the last checkpoint is untouched",
            )
        share = rate_share(config, progress.step, progress.seconds)
        self.optimizer.step(share)
        self.losses.append(self._over_processes(loss))
        self.window_steps += 1
        self.window_seconds += time.perf_counter() - started
        if log:
            self._log(progress, share * config.lr, norm)

    def agree(self, seconds: float, signalled: str) -> tuple[float, str]:
        """One clock and one decision to stop for all processes: the slowest's seconds, anyone's signal."""
        if self.accelerator.num_processes > 1:
            mine = torch.tensor([[seconds, float(bool(signalled))]], device=self.accelerator.device)
            seconds, anyone = self.accelerator.gather(mine).amax(0).tolist()
            signalled = signalled or ("SIGTERM" if anyone else "")
        return seconds, signalled

    def _over_processes(self, value: float) -> float:
        if self.accelerator.num_processes == 1:
            return value
        return float(self.accelerator.reduce(torch.tensor(value, device=self.accelerator.device), "sum"))

    def _log(self, progress: Progress, rate: float, norm: float) -> None:
        step, figures = progress.step + 1, self.totals.figures()
        loss, speed = sum(self.losses) / len(self.losses), self.window_tokens / self.window_seconds
        record = {
            "loss": loss,
            "lr": rate,
            "grad_norm": norm,
            **figures,
            "epoch": self.schedule.epoch_of(progress.step * self.packs_per_step),
            "tokens_per_second": speed,
            "feature_share": self.feature_seconds / self.window_seconds,
            "kept_gb": self.source.kept_bytes / 1e9,
            "broken": len(self.source.broken),
            "memory_gb": peak_memory_gb(self.accelerator.device),
        }
        self.recorder.write(step, "train", record)
        left = (self.config.train.steps - step) * self.window_seconds / self.window_steps
        if self.config.train.max_seconds:
            left = min(left, self.config.train.max_seconds - progress.seconds)
        right = figures.get("accuracy")
        accuracy = " ".join(f"{a:.2f}" for a in right) if isinstance(right, list) else ""
        if len(self.source.broken) > self.said_broken:
            self.said_broken = len(self.source.broken)
            names = ", ".join(list(self.source.broken.values())[:8])
            self.recorder.say(
                f"not trained on, their states are not finite: {self.said_broken} conversations ({names})"
            )
        self.recorder.say(
            f"step {step}/{self.config.train.steps}  loss {loss:.3f}  accuracy {accuracy}  estimated length "
            f"{figures.get('estimated_length_greedy', 1.0):.2f}  lr {rate:.1e}  {speed:.0f} tok/s  "
            f"features {record['feature_share']:.0%}  ETA {max(left, 0) / 60:.1f} min"
        )
        self.totals, self.losses, self.window_seconds, self.window_tokens = DepthTotals(), [], 0.0, 0
        self.window_steps, self.feature_seconds = 0, 0.0

    def evaluate(self, progress: Progress, decode: DecodeFn | None) -> dict[str, Any]:
        """Main process only; the others wait at the next collective."""
        if not self.accelerator.is_main_process:
            return {}
        record = evaluate(self.materials, self.heldout, self.config, decode)
        self.recorder.write(progress.step, "eval", record)
        length = f", acceptance length {record['acceptance_length']:.3f} at k={record['k']} " if decode else ""
        walked = f"(walked {record['walked_length']:.3f})" if decode else ""
        self.recorder.say(f"evaluation at step {progress.step}: loss {record['heldout_loss']:.3f}{length}{walked}")
        return record

    def save(self, progress: Progress) -> Any:
        """A checkpoint, written by the main process."""
        if not self.accelerator.is_main_process:
            return None
        head, run = self.materials.head, self.config.run_dir
        settings = checkpoint.must_match(self.config) | self.materials.identity
        progress = replace(progress, losses=tuple(self.losses))
        return checkpoint.save(run, head, self.optimizer, progress, settings, self.accelerator.num_processes)


def _check_launch(accelerator: Accelerator) -> None:
    """What was launched is what this loop can do, and accelerate did not fall back to less.

    Raises:
        UserError: FSDP, DeepSpeed or the like; or fewer processes than the launcher started.
    """
    known = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU")
    if accelerator.distributed_type.name not in known:
        raise UserError(
            f"accelerate is set to {accelerator.distributed_type.name}; this version trains with one process or plain "
            "data parallelism",
            hint="choose those in `accelerate config`, or pass --num_processes to `accelerate launch`",
        )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != accelerator.num_processes:
        raise UserError(f"{started} processes were started, but accelerate sees {accelerator.num_processes}")


def _taught_rows(sample: Sample) -> int:
    return int((answer_runs(torch.tensor(sample.mask), [(0, len(sample.mask))]) >= 2).sum())


def _announce(recorder: Recorder, config: Config, materials: Materials, progress: Progress, split: str) -> None:
    head = materials.head
    for part, report in zip(("train", "heldout"), materials.reports, strict=True):
        for line in report.lines():
            recorder.say(f"{part}: {line}")
    parameters = sum(p.numel() for p in head.parameters()) / 1e6
    ids = head.config.layer_ids
    read = f"streams after layers {list(ids)}" if ids else "the target's last state"
    recorder.say(
        f"head: {parameters:.1f} M parameters, reads {read}, draft vocabulary {head.config.draft_vocab_size} "
        f"(covers {materials.coverage:.2%} of the answers)"
    )
    if materials.fresh:
        recorder.say(f"head: could not be taken from the target, starts random: {', '.join(materials.fresh)}")
    if progress.finished:
        recorder.say(f"{config.run_dir}: this run came to its end at step {progress.step}; nothing to do")
    elif progress.step:
        recorder.say(f"{config.run_dir}: going on from step {progress.step}")
    recorder.say(f"device {recorder.accelerator.device}, {split}, precision {config.train.precision}")
