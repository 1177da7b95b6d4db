"""Are vLLM's tokens and acceptance ours? Runs in the project's environment, on what vllm_serve_counts.py wrote.

    python scripts/vllm_parity.py prompts --target DIR --count 40 --out P.json     prompts from the held-out sample
    python scripts/vllm_parity.py answers --target DIR --count 500 --out D.jsonl   the target's own text, to train on
    python scripts/vllm_parity.py exact --counts C.json --length 4                 a known acceptance length, exactly
    python scripts/vllm_parity.py compare --name N --target DIR --head DIR --prompts P.json --counts C.json
    python scripts/vllm_parity.py record --results R.json --names A B              the bar vllm.position_delta

Greedy, float32, chains of K. The rule: vLLM and our loop emit the same tokens. A first difference is excused only where
the two tokens are the target's best two and their logits lie within 1e-4; such a prompt is left out of both counts and
listed. Over the others, acceptance at each position may differ by the bound. Exit code 1 on any failure.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from eagle_inference.engine import Generation, SpeculativeEngine
from eagle_inference.metrics import Acceptance
from eagle_inference.sampling import SamplingParams
from eagle_train.data.conversations import bundled_path
from eagle_train.data.prompts import render
from eagle_train.draft.checkpoint import read_head
from eagle_train.errors import UserError
from eagle_train.targets.hf import Target

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "vllm_parity.json"
NEAR_TIE = 1e-4
LONGEST_PROMPT = 320


@dataclass(frozen=True)
class Divergence:
    """The first place where the answers to one prompt differ; a token is None where that side had stopped.

    gap: distance of the target's two best logits there; near_tie: the difference is excused.
    """

    prompt: int
    place: int
    vllm: int | None
    ours: int | None
    gap: float
    near_tie: bool


def read_json(path: Path) -> Any:
    """The file's content.

    Raises:
        UserError: it is missing or no JSON.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as e:
        raise UserError(f"cannot read {path}: {e}") from e


def sample_prompts(target: str, part: str, count: int, room: int) -> list[list[int]]:
    """The first `count` prompts of the bundled sample's `part`, each once, that leave `room` tokens of the context.

    They are rendered with the target's own template and tokenizer.

    Raises:
        UserError: too few fit.
    """
    tokenizer = AutoTokenizer.from_pretrained(target)
    longest = min(AutoConfig.from_pretrained(target).max_position_embeddings - room, LONGEST_PROMPT)
    found: dict[tuple[int, ...], None] = {}
    with gzip.open(bundled_path(part), "rt") as lines:
        for line in lines:
            ids = render(json.loads(line)["messages"][:1], tokenizer)
            if 0 < len(ids) <= longest:
                found.setdefault(tuple(ids))
            if len(found) == count:
                break
    if len(found) < count:
        raise UserError(f"the sample's {part} part has {len(found)} prompts of up to {longest} tokens, not {count}")
    return [list(ids) for ids in found]


def own_answers(target: str, prompts: list[list[int]], new: int) -> Iterator[dict[str, list[int]]]:
    """What the target itself writes after each prompt (temperature 0.5, one seed), as rows that training reads."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    torch.manual_seed(0)
    pad, eos = model.config.pad_token_id, model.config.eos_token_id
    for i in range(0, len(prompts), 32):
        batch = prompts[i : i + 32]
        width = max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in batch])
        seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        made = model.generate(ids, attention_mask=seen, max_new_tokens=new, do_sample=True, temperature=0.5, top_k=0)
        for prompt, answer in zip(batch, made[:, width:].tolist(), strict=True):
            end = answer.index(eos) + 1 if eos in answer else len(answer)
            yield {"prompt_ids": prompt, "answer_ids": answer[:end]}


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first place where two answers differ, one having ended included; None when they are equal."""
    for i in range(max(len(a), len(b))):
        if i >= len(a) or i >= len(b) or a[i] != b[i]:
            return i
    return None


@torch.no_grad()
def divergence(target: Target, number: int, prompt: list[int], vllm: list[int], ours: list[int]) -> Divergence | None:
    """Where the two answers part, judged by the target's own logits on what both sides had before."""
    place = first_difference(vllm, ours)
    if place is None:
        return None
    prefix = torch.tensor(prompt + ours[:place], device=target.device)
    best = target.head(target.forward(prefix).last[-1]).float().topk(2)
    gap = float(best.values[0] - best.values[1])
    theirs = vllm[place] if place < len(vllm) else None
    mine = ours[place] if place < len(ours) else None
    excused = gap <= NEAR_TIE and {theirs, mine} == set(best.indices.tolist())
    return Divergence(number, place, theirs, mine, gap, excused)


def counts_of(row: dict[str, Any]) -> Acceptance:
    """One prompt's counters as vLLM gave them."""
    return Acceptance(row["drafts"], row["drafted"], row["accepted"], tuple(row["per_position"]))


def answer_ours(target: Target, head_dir: Path, prompts: list[list[int]], counts: dict[str, Any]) -> list[Generation]:
    """Our loop on the same prompts with the settings that vLLM had."""
    engine = SpeculativeEngine(target, read_head(head_dir), k=counts["k"])
    params = SamplingParams(max_new_tokens=counts["max_new_tokens"], stop_ids=tuple(counts["stop_ids"]))
    answers = []
    for i, prompt in enumerate(prompts, start=1):
        answers.append(engine.generate(prompt, params))
        if sys.stderr.isatty():
            print(f"\rour loop: {i}/{len(prompts)} prompts", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return answers


def totals(parts: list[Acceptance], k: int) -> Acceptance:
    """Counts added up; positions that were never drafted count 0."""
    positions = [sum(p.per_position[i] for p in parts if i < len(p.per_position)) for i in range(k)]
    drafts, drafted = sum(p.drafts for p in parts), sum(p.drafted for p in parts)
    return Acceptance(drafts, drafted, sum(positions), tuple(positions))


def verdicts(result: dict[str, Any], bound: float, min_drafts: int) -> list[str]:
    """What is wrong with a comparison, in words; empty when it passes."""
    faults = [
        f"prompt {d['prompt']} differs at token {d['place']} (vLLM {d['vllm']}, ours {d['ours']}), where the target's "
        f"best two logits are {d['gap']:.2g} apart"
        for d in result["divergences"]
        if not d["near_tie"]
    ]
    if not result["largest_difference"] <= bound:
        faults.append(f"acceptance at a position differs by {result['largest_difference']:.4f}, allowed are {bound}")
    for side in ("vllm", "ours"):
        if result[side]["drafts"] < min_drafts:
            faults.append(f"{side}: {result[side]['drafts']} drafts; at least {min_drafts} are needed to say anything")
    return faults


def compare(given: argparse.Namespace) -> int:
    """Our loop against vLLM's counts; prints a table and writes the result."""
    counts, prompts = read_json(given.counts), read_json(given.prompts)
    if len(counts["prompts"]) != len(prompts):
        raise UserError(f"{given.counts} answers {len(counts['prompts'])} prompts, {given.prompts} has {len(prompts)}")
    k = counts["k"]
    layer_ids = read_head(given.head).config.layer_ids
    target = Target.load(given.target, dtype=torch.float32, layer_ids=layer_ids)
    answers = answer_ours(target, given.head, prompts, counts)
    parted = [
        divergence(target, i, prompt, row["tokens"], answer.tokens)
        for i, (prompt, row, answer) in enumerate(zip(prompts, counts["prompts"], answers, strict=True))
    ]
    same = [i for i, d in enumerate(parted) if d is None]
    theirs = totals([counts_of(counts["prompts"][i]) for i in same], k)
    ours = totals([answers[i].acceptance for i in same], k)
    differences = [b - a for a, b in zip(theirs.rates, ours.rates, strict=True)]
    unequal = [i for i in same if counts["prompts"][i]["per_position"] != list(_padded(answers[i], k))]
    result = {
        "prompts": len(prompts),
        "tokens": sum(len(answers[i].tokens) for i in same),
        "left_out": [d.prompt for d in parted if d is not None],
        "divergences": [asdict(d) for d in parted if d is not None],
        "prompts_with_other_counts": unequal,
        "vllm": theirs.to_dict(),
        "ours": ours.to_dict(),
        "differences": differences,
        "largest_difference": max(map(abs, differences)),
        "bound": given.bound,
        "settings": {key: counts[key] for key in ("method", "k", "dtype", "batch", "max_new_tokens", "stop_ids")},
        "versions": {"vllm": counts["versions"]["vllm"], "torch": torch.__version__},
    }
    faults = verdicts(result, given.bound, given.min_drafts)
    print_table(given.name, result)
    for fault in faults:
        print(f"FAILED {given.name}: {fault}")
    write_result(given.results, given.name, result | {"passed": not faults})
    return 1 if faults else 0


def _padded(answer: Generation, k: int) -> tuple[int, ...]:
    places = answer.acceptance.per_position
    return places + (0,) * (k - len(places))


def print_table(name: str, result: dict[str, Any]) -> None:
    """The comparison in a few lines."""
    settings, vllm, ours = result["settings"], result["vllm"], result["ours"]
    print(f"\n{name}: {settings['method']}, K = {settings['k']}, {settings['dtype']}, greedy, vLLM against our loop")
    print(f"{'':22}{'vLLM':>10}{'ours':>10}{'ours − vLLM':>14}")
    rows = [(f"accepted at {i + 1}", a, b) for i, (a, b) in enumerate(zip(vllm["rates"], ours["rates"], strict=True))]
    rows.append(("acceptance length", vllm["acceptance_length"], ours["acceptance_length"]))
    for label, a, b in rows:
        print(f"{label:22}{a:10.4f}{b:10.4f}{b - a:+14.4f}")
    print(f"{'drafts':22}{vllm['drafts']:10d}{ours['drafts']:10d}{ours['drafts'] - vllm['drafts']:+14d}")
    same = result["prompts"] - len(result["left_out"])
    print(f"{same} of {result['prompts']} prompts with the same {result['tokens']} tokens", end="; ")
    excused = [d["prompt"] for d in result["divergences"] if d["near_tie"]]
    print(f"left out at near-ties: {len(excused)} {excused or ''}".rstrip(), end="; ")
    print(f"same tokens but other counts: {len(result['prompts_with_other_counts'])}")


def write_result(path: Path, name: str, result: dict[str, Any]) -> None:
    """Replace one entry of the results file, the others stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = read_json(path) if path.exists() else {}
    path.write_text(json.dumps(entries | {name: result}, indent=2, sort_keys=True) + "\n")


def exact(given: argparse.Namespace) -> int:
    """vLLM's totals against an acceptance length that is known beforehand; whole numbers, no tolerance."""
    counts = read_json(given.counts)
    drafts, drafted, accepted = counts["drafts"], counts["drafted"], counts["accepted"]
    length = 1 + accepted / drafts if drafts else float("nan")
    good = drafts >= given.min_drafts and drafted == counts["k"] * drafts and accepted == (given.length - 1) * drafts
    word = "exactly as it must be" if good else f"FAILED: must be {given.length:.3f} over {given.min_drafts}+ drafts"
    print(f"{given.counts.stem}: vLLM's acceptance length {length:.3f} over {drafts} drafts: {word}")
    return 0 if good else 1


def record(given: argparse.Namespace) -> int:
    """Write the bar: the largest difference at any position, over all heads that were compared."""
    from eagle_train.report import bars

    entries = read_json(given.results)
    lacking = [name for name in given.names if not entries.get(name, {}).get("passed")]
    if lacking:
        print(f"FAILED: no passed comparison of {', '.join(lacking)} in {given.results}; nothing recorded")
        return 1
    largest = max(entries[name]["largest_difference"] for name in given.names)
    lengths = {name: entries[name]["vllm"]["acceptance_length"] for name in given.names}
    drafts = {name: entries[name]["vllm"]["drafts"] for name in given.names}
    extra = {"vllm_acceptance_length": lengths, "drafts": drafts}
    bars.record("vllm.position_delta", largest, given.command, extra=extra)
    print(f"vllm.position_delta = {largest:.4f}")
    return 0


def prompts_verb(given: argparse.Namespace) -> int:
    """Write prompts of the sample's held-out part."""
    found = sample_prompts(given.target, "heldout", given.count, given.max_new_tokens + given.k + 1)
    given.out.write_text(json.dumps(found) + "\n")
    print(f"{len(found)} prompts of {min(map(len, found))} … {max(map(len, found))} tokens in {given.out}")
    return 0


def answers_verb(given: argparse.Namespace) -> int:
    """Write training rows for a target that the bundled sample was not made by."""
    prompts = sample_prompts(given.target, "train", given.count, given.max_new_tokens)
    rows = list(own_answers(given.target, prompts, given.max_new_tokens))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} answers, {sum(len(r['answer_ids']) for r in rows)} tokens, in {given.out}")
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = top.add_subparsers(required=True, metavar="prompts|answers|exact|compare|record")
    for name, verb in (("prompts", prompts_verb), ("answers", answers_verb)):
        p = verbs.add_parser(name)
        p.set_defaults(run=verb)
        p.add_argument("--target", required=True)
        p.add_argument("--count", type=int, required=True)
        p.add_argument("--max-new-tokens", type=int, default=64)
        p.add_argument("--out", type=Path, required=True)
        if verb is prompts_verb:
            p.add_argument("--k", type=int, default=3)
    p = verbs.add_parser("exact")
    p.set_defaults(run=exact)
    p.add_argument("--counts", type=Path, required=True)
    p.add_argument("--length", type=int, required=True)
    p.add_argument("--min-drafts", type=int, default=100)
    p = verbs.add_parser("compare")
    p.set_defaults(run=compare)
    p.add_argument("--name", required=True, help="the entry's name in the results file")
    p.add_argument("--target", required=True)
    for name in ("--head", "--prompts", "--counts"):
        p.add_argument(name, type=Path, required=True)
    p.add_argument("--results", type=Path, default=RESULTS)
    p.add_argument("--bound", type=float, default=0.02, help="largest difference of a rate, either way")
    p.add_argument("--min-drafts", type=int, default=2000)
    p = verbs.add_parser("record")
    p.set_defaults(run=record)
    p.add_argument("--names", nargs="+", required=True)
    p.add_argument("--results", type=Path, default=RESULTS)
    p.add_argument("--command", default="scripts/vllm_parity.sh full")
    return top.parse_args()


def main() -> int:
    """Exit code 0 passed, 1 failed, 2 wrong input."""
    given = parse()
    try:
        return given.run(given)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
