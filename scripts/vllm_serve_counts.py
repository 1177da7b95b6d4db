"""What vLLM emits and counts for given prompts: runs INSIDE vLLM's environment and imports nothing of this project.

    python scripts/vllm_serve_counts.py --target DIR --head DIR --method eagle3 --k 3 --prompts P.json --out O.json

Greedy, eager, one process. P.json is a list of token-id lists. O.json holds, for each prompt, its tokens and vLLM's own
per-request counters, and the totals of vLLM's metrics, which must agree with their sum (else exit code 1).

vLLM counts a draft's accepted tokens before it cuts at a stop token or a length limit, and counts no draft for the
first token of an answer (it comes from the prefill).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the counters are read from this process
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
NAMES = {
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "per_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
}


def parse() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", required=True, type=Path)
    p.add_argument("--head", required=True, type=Path)
    p.add_argument("--method", required=True, choices=["eagle3", "eagle"])
    p.add_argument("--k", required=True, type=int, help="tokens drafted per cycle")
    p.add_argument("--prompts", required=True, type=Path, help="JSON: a list of lists of token ids")
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--dtype", default="float32")
    p.add_argument("--max-model-len", type=int, help="default: the target's own context")
    p.add_argument("--batch", type=int, default=8, help="prompts at once; counters stay per prompt")
    p.add_argument("--ignore-eos", action="store_true", help="go on to the length limit")
    return p.parse_args()


def read_config(target: Path) -> tuple[list[int], int]:
    """The target's stop ids (generation_config.json before config.json) and its context length."""
    config = json.loads((target / "config.json").read_text())
    generation = target / "generation_config.json"
    eos = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
    eos = config.get("eos_token_id") if eos is None else eos
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return ids, config["max_position_embeddings"]


def check_lengths(prompts: list[list[int]], new: int, k: int, context: int) -> None:
    """Near its context's end vLLM drafts fewer than K tokens; such drafts would not be comparable."""
    for i, prompt in enumerate(prompts):
        if not prompt or len(prompt) + new + k + 1 > context:
            sys.exit(f"prompt {i}: {len(prompt)} tokens + {new} new + {k} drafted + 1 must be 1 … {context}")


def totals(llm: Any) -> dict[str, Any]:
    """vLLM's cumulative counters: three numbers and a list."""
    found = {m.name: m.values if hasattr(m, "values") else getattr(m, "value", None) for m in llm.get_metrics()}
    return {key: found[name] for key, name in NAMES.items()}


def per_prompt(output: Any, k: int) -> dict[str, Any]:
    """One answer: its tokens, why it ended, and its counters; `steps` are the accepted tokens of each draft."""
    answer = output.outputs[0]
    result = {"tokens": list(answer.token_ids), "finish": answer.finish_reason}
    steps, drafted = [], 0
    if answer.spec_decode_metrics is not None:  # none when the first token was already the last
        steps = list(answer.spec_decode_metrics.per_step_accepted)
        drafted = sum(answer.spec_decode_metrics.per_step_drafted)
    return result | {
        "drafts": len(steps),
        "drafted": drafted,
        "accepted": sum(steps),
        "per_position": [sum(s > i for s in steps) for i in range(k)],
        "steps": steps,
    }


def serve(given: argparse.Namespace) -> dict[str, Any]:
    """Load, generate, count."""
    prompts: list[list[int]] = json.loads(given.prompts.read_text())
    stop_ids, context = read_config(given.target)
    stop_ids = [] if given.ignore_eos else stop_ids
    context = given.max_model_len or context
    check_lengths(prompts, given.max_new_tokens, given.k, context)
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    start = time.time()
    llm = LLM(
        model=str(given.target),
        speculative_config={"model": str(given.head), "method": given.method, "num_speculative_tokens": given.k},
        dtype=given.dtype,
        max_model_len=context,
        max_num_seqs=given.batch,
        seed=0,
        enforce_eager=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        skip_tokenizer_init=True,
        generation_config="vllm",  # the target's sampling defaults stay out
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
    )
    loaded = time.time()
    # With no tokenizer vLLM knows no EOS; stop ids given by number end an answer in the same way, after the token.
    sampling = SamplingParams(
        temperature=0.0, max_tokens=given.max_new_tokens, stop_token_ids=stop_ids, ignore_eos=True, detokenize=False
    )
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    done = time.time()
    return totals(llm) | {
        "prompts": [per_prompt(a, given.k) for a in answers],
        "k": given.k,
        "method": given.method,
        "dtype": given.dtype,
        "batch": given.batch,
        "max_new_tokens": given.max_new_tokens,
        "stop_ids": stop_ids,
        "seconds": {"load": round(loaded - start, 1), "generate": round(done - loaded, 1)},
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
    }


def main() -> int:
    """Exit code 1 when vLLM's totals are not the sum of its per-request counters."""
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    given = parse()
    result = serve(given)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result) + "\n")
    for key in ("drafts", "drafted", "accepted"):
        if (total := sum(p[key] for p in result["prompts"])) != result[key]:
            print(f"vLLM's total of {key} is {result[key]}, the sum over its requests is {total}", file=sys.stderr)
            return 1
    length = 1 + result["accepted"] / result["drafts"] if result["drafts"] else 1.0
    new, seconds = sum(len(p["tokens"]) for p in result["prompts"]), result["seconds"]
    print(
        f"vLLM {result['versions']['vllm']}: {len(result['prompts'])} prompts, {new} tokens, "
        f"{result['drafts']} drafts, acceptance length {length:.3f}; "
        f"load {seconds['load']} s, generate {seconds['generate']} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
