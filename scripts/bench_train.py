"""What a training step costs: against this project's first version, over length, over the share of trained tokens.

    python scripts/bench_train.py                 every case; docs/results/bench_train.json and the bars [train.*]
    python scripts/bench_train.py only=main.bf16

Each measurement is a process of its own, one after another, the two versions by turns. A step has its features given
and includes the optimizer. Extra peak: the highest resident memory within a step, less what is resident after the
first step (`malloc_trim`). The first version is this repository at REFERENCE, checked out beside it.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = "079bda9"
RESULT = ROOT / "docs" / "results" / "bench_train.json"
DEPTHS, ROUNDS, STEPS = 7, 2, 3
CASES: dict[str, dict[str, Any]] = {
    "main": {"width": 576, "heads": 9, "groups": 3, "inner": 1536, "vocab": 8192, "tokens": 2048, "documents": 4},
    "wide": {"width": 1024, "heads": 16, "groups": 8, "inner": 3072, "vocab": 32000, "tokens": 1024, "documents": 4},
    "masked": {"width": 576, "heads": 9, "groups": 3, "inner": 1536, "vocab": 8192, "tokens": 2048, "documents": 4,
               "trained": 0.08},
    "short": {"width": 576, "heads": 9, "groups": 3, "inner": 1536, "vocab": 8192, "tokens": 1024, "documents": 1},
    "long": {"width": 576, "heads": 9, "groups": 3, "inner": 1536, "vocab": 8192, "tokens": 4096, "documents": 1},
}  # fmt: skip
TARGET_VOCAB = 49152


def child(tree: str, name: str, dtype: str) -> dict[str, float]:
    """One version's step on one case, in this process."""
    sys.path[:0] = [tree, f"{tree}/inference"]
    import torch

    torch.set_num_threads(len(__import__("os").sched_getaffinity(0)))
    torch.manual_seed(0)
    head, pack, teacher = _scene(CASES[name], torch.bfloat16 if dtype == "bf16" else torch.float32)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-4, fused=True)
    learn = _learner(head, pack, teacher)
    mixed = (lambda: torch.autocast("cpu", torch.bfloat16)) if dtype == "bf16" else nullcontext

    def step() -> float:
        started = time.perf_counter()
        with mixed():
            loss = learn()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started

    step()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    step()
    extra = _status("VmHWM") - before
    seconds = statistics.median(step() for _ in range(STEPS))
    return {"tokens_per_second": len(pack.ids) / seconds, "extra_peak_mb": extra, "seconds": seconds}


def _scene(case: dict[str, Any], dtype: Any) -> tuple[Any, Any, Any]:
    import torch

    from eagle_train.algorithms.teacher import Teacher
    from eagle_train.data.pack import Pack, layout
    from eagle_train.draft.eagle3 import Eagle3Head
    from eagle_train.draft.layers import HeadConfig
    from eagle_train.draft.vocab import DraftVocab

    width, vocab, n = case["width"], case["vocab"], case["tokens"]
    config = HeadConfig(
        hidden_size=width, intermediate_size=case["inner"], num_attention_heads=case["heads"],
        num_key_value_heads=case["groups"], head_dim=64, vocab_size=TARGET_VOCAB, draft_vocab_size=vocab,
        target_hidden_size=width, layer_ids=(2, 15, 27), rms_norm_eps=1e-5, max_position_embeddings=8192,
    )  # fmt: skip
    ids = torch.arange(vocab) * (TARGET_VOCAB // vocab)
    head = Eagle3Head(config, DraftVocab.of(ids.tolist(), TARGET_VOCAB))
    table = torch.randn(TARGET_VOCAB, width).to(dtype)
    rows = (torch.randn(TARGET_VOCAB, width) * 0.1).to(dtype)
    before: Any = head
    if hasattr(head, "attach"):
        head.attach(SimpleNamespace(embedding=table, head_weight=rows))
    else:  # a version from before there was a second kind of head
        before.attach_embedding(table)
    teacher = Teacher(lambda last: last @ rows.mT, ids, rows[ids])
    positions, document, bounds = layout([n // case["documents"]] * case["documents"])
    share = case.get("trained", 1.0)
    mask = positions >= (n // case["documents"]) * (1 - share)
    given = {
        "ids": torch.randint(TARGET_VOCAB, (n,)), "positions": positions, "document": document, "mask": mask,
        "bounds": bounds, "streams": torch.randn(n, 3 * width).to(dtype), "last": torch.randn(n, width).to(dtype),
        "top": ids[torch.randint(vocab, (n,))],
    }  # fmt: skip
    if "lse" in Pack.__dataclass_fields__:
        given["lse"] = torch.full((n,), 12.0)
    return head, Pack(**given), teacher


def _learner(head: Any, pack: Any, teacher: Any) -> Any:
    """A function that gives the loss, whichever version this is."""
    import torch

    from eagle_train.algorithms.eagle3 import Eagle3

    if "lse" not in type(pack).__dataclass_fields__:
        first: Any = Eagle3
        algorithm = first(DEPTHS, 0.8)
        return lambda: torch.stack([r.loss for r in algorithm.results(head, pack, teacher)]).sum()
    now = Eagle3([0.8**k for k in range(DEPTHS)])

    def learn() -> torch.Tensor:
        found = now.results(head, pack, teacher)
        assert found is not None
        return found.loss

    return learn


def _status(key: str) -> float:
    """A memory figure of this process, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise AssertionError(key)


def gemm_seconds(dtype: str) -> float:
    """What the main case's matrix products alone take: every shape of its step, timed by itself."""
    import torch

    case = CASES["main"]
    torch.set_num_threads(len(__import__("os").sched_getaffinity(0)))
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    n, h, inner, vocab = case["tokens"], case["width"], case["inner"], case["vocab"]
    queries, keys = case["heads"] * 64, case["groups"] * 64
    layer = [(2 * h, queries), (2 * h, keys), (2 * h, keys), (queries, h), (h, inner), (h, inner), (inner, h)]
    total = 3 * DEPTHS * sum(_gemm(torch, kind, n, a, b) for a, b in layer)
    total += 2 * _gemm(torch, kind, n, 3 * h, h)  # fc: its inputs need no gradient
    rows = 1024
    total += 3 * DEPTHS * n / rows * _gemm(torch, kind, rows, h, vocab)
    return total + _gemm(torch, kind, n, h, vocab)  # the teacher


def _gemm(torch: Any, kind: Any, rows: int, inputs: int, outputs: int) -> float:
    x, w = torch.randn(rows, inputs).to(kind), torch.randn(outputs, inputs).to(kind)
    times = []
    for _ in range(7):
        started = time.perf_counter()
        torch.nn.functional.linear(x, w)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def run(tree: Path, name: str, dtype: str) -> dict[str, float]:
    """`child` in a process of its own."""
    words = [sys.executable, "-P", __file__, "child", str(tree), name, dtype]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} {dtype} in {tree} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    version = "ours" if tree == ROOT else "first version"
    speed, peak = found["tokens_per_second"], found["extra_peak_mb"]
    print(f"{name:7} {dtype}  {version:14} {speed:8.0f} tok/s  extra peak {peak:6.0f} MB", flush=True)
    return found


def compare(old: Path, name: str, dtype: str) -> dict[str, Any]:
    """Both versions by turns; the ratio of the medians."""
    theirs, ours = [], []
    for _ in range(ROUNDS):
        theirs.append(run(old, name, dtype))
        ours.append(run(ROOT, name, dtype))
    speed = [statistics.median(r["tokens_per_second"] for r in part) for part in (ours, theirs)]
    peak = [statistics.median(r["extra_peak_mb"] for r in part) for part in (ours, theirs)]
    return {"speed_ratio": speed[0] / speed[1], "memory_ratio": peak[0] / peak[1], "ours": ours, "reference": theirs}


def main(words: list[str]) -> None:
    if words[:1] == ["child"]:
        print(json.dumps(child(*words[1:])))
        return
    only = dict(word.split("=", 1) for word in words).get("only", "")
    results: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    with tempfile.TemporaryDirectory() as tmp:
        old = Path(tmp) / "reference"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(old), REFERENCE], cwd=ROOT, check=True)
        try:
            for case in ("main.bf16", "main.fp32", "wide.bf16", "wide.fp32"):
                if only in ("", case):
                    results[case] = compare(old, *case.split("."))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(old)], cwd=ROOT, check=True)
    if only in ("", "growth"):
        results["growth"] = {name: run(ROOT, name, "bf16") for name in ("short", "long")}
    if only in ("", "masked"):
        results["masked"] = {name: run(ROOT, name, "bf16") for name in ("main", "masked")}
    if only in ("", "gemm"):
        for dtype in ("bf16", "fp32"):
            seconds, ideal = run(ROOT, "main", dtype)["seconds"], gemm_seconds(dtype)
            results[f"gemm.{dtype}"] = {"step_seconds": seconds, "gemm_seconds": ideal, "share": ideal / seconds}
    RESULT.write_text(json.dumps(results, indent=2) + "\n")
    _record(results)


def _record(results: dict[str, Any]) -> None:
    from eagle_train.report.bars import record

    command = "python scripts/bench_train.py"
    compared = {name: r for name, r in results.items() if name.split(".")[0] in ("main", "wide")}
    mains = [r for name, r in compared.items() if name.startswith("main")]
    if mains:
        each = {
            f"{name} {kind}": round(r[kind], 3)
            for name, r in compared.items()
            for kind in ("speed_ratio", "memory_ratio")
        }
        record("train.speed_vs_reference", round(min(r["speed_ratio"] for r in mains), 3), command, extra=each)
        record("train.memory_vs_reference", round(max(r["memory_ratio"] for r in mains), 3), command)
    if "growth" in results:
        short, long = (results["growth"][name]["extra_peak_mb"] for name in ("short", "long"))
        record("train.memory_growth_1k_4k", round(long / short, 3), command)
    if "masked" in results:
        full, part = (results["masked"][name]["seconds"] for name in ("main", "masked"))
        record("train.masked_cost", round(part / full, 3), command)
    shares = {name: r["share"] for name, r in results.items() if name.startswith("gemm.")}
    if shares:
        record(
            "train.gemm_share",
            round(min(shares.values()), 3),
            command,
            extra={k: round(v, 3) for k, v in shares.items()},
        )


if __name__ == "__main__":
    main(sys.argv[1:])
