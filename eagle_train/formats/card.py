"""The model card of an exported head, and the lines that serve it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from eagle_train.draft.forms import architecture
from eagle_train.draft.head import DraftHead
from eagle_train.draft.layers import HeadConfig


def serve_lines(target: str, folder: Path, method: str, k: int = 3) -> dict[str, str]:
    """Ready lines per engine; each names the method, `eagle3` or `eagle`: vLLM may guess wrongly from the path."""
    place = str(folder.resolve())
    spec = json.dumps({"model": place, "method": method, "num_speculative_tokens": k})
    return {
        "vLLM": f"vllm serve {target} --speculative-config '{spec}'",
        "vllm-ascend": f"vllm serve {target} --speculative-config '{spec}'",
        "SGLang": (
            f"python -m sglang.launch_server --model {target} --speculative-algorithm {method.upper()} "
            f"--speculative-draft-model-path {place} --speculative-num-steps {k} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {k + 1}"
        ),
    }


def cannot_serve(head: DraftHead) -> dict[str, str]:
    """Engines that cannot serve this head, or not in every version, each with the reason (docs/checkpoints.md)."""
    config = head.config
    out: dict[str, list[str]] = {}
    if not isinstance(config, HeadConfig):
        return {}
    if len(config.layer_ids) != 3:
        for engine in ("vllm-ascend", "SGLang"):
            out.setdefault(engine, []).append(f"it reads exactly three streams, this head {len(config.layer_ids)}")
    if config.layer_ids[0] == 1:
        out.setdefault("SGLang", []).append("it cannot express layer ids that begin with 1")
    flags = [n for n in ("fc_norm", "norm_output") if getattr(config, n)]
    if flags:
        out.setdefault("SGLang", []).append(f"it does not know {' and '.join(flags)}")
        out.setdefault("vLLM before 2026-06", []).append(f"it does not know {' and '.join(flags)}")
    if config.layer_ids[0] == 0:
        out.setdefault("vLLM's Transformers backend", []).append("layer id 0 means the last layer there")
    return {engine: "; ".join(reasons) for engine, reasons in out.items()}


def model_card(
    head: DraftHead,
    *,
    name: str,
    target: str,
    run: Path,
    dtype: torch.dtype,
    evaluation: dict[str, Any] | None,
    step: int,
    folder: Path,
) -> str:
    """README.md of the exported folder; `step`: that of the checkpoint it was made from."""
    config = head.config
    parameters = sum(p.numel() for p in head.parameters()) / 1e6
    title = {"eagle3": "EAGLE-3", "eagle": "EAGLE-1"}[head.method]
    reads = f"streams after layers {list(config.layer_ids)}" if config.layer_ids else "its last state, after the norm"
    lines = [
        f"# {title} head for {name}",
        "",
        f"- target: `{name}`, {reads}",
        f"- {parameters:.1f} M parameters, {config.num_layers} layer(s), draft vocabulary {config.draft_vocab_size} of "
        f"{config.vocab_size}, {str(dtype).removeprefix('torch.')}",
        f"- form: vLLM's plain `{architecture(head)}`; trained by eagle-train, run `{run.name}` "
        "(its config.yaml has every setting and the data)",
        "",
        "## Measured at the last evaluation in training",
        "",
    ]
    if evaluation is None:
        lines.append("No evaluation was recorded.")
    else:
        if evaluation["step"] != step:
            lines += [
                f"At step {evaluation['step']}; these are the weights of step {step}, which were not measured.",
                "",
            ]
        lines += _figures(evaluation)
    lines += ["", "## Serve", ""]
    for engine, line in serve_lines(target, folder, head.method).items():
        lines += [f"{engine}:", "", "```bash", line, "```", ""]
    lines.append("vllm-ascend and SGLang: the form follows their rules; not run here.")
    lines += [f"Cannot serve this head: {engine}, {reason}." for engine, reason in cannot_serve(head).items()]
    return "\n".join(lines) + "\n"


def _figures(e: dict[str, Any]) -> list[str]:
    out = []
    if "acceptance_length" in e:
        rates = ", ".join(f"{r:.3f}" for r in e["acceptance_rates"])
        out.append(
            f"- acceptance length {e['acceptance_length']:.3f} (greedy target, greedy drafts, chains of {e['k']}, "
            f"{e['acceptance_drafts']} drafts, counted before the cut as vLLM does); per position {rates}"
        )
        out.append(f"- walked on the same text, from the unroll alone: {e['walked_length']:.3f}")
    for key, name in (("accuracy", "accuracy"), ("alpha", "α = Σ min(p, q)"), ("accept", "p(argmax q)")):
        if key in e:
            out.append(f"- {name} per depth, held-out rows: " + ", ".join(f"{v:.3f}" for v in e[key]))
    return out


def last_evaluation(run: Path) -> dict[str, Any] | None:
    """The last evaluation in the run's metrics.jsonl."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return None
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the line that was being written when a process died
    found = [r for r in records if r["kind"] == "eval"]
    return found[-1] if found else None
