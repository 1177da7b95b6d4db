"""Data files → tokenized samples with loss masks, kept under a hash of everything they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from eagle_train import assets
from eagle_train.data.conversations import BadRow, Conversation, Tokenized, check_paths, read_rows
from eagle_train.data.masks import Encoder, make_encoder, trainable
from eagle_train.data.types import Report, RowError, Sample
from eagle_train.errors import UserError

CODE_VERSION = 1
"""Raise it whenever this room turns the same rows into other samples."""


@dataclass(frozen=True)
class Prepared:
    """`samples` in the order of the rows; `key` is the sha256 of all they depend on; `cached`: read, not computed."""

    samples: list[Sample]
    report: Report
    key: str
    cached: bool


@dataclass(frozen=True)
class _Settings:
    max_length: int
    skip_bad: bool
    max_bad_share: float
    max_rows: int | None
    vocab_size: int


def prepare(
    paths: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    template_text: str | None,
    max_length: int,
    skip_bad: bool,
    max_bad_share: float,
    max_rows: int | None,
    cache_dir: Path | None = None,
    vocab_size: int | None = None,
) -> Prepared:
    """Read, tokenize and mask `paths`, or take the result from `cache_dir` (default: `prepared` in the cache folder).

    Args:
        template_text: a chat template instead of the tokenizer's own.
        max_length: tokens; longer samples are cut there and counted.
        skip_bad: drop and count malformed rows, up to the share `max_bad_share` of all; else stop at the first.
        max_rows: rows to read at most, over all files; None = all.
        vocab_size: rows with an id at or above it are dropped and counted; default: the tokenizer's size.

    Raises:
        UserError: a malformed row (with file, line and reason), too many of them, an unreadable file, an unusable
            template, or not one trainable token in the data.
    """
    if max_length < 1:
        raise UserError(f"max_length={max_length}: expected a positive number of tokens.")
    settings = _Settings(max_length, skip_bad, max_bad_share, max_rows, vocab_size or len(tokenizer))
    check_paths(paths)
    encoder = make_encoder(tokenizer, template_text)
    key = _key(paths, encoder, settings)
    folder = cache_dir if cache_dir is not None else assets.home() / "prepared"
    found = _read_cache(folder, key)
    if found is not None:
        return found
    samples, report = _compute(paths, encoder, settings)
    _write_cache(folder, key, samples, report)
    return Prepared(samples, report, key, cached=False)


def _compute(paths: Sequence[Path], encoder: Encoder, settings: _Settings) -> tuple[list[Sample], Report]:
    samples: list[Sample] = []
    drops: Counter[str] = Counter()
    first: dict[str, str] = {}
    bad: list[BadRow] = []
    rows = truncated = 0
    screen = Console(stderr=True)
    # A bar on a terminal only, so that logs stay readable.
    for row in track(
        read_rows(paths, settings.max_rows),
        "tokenizing",
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    ):
        rows += 1
        if isinstance(row, BadRow):
            if not settings.skip_bad:
                raise UserError(row.message, hint="mend the line, or skip and count such rows with data.skip_bad=true")
            bad.append(row)
            reason = row.reason
        else:
            try:
                sample, cut = _sample(row, encoder, settings)
            except RowError as error:
                reason = error.reason
            else:
                samples.append(sample)
                truncated += cut
                continue
        drops[reason] += 1
        first.setdefault(reason, row.place)
    report = Report(rows, len(samples), dict(drops), first, truncated)
    _check_enough(report, bad, paths, encoder, settings)
    return samples, report


def _sample(row: Conversation | Tokenized, encoder: Encoder, settings: _Settings) -> tuple[Sample, bool]:
    """One row's sample, and whether it was cut."""
    ids: Sequence[int]
    mask: Sequence[bool]
    if isinstance(row, Tokenized):
        ids, mask = row.ids, row.mask
    else:
        ids, mask = encoder.encode(row.messages, row.tools)
    if any(not 0 <= i < settings.vocab_size for i in ids):
        raise RowError("token id outside the vocabulary", f"expected 0 to {settings.vocab_size - 1}")
    if not trainable(mask):
        raise RowError("no trainable token")
    cut = len(ids) > settings.max_length
    ids, mask = tuple(ids[: settings.max_length]), tuple(mask[: settings.max_length])
    if not trainable(mask):
        raise RowError("no trainable token within max_length")
    return Sample(row.id, ids, mask), cut


def _check_enough(
    report: Report, bad: list[BadRow], paths: Sequence[Path], encoder: Encoder, settings: _Settings
) -> None:
    names = ", ".join(str(p) for p in paths)
    if not report.rows_in:
        raise UserError(f"there is no row in {names}.")
    if len(bad) > settings.max_bad_share * report.rows_in:
        shown = "\n".join(f"  {row.message}" for row in bad[:5])
        raise UserError(
            f"{len(bad)} of {report.rows_in} rows are malformed, more than the share of {settings.max_bad_share:g} "
            f"that data.max_bad_share allows:\n{shown}",
            hint="mend them, or raise data.max_bad_share",
        )
    if not report.rows_out:
        template = encoder.template if encoder.template is not None else "(none)"
        shown = "\n".join(report.lines())
        raise UserError(
            f"nothing is trainable in {names}: no row has two answer tokens in a row after masking and the cut at "
            f"max_length={settings.max_length}.\n{shown}\nThe chat template is:\n{template}",
            hint="check that the template renders the assistant's turns (with generation tags, if any, around their "
            "text), that the rows hold answers, and that max_length is longer than the prompts",
        )


def _key(paths: Sequence[Path], encoder: Encoder, settings: _Settings) -> str:
    # File names count, not folders: a sample without an id is called by its file and line.
    files = []
    for path in paths:
        digest = hashlib.sha256()
        with open(path, "rb") as f:
            while block := f.read(1 << 20):
                digest.update(block)
        files.append([path.name, digest.hexdigest()])
    parts = {
        "code": CODE_VERSION,
        "transformers": transformers.__version__,
        "files": files,
        "tokenizer": hashlib.sha256(encoder.backend.to_str().encode()).hexdigest(),
        "special": [sorted(encoder.special), encoder.backend.encode_special_tokens, dict(encoder.variables)],
        "template": encoder.template,
        "settings": asdict(settings),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _write_cache(folder: Path, key: str, samples: list[Sample], report: Report) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "ids": torch.tensor([i for s in samples for i in s.ids], dtype=torch.int32),
        "mask": torch.tensor([m for s in samples for m in s.mask], dtype=torch.uint8),
        "lengths": torch.tensor([len(s.ids) for s in samples], dtype=torch.int64),
    }
    about = {"key": key, "samples": [s.id for s in samples], "report": asdict(report)}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing.") as tmp:
        save_file(tensors, Path(tmp) / "tokens")
        (Path(tmp) / "about").write_text(json.dumps(about))
        # The JSON goes last: where it is, the tokens are there too.
        os.replace(Path(tmp) / "tokens", folder / f"{key}.safetensors")
        os.replace(Path(tmp) / "about", folder / f"{key}.json")


def _read_cache(folder: Path, key: str) -> Prepared | None:
    """What was kept under `key`; None if nothing was, or if it is damaged (it is then computed again)."""
    try:
        about: dict[str, Any] = json.loads((folder / f"{key}.json").read_text())
        tensors = load_file(folder / f"{key}.safetensors")
        lengths: list[int] = tensors["lengths"].tolist()
        ids, mask = tensors["ids"].tolist(), [bool(m) for m in tensors["mask"].tolist()]
        names, report = about["samples"], Report(**about["report"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        print(f"{folder / key}.* is damaged ({error}); computing it again")
        return None
    if not len(names) == len(lengths) == report.rows_out or not len(ids) == len(mask) == sum(lengths):
        print(f"{folder / key}.* is damaged (counts differ); computing it again")
        return None
    samples, at = [], 0
    for name, n in zip(names, lengths, strict=True):
        samples.append(Sample(name, tuple(ids[at : at + n]), tuple(mask[at : at + n])))
        at += n
    return Prepared(samples, report, key, cached=True)
