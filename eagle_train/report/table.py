"""The table a bench ends with, and the same as plain data."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from eagle_inference.bench import TIES, Comparison, Measured


def as_dict(found: Comparison) -> dict[str, Any]:
    """The figures of a comparison, ready for JSON."""
    out: dict[str, Any] = {
        "k": found.k,
        "prompts": found.prompts,
        "identical": found.identical if found.plain else None,
        "near_tie_prompts": list(found.near_ties),
        "differing_prompts": list(found.differing),
    }
    for name, mode in (("greedy", found.greedy), ("sampled_t1_greedy_drafts", found.sampled), ("plain", found.plain)):
        if mode is not None:
            out[name] = _mode(mode)
    if found.hf is not None:
        out["hf_generate"] = {"tokens_per_second": found.hf.tokens_per_second, "same_answers": found.hf.same}
    return out


def _mode(mode: Measured) -> dict[str, Any]:
    return {
        **mode.acceptance.to_dict(),
        "looped_prompts": list(mode.looped),
        "tokens": sum(len(a.tokens) for a in mode.answers),
        "tokens_per_second": mode.tokens_per_second,
    }


def show(found: Comparison, console: Console) -> None:
    """Acceptance (vLLM's counts, before the cut at a stop), per position, and speed."""
    table = Table(title=f"{found.prompts} prompts, chains of {found.k} (drafts chosen by argmax)")
    for name in ("", "acceptance length", "per position", "drafts", "looped, left out", "tok/s"):
        table.add_column(name, justify="left" if not name else "right")
    rows = [("speculative, greedy", found.greedy), ("speculative, temperature 1", found.sampled)]
    for name, mode in rows:
        if mode is not None:
            a = mode.acceptance
            rates = " ".join(f"{r:.3f}" for r in a.rates)
            length = f"{a.acceptance_length:.3f}" if a.drafts else "not measured"
            table.add_row(
                name, length, rates, str(a.drafts), str(len(mode.looped)),
                f"{mode.tokens_per_second:.1f}",
            )  # fmt: skip
    if found.plain is not None:
        table.add_row("plain, greedy, same engine", "1.000", "", "", "", f"{found.plain.tokens_per_second:.1f}")
    if found.hf is not None:
        name = f"Hugging Face generate, greedy ({found.hf.same} of {found.prompts} answers the same)"
        table.add_row(name, "1.000", "", "", "", f"{found.hf.tokens_per_second:.1f}")
    console.print(table)
    if found.plain is None:
        return
    ratio = found.greedy.tokens_per_second / max(found.plain.tokens_per_second, 1e-9)
    slower = " (slower: the drafts cost more here than they save)" if ratio < 1 else ""
    console.print(f"speculative / plain: {ratio:.2f}×{slower}", highlight=False)
    if found.differing:
        console.print(f"output differs ✗  on prompts {list(found.differing)}", highlight=False)
        return
    bound = f"top two logits within {TIES[torch.float32]}, in bfloat16 {TIES[torch.bfloat16]}"
    ties = f", {len(found.near_ties)} more up to a near-tie ({bound})" if found.near_ties else ""
    console.print(f"output identical ✓  ({found.identical} of {found.prompts} greedy answers{ties})", highlight=False)
