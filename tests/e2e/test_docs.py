"""README.md and docs/: every command is one that a test runs or says what it needs; keys, paths and links are real."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel

from eagle_train.config.help import leaves
from eagle_train.config.loader import load_config, parse_options
from eagle_train.config.schema import Config
from eagle_train.options import BenchOptions, ExportOptions, GenerateOptions

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTIONS: dict[str, type[BaseModel]] = {"export": ExportOptions, "bench": BenchOptions, "generate": GenerateOptions}
BIN = Path(sys.executable).parent

HERE = "run by this file"
# Command → the test that runs it: (file, words that must stand in it), or HERE.
KNOWN: dict[str, tuple[str, str] | str] = {
    "make quickstart": ("tests/e2e/test_docs.py", "def test_quickstart_in_short("),
    "make quickstart STEPS=20": ("tests/e2e/test_docs.py", "def test_quickstart_in_short("),
    "make test": ("scripts/test.sh", "-m pytest"),  # what runs this file
    "source .venv/bin/activate": ("scripts/setup_env.sh", "-m venv"),
    "eagle-train assets": ("tests/e2e/test_docs.py", "def test_quickstart_in_short("),
    "eagle-train recipes": HERE,
    "eagle-train train --help": HERE,
    "accelerate launch train.py recipe=eagle3 --print": HERE,
    "eagle-train export run=runs/eagle3": ("tests/e2e/test_cli.py", 'main(["export"'),
    "eagle-train bench head=runs/eagle3/export target=smollm2": ("tests/e2e/test_cli.py", 'main(["bench"'),
    'eagle-train generate head=runs/eagle3/export target=smollm2 prompt="Why is the sky blue?"': (
        "tests/e2e/test_cli.py",
        'main(["generate"',
    ),
    "eagle-train bench head=runs/eagle3/export target=smollm2 out=bench.json": ("tests/e2e/test_cli.py", "out="),
    "eagle-train bench head=runs/eagle3/export target=smollm2 prompts=written limit=8 max_new_tokens=64 "
    "modes=[plain]": ("scripts/quickstart.py", "prompts=written"),
    "python scripts/invariance.py": ("tests/parity/test_core.py", "def test_split_as_you_like("),
}
# Keys of `make` and of scripts, beside the settings of a run and the options of the verbs.
OTHER_KEYS = {"GOMP_SPINCOUNT", "STEPS", "SECONDS", "ARGS", "VENV", "PYTHON", "steps", "seconds", "key"} | {
    "recipes", "losses", "seeds",
}  # fmt: skip
# Paths that a run, a build or a fetch makes; their names are checked against the code that makes them.
MADE = {
    ".venv": "Makefile",
    "config.yaml": "eagle_train/train/loop.py",
    "metrics.jsonl": "eagle_train/train/record.py",
    "eval_prompts.json": "eagle_train/train/loop.py",
    "checkpoints/": "eagle_train/train/checkpoint.py",
    "config.json": "eagle_train/draft/checkpoint.py",
    "model.safetensors": "eagle_train/draft/checkpoint.py",
    "runs/quickstart/quickstart.json": "scripts/quickstart.py",
    "docs/results/vllm_parity.json": "scripts/vllm_parity.sh",
    "docs/results/ablation.md": "scripts/ablate.py",
    "eagle_train._recipes": "pyproject.toml",
}


@dataclass(frozen=True)
class Command:
    """One line of a bash block: `text` without its comment, `needs` what the comment says after "needs"."""

    place: str
    text: str
    needs: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def commands() -> list[Command]:
    """Every command line of every fenced bash block."""
    found = []
    for page in PAGES:
        inside = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if line.strip().startswith("```"):
                inside = line.strip() == "```bash"
            elif inside and line.strip() and not line.strip().startswith("#"):
                text, _, comment = line.strip().partition(" #")
                needs = re.match(r"\s*needs (\S.*)", comment)
                found.append(Command(f"{page.relative_to(ROOT)}:{number}", text.strip(), needs[1] if needs else ""))
    return found


def prose() -> list[tuple[str, str]]:
    """(page, text) of every page, fenced blocks taken out."""
    return [
        (str(page.relative_to(ROOT)), re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M))
        for page in PAGES
    ]


def spans() -> list[tuple[str, str]]:
    """(page, text) of every `inline code`."""
    return [(page, found) for page, text in prose() for found in re.findall(r"`([^`\n]+)`", text)]


def verb_words(text: str) -> tuple[str, list[str]] | None:
    """(verb, its words) of a command of ours, however it is started; None for any other."""
    words = shlex.split(text)
    for start in (["accelerate", "launch", "train.py"], ["accelerate", "launch", "-m", "eagle_train"]):
        if words[: len(start)] == start:
            return "train", words[len(start) :]
    return (words[1], words[2:]) if words[0] == "eagle-train" else None


def test_there_are_commands() -> None:
    assert len(commands()) > 15, "the blocks are no longer found"
    assert {c.text for c in commands() if not c.needs} >= {"make quickstart", "make test"}


@pytest.mark.parametrize("command", commands(), ids=str)
def test_a_command_is_run_by_a_test_or_says_what_it_needs(command: Command) -> None:
    if command.needs:
        return
    assert command.text in KNOWN, f"{command}: neither known to a test nor followed by `# needs …`"
    how = KNOWN[command.text]
    if isinstance(how, tuple):
        file, words = how
        assert words in (ROOT / file).read_text(), f"{command}: {file} no longer holds {words!r}"


def test_no_known_command_is_left_over() -> None:
    assert not KNOWN.keys() - {c.text for c in commands()}


@pytest.mark.parametrize("command", [c for c in commands() if verb_words(c.text)], ids=str)
def test_the_command_line_takes_it(command: Command) -> None:
    """Read by the parser that the command itself uses: verbs, keys and values."""
    found = verb_words(command.text)
    assert found is not None
    verb, words = found
    words = [w for w in words if w not in ("--help", "--print")]
    if verb == "train":
        if words:
            load_config(words)
    elif verb in OPTIONS:
        parse_options(OPTIONS[verb], words)
    else:
        assert verb in ("recipes", "assets") and not words, command


@pytest.mark.parametrize("text", [text for text, how in KNOWN.items() if how == HERE])
def test_it_runs(text: str) -> None:
    words = shlex.split(text)
    done = subprocess.run([BIN / words[0], *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "eagle3" in done.stdout, done.stderr


def test_quickstart_in_short(tmp_path: Path) -> None:
    """`make quickstart STEPS=20`, into another folder; what make would start is read, so that nothing is installed."""
    bare = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}  # as a user calls it
    make = ["make", "-n", "quickstart", "STEPS=20"]
    shown = subprocess.run(make, cwd=ROOT, env=bare, capture_output=True, text=True)
    start = shown.stdout.strip().splitlines()[-1].split()
    assert start[1:] == ["scripts/quickstart.py", "steps=20"], shown
    command = [sys.executable, *start[1:], f"run={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for words in ("eagle-train assets", "per position", "output identical ✓", "head: ", "next: eagle-train generate"):
        assert words in done.stdout, f"{words!r} is not in what quickstart printed"
    found = json.loads((tmp_path / "run" / "bench.json").read_text())
    assert found["greedy"]["drafts"] > 0 and found["identical"] == found["prompts"], found


def known_keys() -> set[str]:
    options = {key for model in OPTIONS.values() for key in model.model_fields}
    # Ids of figures look like keys: they stand where a script records them.
    scripts = "\n".join(path.read_text() for path in (ROOT / "scripts").glob("*.py"))
    ids = set(re.findall(r'record\(\s*"([a-z0-9_.]+)"', scripts))
    return set(leaves(Config)) | options | OTHER_KEYS | ids


def test_every_key_exists() -> None:
    """`key=value` anywhere in inline code, and `section.key` alone."""
    sections = {key.split(".")[0] for key in leaves(Config) if "." in key}
    wrong, seen = [], 0
    for page, text in spans():
        keys = re.findall(r"(?<![\w\-.{])([A-Za-z_]+(?:\.[a-z_]+)*)=(?!=)", text)
        if re.fullmatch(rf"(?:{'|'.join(sections)})\.[a-z_]+", text) and not (ROOT / text).exists():
            keys.append(text)
        seen += len(keys)
        wrong += [f"{page}: {key} in `{text}`" for key in keys if key not in known_keys()]
    assert seen > 20, "keys are no longer found"
    assert not wrong, wrong


def test_every_path_exists() -> None:
    """Inline code that is a path by its looks: with a slash, or a file's ending."""
    ending = r"[\w\-./]+\.(?:py|md|ya?ml|jsonl?|sh|toml|txt|safetensors|_recipes)"
    wrong, seen = [], 0
    for page, text in spans():
        if not re.fullmatch(rf"(?:[\w\-.]+/)+[\w\-.]*|{ending}|\.venv", text):
            continue
        seen += 1
        if text in MADE:
            name = text.rstrip("/").split("/")[-1].split("._")[-1]
            assert name in (ROOT / MADE[text]).read_text(), f"{MADE[text]} no longer makes {text}"
        elif not (ROOT / text).exists():
            wrong.append(f"{page}: {text}")
    assert seen > 20, "paths are no longer found"
    assert not wrong, wrong


def anchors(page: Path) -> set[str]:
    """The fragments that the headings of a page give, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_every_link_resolves() -> None:
    wrong, seen = [], 0
    for page, text in prose():
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if link.startswith(("https://", "http://")):
                continue
            seen += 1
            path, _, fragment = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            if not target.exists() or (fragment and fragment not in anchors(target)):
                wrong.append(f"{page}: {link}")
    assert seen > 10, "links are no longer found"
    assert not wrong, wrong


def test_every_bar_is_explained() -> None:
    """An id in bars.json is in the table of docs/results/README.md."""
    table = (ROOT / "docs" / "results" / "README.md").read_text()
    bars = json.loads((ROOT / "docs" / "results" / "bars.json").read_text())
    assert [bar for bar in bars if f"| `{bar}` |" not in table] == []
