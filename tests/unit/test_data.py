"""Files → samples: forms, bad lines, the account of rows, and the cache."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_train.config.loader import recipes_dir
from eagle_train.data.conversations import BadRow, bundled_path, data_path, read_rows
from eagle_train.data.tokenize import Prepared, prepare
from eagle_train.data.types import Report
from eagle_train.errors import UserError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """One token per byte, plus merges and ChatML's two specials."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=CHATML
    )


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    """Texts in turn by user and assistant → a messages row."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)], **more}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def run(path: Path | list[Path], cache: Path, **changes: Any) -> Prepared:
    settings: dict[str, Any] = {
        "template_text": None,
        "max_length": 128,
        "skip_bad": False,
        "max_bad_share": 0.01,
        "max_rows": None,
    }
    paths = path if isinstance(path, list) else [path]
    return prepare(paths, byte_tokenizer(), cache_dir=cache, **(settings | changes))


def supervised(prepared: Prepared) -> list[str]:
    tokenizer = byte_tokenizer()
    return [str(tokenizer.decode([i for i, m in zip(s.ids, s.mask, strict=True) if m])) for s in prepared.samples]


def test_four_forms_give_their_answers(tmp_path: Path) -> None:
    plain = byte_tokenizer()("ask<|im_start|>told<|im_end|>", add_special_tokens=False)["input_ids"]
    speakers = [("system", "be"), ("human", "a"), ("gpt", "b"), ("user", "c"), ("bard", "d")]
    path = write(
        tmp_path / "four.jsonl",
        {"id": "share", "conversations": [{"from": s, "value": v} for s, v in speakers]},
        chat("hi", "yo", id=7),
        "",
        chat("other text", "ids count", prompt_ids=plain[:4], answer_ids=plain[4:]),
        {"input_ids": plain, "loss_mask": [0, 0, 0, 0, 1, 1, 0, 0, 0]},
    )
    found = run(path, tmp_path)
    assert supervised(found) == ["b<|im_end|>d<|im_end|>", "yo<|im_end|>", "told<|im_end|>", "to"]
    assert [s.id for s in found.samples] == ["share", "7", "four.jsonl:4", "four.jsonl:5"]
    assert found.samples[2].ids == tuple(plain)
    assert found.report.lines() == ["rows in 4, rows out 4"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [', "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"text": "x"}', "no known form"),
        ('{"messages": []}', "messages is not a list of turns"),
        ('{"messages": [{"role": "wizard", "content": "x"}]}', "unknown role"),
        ('{"messages": [{"role": "user", "content": 3}]}', "message without text"),
        ('{"conversations": [{"from": "cat", "value": "x"}]}', "unknown speaker"),
        ('{"conversations": [{"from": "gpt"}]}', "message without text"),
        ('{"prompt_ids": [1], "answer_ids": [2.5]}', "token ids are not a list of integers"),
        ('{"prompt_ids": [1]}', "token ids are not a list of integers"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "input_ids and loss_mask differ in length"),
        ('{"input_ids": [1, 2], "loss_mask": [0, 2]}', "loss_mask is not a list of 0 and 1"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "not UTF-8 text"),
    ],
)
def test_bad_line_stops_with_file_line_and_reason_or_is_counted(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path / "bad.jsonl", chat("hi", "yo"), "", line, chat("a", "b"))
    with pytest.raises(UserError) as error:
        run(path, tmp_path)
    assert f"{path}:3: {reason}" in str(error.value)
    report = run(path, tmp_path, skip_bad=True, max_bad_share=0.5).report
    assert (report.rows_in, report.rows_out, report.drops) == (3, 2, {reason: 1})
    assert report.first == {reason: "bad.jsonl:3"}
    assert report.lines()[1] == f"  dropped 1: {reason} (first: bad.jsonl:3)"


def test_bytes_that_are_no_text_name_their_line(tmp_path: Path) -> None:
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(json.dumps(chat("hi", "yo")).encode() + b'\n{"messages": "\xff"}\r\n')
    rows = list(read_rows([path]))
    assert isinstance(rows[1], BadRow)
    assert (rows[1].place, rows[1].reason) == ("bytes.jsonl:2", "not UTF-8 text")


def test_too_many_bad_rows_stop_the_run(tmp_path: Path) -> None:
    good, bad = [chat("hi", f"yo {i}") for i in range(98)], ["{", "["]
    path = write(tmp_path / "x.jsonl", *good, *bad)
    with pytest.raises(UserError, match=r"2 of 100 rows are malformed.*0\.01[\s\S]*x\.jsonl:99: not JSON"):
        run(path, tmp_path, skip_bad=True)
    assert run(path, tmp_path, skip_bad=True, max_bad_share=0.02).report.drops == {"not JSON": 2}
    # A drop that is not a malformed row does not count towards the share.
    odd = write(tmp_path / "odd.jsonl", chat("hi", "yo"), chat("no answer"))
    assert run(odd, tmp_path).report.drops == {"no assistant turn": 1}


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_no_row_vanishes(tmp_path: Path, rows: int) -> None:
    path = write(tmp_path / "few.jsonl", *[chat("hi", f"yo {i}", id=i) for i in range(rows)])
    found = run(path, tmp_path)
    assert [s.id for s in found.samples] == [str(i) for i in range(rows)]
    assert (found.report.rows_in, found.report.rows_out) == (rows, rows)


def test_every_drop_is_counted_by_reason(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mixed.jsonl",
        chat("hi", "yo"),
        {"messages": [{"role": "assistant", "content": "first"}]},
        chat("hi", ""),
        {"prompt_ids": [1, 2], "answer_ids": [3, 10_000]},
        {"prompt_ids": [1], "answer_ids": [-1, 2]},
        {"prompt_ids": [1, 2], "answer_ids": [3]},
        chat("u" * 200, "beyond the cut"),
        chat("hi", "y" * 200),
    )
    report = run(path, tmp_path).report
    assert report.drops == {
        "no user turn before the first answer": 1,
        "no trainable token": 2,
        "token id outside the vocabulary": 2,
        "no trainable token within max_length": 1,
    }
    assert (report.rows_in, report.rows_out, report.truncated) == (8, 2, 1)
    assert report.lines()[0] == "rows in 8, rows out 2 (truncated at max_length: 1)"
    assert "  dropped 2: no trainable token (first: mixed.jsonl:3)" in report.lines()


def test_long_sample_is_cut_at_max_length(tmp_path: Path) -> None:
    path = write(tmp_path / "long.jsonl", chat("hi", "0123456789"))
    whole = run(path, tmp_path).samples[0]
    cut = run(path, tmp_path, max_length=len(whole.ids) - 5).samples[0]
    assert (cut.ids, cut.mask) == (whole.ids[:-5], whole.mask[:-5])


def test_report_that_loses_a_row_is_refused() -> None:
    with pytest.raises(AssertionError):
        Report(rows_in=3, rows_out=1, drops={"x": 1})


def test_nothing_trainable_stops_and_shows_the_template(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", chat("hi", "yo"))
    lost = (
        CHATML.replace("m in messages", "m in messages if m['role'] == 'user'") + "{% generation %}{% endgeneration %}"
    )
    with pytest.raises(UserError) as error:
        run(path, tmp_path, template_text=lost)
    assert lost in str(error.value)
    assert "dropped 1: no trainable token (first: x.jsonl:1)" in str(error.value)
    assert "→ check that the template" in str(error.value)
    with pytest.raises(UserError, match="there is no row"):
        run(write(tmp_path / "empty.jsonl", "", " "), tmp_path)


def test_max_rows_counts_over_all_files(tmp_path: Path) -> None:
    one = write(tmp_path / "1.jsonl", chat("a", "b"), chat("c", "d"))
    two = write(tmp_path / "2.jsonl", chat("e", "f"), "not reached")
    assert supervised(run([one, two], tmp_path, max_rows=3)) == ["b<|im_end|>", "d<|im_end|>", "f<|im_end|>"]


def test_packed_files_and_paths(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(chat("hi", "yo")).encode()))
    assert supervised(run(path, tmp_path)) == ["yo<|im_end|>"]
    path.write_bytes(gzip.compress(json.dumps(chat("hi", "yo" * 500)).encode())[:-12])
    with pytest.raises(UserError, match="cannot be read after line 0"):
        run(path, tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        run(tmp_path / "none.jsonl", tmp_path)
    with pytest.raises(UserError, match="ends in .jsonl or .jsonl.gz"):
        run(write(tmp_path / "x.csv", "a,b"), tmp_path)
    assert bundled_path("heldout") == recipes_dir() / "data" / "smollm2_heldout.jsonl.gz"
    assert data_path("bundled", "train") == bundled_path("train")
    assert data_path(str(path), "train") == path


def test_cache_follows_content_and_settings_not_paths(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "x.jsonl", chat("hi", "yo", id="é"), chat("only a question")), tmp_path / "cache"
    first = run(path, cache)
    again = run(path, cache)
    assert (first.cached, again.cached) == (False, True)
    assert (again.samples, again.report, again.key) == (first.samples, first.report, first.key)

    stamp = path.stat()
    write(path, chat("hi", "no", id="é"), chat("only a question"))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    edited = run(path, cache)
    assert not edited.cached
    assert supervised(edited) == ["no<|im_end|>"]

    shorter = run(path, cache, max_length=len(edited.samples[0].ids) - 1)
    assert not shorter.cached
    assert len(shorter.samples[0].ids) == len(edited.samples[0].ids) - 1
    assert not run(path, cache, template_text=CHATML + "{{ '' }}").cached
    assert not run(path, cache, max_rows=1).cached
    assert not prepare(
        [path],
        byte_tokenizer(merges=(("n", "o"),)),
        template_text=None,
        max_length=128,
        skip_bad=False,
        max_bad_share=0.01,
        max_rows=None,
        cache_dir=cache,
    ).cached
    assert run(path, cache).cached
    assert {p.suffix for p in cache.iterdir()} == {".json", ".safetensors"}


def test_damaged_cache_is_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, cache = write(tmp_path / "x.jsonl", chat("hi", "yo")), tmp_path / "cache"
    first = run(path, cache)
    kept = cache / f"{first.key}.safetensors"
    kept.write_bytes(kept.read_bytes()[:-4])
    again = run(path, cache)
    assert not again.cached
    assert again.samples == first.samples
    assert "computing it again" in capsys.readouterr().out
    assert run(path, cache).cached


def test_default_cache_lies_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_TRAIN_HOME", str(tmp_path / "home"))
    found = prepare(
        [write(tmp_path / "x.jsonl", chat("hi", "yo"))],
        byte_tokenizer(),
        template_text=None,
        max_length=128,
        skip_bad=False,
        max_bad_share=0.01,
        max_rows=None,
    )
    assert (tmp_path / "home" / "prepared" / f"{found.key}.safetensors").exists()
