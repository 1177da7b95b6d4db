"""Prompt files: every form, and a message with the line for what is none of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from eagle_train.data.prompts import load_prompts
from eagle_train.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(glassllm: Path) -> Any:
    return AutoTokenizer.from_pretrained(glassllm)


def test_all_forms_give_the_same_ids(tokenizer: Any, tmp_path: Path) -> None:
    text = "Who are you?"
    ids = load_prompts(str(write(tmp_path, {"prompt": text})), tokenizer)[0]
    assert tokenizer.decode(ids) == f"“{text}”\n"
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "Alice."}]
    for row in ({"turns": [text, "And now?"]}, {"messages": turns}, {"prompt_ids": ids}):
        assert load_prompts(str(write(tmp_path, row)), tokenizer) == [ids]
    packed = tmp_path / "p.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps({"prompt": text}).encode()))
    assert load_prompts(str(packed), tokenizer) == [ids]
    listed = tmp_path / "p.json"
    listed.write_text(json.dumps([ids, ids]))
    assert load_prompts(str(listed), tokenizer, limit=1) == [ids]


@pytest.mark.parametrize(
    "row",
    [{"turns": []}, {"prompt_ids": "x"}, {"prompt": ""}, {"messages": ["hi"]}, {"mt_bench": 7}, {"text": "a"}, [1]],
    ids=str,
)
def test_other_rows_are_named(tokenizer: Any, tmp_path: Path, row: Any) -> None:
    path = write(tmp_path, {"prompt": "good"}, row)
    with pytest.raises(UserError, match=f"{path.name}:2"):
        load_prompts(str(path), tokenizer)


def test_unreadable_files(tokenizer: Any, tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(b'{"prompt": "a"}')[:-6])
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for path in (torn, empty, tmp_path / "none.jsonl"):
        with pytest.raises(UserError, match=path.name):
            load_prompts(str(path), tokenizer)


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path
