"""JSONL files → rows, in four forms; a line that is none of them becomes a `BadRow` with its place and reason.

    {"conversations": [{"from": "human|user|gpt|chatgpt|bing|bard|assistant|system", "value": …}]}   ShareGPT
    {"messages": [{"role": …, "content": …}], "tools": […]}                                          OpenAI
    {"prompt_ids": […], "answer_ids": […]}       a target's own output ids; the answer is supervised
    {"input_ids": […], "loss_mask": […]}         ready

Where a row has ids and messages, the ids count: text tokenized again may differ from what was generated. Lines are read
here one by one: a table reader names no line in its errors and forces one schema on rows that differ.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_train.data.types import RowError
from eagle_train.errors import UserError

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "system": "system",
}
ROLES = ("system", "developer", "user", "assistant", "tool")
SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Conversation:
    """Messages as the chat template takes them; `place` is file:line."""

    id: str
    place: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Tokenized:
    """A row that came with its ids [T] and mask [T]."""

    id: str
    place: str
    ids: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True)
class BadRow:
    """A malformed line: `reason` groups, `message` is the whole story."""

    place: str
    reason: str
    message: str


def bundled_path(part: str) -> Path:
    """The sample that ships with the project; part: "train" or "heldout"."""
    assert part in ("train", "heldout"), part
    from eagle_train.config.loader import recipes_dir

    return recipes_dir() / "data" / f"smollm2_{part}.jsonl.gz"


def data_path(given: str, part: str) -> Path:
    """A data file as the user names it: "bundled" is the bundled sample's `part`, anything else a path."""
    return bundled_path(part) if given == "bundled" else Path(given).expanduser()


def check_paths(paths: Sequence[Path]) -> None:
    """Raises UserError: no path at all, a file that is not there, or not JSONL by its name."""
    if not paths:
        raise UserError("no data file was given.", hint="name at least one .jsonl or .jsonl.gz file, or `bundled`")
    for path in paths:
        if not path.is_file():
            raise UserError(f"data file {path} does not exist (or is not a file).")
        if not path.name.endswith(SUFFIXES):
            raise UserError(f"data file {path}: expected a name that ends in {' or '.join(SUFFIXES)}.")


def read_rows(paths: Sequence[Path], max_rows: int | None = None) -> Iterator[Conversation | Tokenized | BadRow]:
    """Every non-blank line of `paths` as one row, in order; stops after `max_rows` rows, bad ones included.

    Raises:
        UserError: a file is missing or cannot be read or unpacked.
    """
    check_paths(paths)
    count = 0
    for path in paths:
        for number, line in _lines(path):
            if count == max_rows:
                return
            count += 1
            place = f"{path.name}:{number}"
            try:
                yield parse_row(line, place)
            except RowError as error:
                yield BadRow(place, error.reason, f"{path}:{number}: {error}")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    opener = gzip.open if path.name.endswith(".gz") else open
    number = 0
    try:
        with opener(path, "rb") as f:
            for number, line in enumerate(f, start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read after line {number}: {error}") from None


def parse_row(line: bytes, place: str) -> Conversation | Tokenized:
    """One line of JSONL → a row. Raises RowError with the reason."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
        if b"\\ud" in line.lower():
            # JSON can spell half of a surrogate pair, which is no text and which no tokenizer takes.
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise RowError("not UTF-8 text", str(error)) from None
    except (ValueError, RecursionError) as error:
        raise RowError("not JSON", str(error)) from None
    if not isinstance(row, dict):
        raise RowError("not a JSON object", f"found {type(row).__name__}")
    given = row.get("id")
    name = str(given) if isinstance(given, (str, int)) and not isinstance(given, bool) else place
    if "prompt_ids" in row or "answer_ids" in row:
        prompt, answer = _ids(row, "prompt_ids"), _ids(row, "answer_ids")
        return Tokenized(name, place, prompt + answer, (False,) * len(prompt) + (True,) * len(answer))
    if "input_ids" in row or "loss_mask" in row:
        ids = _ids(row, "input_ids")
        return Tokenized(name, place, ids, _loss_mask(row, len(ids)))
    if "messages" in row:
        return Conversation(name, place, _messages(row["messages"]), _tools(row.get("tools")))
    if "conversations" in row:
        return Conversation(name, place, _sharegpt(row["conversations"]))
    raise RowError("no known form", f"keys {sorted(row)[:8]}; expected messages, conversations or token ids")


def _ids(row: dict[str, Any], key: str) -> tuple[int, ...]:
    found = row.get(key)
    if not isinstance(found, list) or any(type(i) is not int for i in found):
        raise RowError("token ids are not a list of integers", key)
    return tuple(found)


def _loss_mask(row: dict[str, Any], length: int) -> tuple[bool, ...]:
    found = row.get("loss_mask")
    if not isinstance(found, list) or any(type(m) not in (bool, int) or m not in (0, 1) for m in found):
        raise RowError("loss_mask is not a list of 0 and 1")
    if len(found) != length:
        raise RowError("input_ids and loss_mask differ in length", f"{length} and {len(found)}")
    return tuple(bool(m) for m in found)


def _listed(found: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not found or any(not isinstance(m, dict) for m in found):
        raise RowError(f"{key} is not a list of turns")
    return found


def _messages(found: Any) -> tuple[dict[str, Any], ...]:
    for i, message in enumerate(turns := _listed(found, "messages")):
        if message.get("role") not in ROLES:
            raise RowError("unknown role", f"{message.get('role')!r} in message {i}; known: {', '.join(ROLES)}")
        calls = message.get("content") is None and message.get("tool_calls")
        if not isinstance(message.get("content"), str) and not calls:
            raise RowError("message without text", f"content of message {i} is {message.get('content')!r:.40}")
    return tuple(turns)


def _tools(found: Any) -> tuple[dict[str, Any], ...]:
    return tuple(_listed(found, "tools")) if found else ()


def _sharegpt(found: Any) -> tuple[dict[str, Any], ...]:
    messages = []
    for i, turn in enumerate(_listed(found, "conversations")):
        speaker, value = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise RowError("unknown speaker", f"from={speaker!r} in turn {i}; known: {', '.join(SPEAKERS)}")
        if not isinstance(value, str):
            raise RowError("message without text", f"value of turn {i} is {value!r:.40}")
        messages.append({"role": SPEAKERS[speaker], "content": value})
    return tuple(messages)
