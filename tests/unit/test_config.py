"""The config room through its public functions: grammar, origins, messages, round trip, help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle_train.config.help import help_text, leaves
from eagle_train.config.loader import (
    ALIASES,
    dump_yaml,
    list_recipes,
    load_config,
    parse_options,
    print_config,
    recipes_dir,
    suggest,
)
from eagle_train.config.schema import Config, loss_terms
from eagle_train.errors import UserError

MINIMAL = "# A small recipe.\nalgorithm:\n  name: eagle3\n"


def mistakes(*args: str, folder: Path | None = None) -> list[str]:
    """The lines of the report, without its head and its hint."""
    with pytest.raises(UserError) as e:
        load_config(args, recipes_dir=folder)
    head, *lines, hint = str(e.value).splitlines()
    assert head == f"{len(lines)} mistake{'s' if len(lines) > 1 else ''} in the settings:"
    assert "--help" in hint
    return [line.strip() for line in lines]


def recipe_file(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_then_recipe_then_command_line_with_origins(tmp_path: Path) -> None:
    recipe_file(tmp_path, MINIMAL + "  depths: 5\ntrain: {lr: 2e-4, steps: 30}\n")
    loaded = load_config(["recipe=mine", "train.steps=40", "data.train=a.jsonl,b.jsonl"], recipes_dir=tmp_path)
    assert loaded.config.algorithm.depths == 5
    assert loaded.config.train.lr == 2e-4
    assert loaded.config.train.steps == 40
    assert loaded.config.train.warmup_steps == 20
    assert loaded.config.data.train == ["a.jsonl", "b.jsonl"]
    assert list(loaded.origins) == list(leaves(Config))
    assert loaded.origins["recipe"] == "command line"
    assert loaded.origins["train.lr"] == loaded.origins["algorithm.name"] == "recipe mine"
    assert loaded.origins["train.steps"] == loaded.origins["data.train"] == "command line"
    assert loaded.origins["train.warmup_steps"] == "default"


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("train.lr=1e-4", "train.lr", 1e-4),
        ("train.lr=1", "train.lr", 1.0),
        ("run=a=b=c", "run", "a=b=c"),
        ("run=2024", "run", "2024"),
        ("run=no", "run", "no"),
        ("run=", "run", ""),
        ('run="a, b"', "run", "a, b"),
        ("target=@odd: name", "target", "@odd: name"),
        ("data.skip_bad=yes", "data.skip_bad", True),
        ("data.train=[a.jsonl, b.jsonl]", "data.train", ["a.jsonl", "b.jsonl"]),
        ("data.train=1,2", "data.train", ["1", "2"]),
        ("train.betas=0.8,0.9", "train.betas", (0.8, 0.9)),
        ("draft.layer_ids=[1,2,3]", "draft.layer_ids", [1, 2, 3]),
        ("draft.layer_ids=null", "draft.layer_ids", None),
        ("track.trackers=wandb", "track.trackers", ["wandb"]),
        ("track.trackers=", "track.trackers", []),
        ("train.device=npu", "train.device", "npu"),
    ],
)
def test_values_are_read_as_the_schema_wants_them(word: str, key: str, value: object) -> None:
    loaded = load_config(["recipe=eagle3", word])
    got: object = loaded.config
    for part in key.split("."):
        got = getattr(got, part)
    assert got == value
    assert type(got) is type(value)
    assert loaded.origins[key] == "command line"


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("train.stesp=5", "did you mean train.steps?"),
        ("tarin.steps=5", "did you mean train.steps?"),
        ("lr=1e-4", "did you mean train.lr?"),
        ("--train.lr=1e-4", "did you mean train.lr?"),
        ("train.learning_rate=1e-4", "did you mean train.lr?"),
        ("learning-rate=1e-4", "did you mean train.lr?"),
        ("batch_size=8", "did you mean train.batch_tokens? (Packed tokens"),
        ("epochs=3", "did you mean train.steps? (Length of the run, in optimizer steps)"),
        ("output_dir=x", "did you mean run?"),
        ("num_spec_tokens=3", "did you mean eval.k?"),
        ("ttt_length=7", "did you mean algorithm.depths?"),
        ("model=x", "did you mean target?"),
        ("train=5", "train is a section"),
        ("zzzzzz=1", "`--help` lists those there are"),
    ],
)
def test_an_unknown_key_is_an_error_with_advice(word: str, advice: str) -> None:
    (line,) = mistakes("recipe=eagle3", word)
    assert line.startswith(f"{word}: ")
    assert advice in line


def test_every_alias_leads_to_a_key_that_exists_and_is_no_key_itself() -> None:
    keys = list(leaves(Config))
    assert set(ALIASES.values()) <= set(keys)
    assert not set(ALIASES) & set(keys)
    assert all(suggest(alias, keys) == [ours] for alias, ours in ALIASES.items())


def test_all_mistakes_come_in_one_report() -> None:
    lines = mistakes(
        "recipe=eagel3", "train.lr=fast", "train.setps=3", "train.schedule=cosin", "verbose", "seed=1", "seed=2"
    )
    assert len(lines) == 6
    for start, expected in [
        ("recipe=eagel3: ", "did you mean recipe=eagle3? Else there are: "),
        ("train.lr=fast: ", "expected float > 0 (AdamW's peak learning rate"),
        ("train.setps=3: ", "did you mean train.steps or "),
        ("train.schedule=cosin: ", "expected one of cosine, linear, wsd, constant"),
        ("'verbose': ", "expected key=value"),
        ("seed=2: ", "given before, as seed=1"),
    ]:
        (line,) = [line for line in lines if line.startswith(start)]
        assert expected in line


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train.steps=0", "int ≥ 1"),
        ("train.steps=true", "int ≥ 1"),
        ("train.lr=nan", "float > 0"),
        ("train.lr=inf", "float > 0"),
        ("algorithm.depths=16", "int ≥ 1 and ≤ 15"),
        ("data.max_bad_share=1.5", "float ≥ 0 and ≤ 1"),
        ("data.train=a,,b", "list of non-empty str"),
        ("data.train=", "non-empty list"),
        ("data.train=[a", "not valid YAML"),
        ("draft.layer_ids=2,1", "distinct and ascending"),
        ("draft.layer_ids=1,1,2", "distinct and ascending"),
        ("draft.layer_ids=-1,2", "list of int ≥ 0"),
        ("train.betas=0.9", "2 values"),
        ("train.betas=0.9,1", "< 1"),
        ("track.trackers=wandb,wandb", "named once"),
        ("train.device=tpu", "auto takes npu before cuda before cpu"),
        ("run=null", "expected str"),
    ],
)
def test_a_bad_value_says_what_was_expected(word: str, expected: str) -> None:
    (line,) = mistakes("recipe=eagle3", word)
    assert line.startswith(word.partition("=")[0] + "=")
    assert expected in line


def test_words_without_equals_are_advised() -> None:
    lines = mistakes("eagle3", "train.lr", "1e-4")
    assert "no recipe given" in lines[0]
    assert "one of: " in lines[0]
    assert "did you mean recipe=eagle3?" in lines[1]
    assert "did you mean train.lr=…?" in lines[2]
    assert lines[3] == "'1e-4': expected key=value"


def test_a_recipe_file_is_checked_with_its_line_numbers(tmp_path: Path) -> None:
    path = recipe_file(
        tmp_path, MINIMAL + "train:\n  learning_rate: 1e-4\n  steps: many\n  lr: 1\n  lr: 2\noptim: {a: 1}\n"
    )
    lines = mistakes(f"recipe={path}")
    assert lines[0].startswith(f"{path}:5: train.learning_rate: unknown key; did you mean train.lr?")
    assert lines[1].startswith(f"{path}:8: train.lr is there twice")
    assert lines[2].startswith(f"{path}:9: optim.a: unknown key")
    assert lines[3].startswith(f"{path}:6: train.steps=many: expected int ≥ 1")
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "found no text"),
        ("- a\n", "found seq"),
        ("a: [1\n", "cannot be read as YAML"),
        ("train: {steps: 3}\n", "must set algorithm.name"),
        (MINIMAL + "train: 5\n", "train is a section"),
    ],
)
def test_a_broken_recipe_file(tmp_path: Path, text: str, reason: str) -> None:
    (line,) = mistakes(f"recipe={recipe_file(tmp_path, text)}")
    assert reason in line


def test_an_empty_section_in_a_file_is_no_mistake(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, MINIMAL + "train:\n  # steps: 5\n")
    assert load_config([f"recipe={path}"]).config == Config(recipe="mine")


def test_a_missing_recipe_file_and_a_foreign_algorithm(tmp_path: Path) -> None:
    assert "there is no such file" in mistakes(f"recipe={tmp_path / 'none.yaml'}")[0]
    lines = mistakes("recipe=eagle3", "algorithm.name=hass")
    assert "choose another recipe" in lines[0]
    own = "some/where.py:Mine"
    assert load_config(["recipe=eagle3", f"algorithm.name={own}"]).config.algorithm.name == own
    assert load_config(["recipe=eagle3", "algorithm.name=eagle3"]).config.algorithm.name == "eagle3"


def test_recipe_may_be_a_path_and_names_the_run_folder(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, MINIMAL)
    loaded = load_config([f"recipe={path}"])
    assert loaded.config.recipe == "mine"
    assert loaded.config.run_dir == Path("runs/mine")
    assert loaded.origins["algorithm.name"] == f"recipe {path}"
    assert load_config([f"recipe={path}", "run=x/y"]).config.run_dir == Path("x/y")


def test_the_recipes_shipped_are_listed_and_load() -> None:
    listed = dict(list_recipes())
    assert "eagle3" in listed
    assert listed.keys() == {p.stem for p in recipes_dir().glob("*.yaml")}
    for name, line in listed.items():
        assert len(line) > 10, name
        text = (recipes_dir() / f"{name}.yaml").read_text("utf-8")
        assert f"accelerate launch train.py recipe={name}\n" in text
        loaded = load_config([f"recipe={name}"])
        assert loaded.config.recipe == name
        written = yaml.safe_load(text)["algorithm"]["name"]
        assert (loaded.config.algorithm.name, loaded.origins["algorithm.name"]) == (written, f"recipe {name}")


def test_list_recipes_takes_the_first_comment(tmp_path: Path) -> None:
    recipe_file(tmp_path, "#\n# What it is.\n# More.\na: 1\n", "b.yaml")
    recipe_file(tmp_path, "a: 1\n", "a.yaml")
    assert list_recipes(tmp_path) == [("a", ""), ("b", "What it is.")]


def test_the_dump_loads_again(tmp_path: Path) -> None:
    words = ["recipe=eagle3", "run=null.d", "train.eps=1e-9", "draft.layer_ids=1,2", "track.trackers=wandb,tensorboard"]
    config = load_config([*words, "data.chat_template='null'", "train.lr=3e-5", "seed=7"]).config
    path = recipe_file(tmp_path, dump_yaml(config), "config.yaml")
    again = load_config([f"recipe={path}"])
    assert again.config == config
    assert again.config.recipe == "eagle3"
    assert set(again.origins.values()) == {f"recipe {path}"}
    assert load_config([f"recipe={path}", "seed=8"]).config.seed == 8
    plain = load_config(["recipe=eagle3"]).config
    assert load_config([f"recipe={recipe_file(tmp_path, dump_yaml(plain))}"]).config == plain


def test_print_shows_each_value_with_its_origin() -> None:
    text = print_config(load_config(["recipe=eagle3", "train.lr=0.001", "train.betas=0.5,0.6"]))
    rows = {line.split()[0]: line for line in text.splitlines()}
    assert rows.keys() == leaves(Config).keys()
    assert rows["train.lr"].split(maxsplit=2) == ["train.lr", "0.001", "(command line)"]
    assert rows["algorithm.depths"].split(maxsplit=2) == ["algorithm.depths", "5", "(recipe eagle3)"]
    assert rows["track.project"].split(maxsplit=2) == ["track.project", "eagle_train", "(default)"]
    assert "[0.5, 0.6]" in rows["train.betas"]
    # What is printed may be given back.
    words = [f"{key}={line[len(key) : line.rindex('(')].strip()}" for key, line in rows.items()]
    assert load_config(words).config == load_config(["recipe=eagle3", "train.lr=0.001", "train.betas=0.5,0.6"]).config


def test_help_has_every_key_with_type_default_and_unit() -> None:
    text = help_text(Config, "usage: train.py recipe=NAME key=value …")
    assert text.startswith("usage: train.py")
    entries = {line.split()[0]: line for line in text.splitlines() if line[:2] == "  " and line[2:3] != " "}
    assert entries.keys() == leaves(Config).keys()
    assert entries["train.steps"].split(maxsplit=1)[1] == "int ≥ 1; default 600"
    assert entries["recipe"].endswith("required")
    assert entries["draft.init"].endswith("one of target, random; default target")
    assert "Time limit, in seconds" in text
    assert "Packed tokens per micro-batch and process" in text
    assert "in GB" in text
    assert max(map(len, text.splitlines())) <= 120
    undocumented = [key for key, field in leaves(Config).items() if len(field.description or "") < 10]
    assert undocumented == []


def test_settings_are_frozen_and_closed() -> None:
    config = Config(recipe="eagle3")
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 3
    with pytest.raises(ValidationError, match="Extra inputs"):
        Config.model_validate({"recipe": "eagle3", "train": {"stesp": 3}})


class ExportOptions(BaseModel):
    """Options as another verb has them: flat, one required."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    run: str
    """Folder of the run to export."""
    k: int = Field(default=3, ge=1)
    """Draft tokens per cycle."""
    force: bool = False
    """Replace a folder that exists."""


def test_options_of_other_verbs_share_the_grammar() -> None:
    options, origins = parse_options(ExportOptions, ["run=a=b", "k=5"])
    assert options == ExportOptions(run="a=b", k=5)
    assert origins == {"run": "command line", "k": "command line", "force": "default"}
    with pytest.raises(UserError) as e:
        parse_options(ExportOptions, ["num_spec_tokens=2", "forse=1", "k=0", "extra"])
    text = str(e.value)
    assert text.startswith("5 mistakes")
    assert "num_spec_tokens=2: unknown key; did you mean k?" in text
    assert "forse=1: unknown key; did you mean force?" in text
    assert "k=0: expected int ≥ 1 (Draft tokens per cycle)" in text
    assert "'extra': expected key=value" in text
    assert "run: missing; give run=VALUE, expected str (Folder of the run to export)" in text
    assert "run                        str; required" in help_text(ExportOptions, "usage: export")


def test_config_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, eagle_train.config.loader as l, eagle_train.config.help as h\n"
        "h.help_text(l.Config, ''); l.print_config(l.load_config(['recipe=eagle3']))\n"
        "print([m for m in ('torch', 'transformers', 'accelerate', 'numpy') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("kl", (("kl", 1.0),)),
        ("kl + 0.5*tv", (("kl", 1.0), ("tv", 0.5))),
        ("0.9*lk_hybrid+.1 * top_k", (("lk_hybrid", 0.9), ("top_k", 0.1))),
    ],
)
def test_losses_are_read(text: str, terms: tuple[tuple[str, float], ...]) -> None:
    assert loss_terms(text) == terms
    assert load_config(["recipe=eagle3", f"algorithm.loss={text}"]).config.algorithm.loss == text


@pytest.mark.parametrize("text", ["kll", "smooth_l1", "kl + kl", "x*kl", "-1*kl", "inf*kl", "nan*kl", "kl +", "0*tv"])
def test_losses_that_cannot_be_read(text: str) -> None:
    (line,) = mistakes("recipe=eagle3", f"algorithm.loss={text}")
    assert "algorithm.loss" in line


def test_depth_weights() -> None:
    given = ["recipe=eagle3", "algorithm.depths=3"]
    assert load_config([*given, "algorithm.depth_weights=[1,0,2]"]).config.algorithm.weights == (1.0, 0.0, 2.0)
    assert load_config([*given, "algorithm.depth_decay=0.5"]).config.algorithm.weights == (1.0, 0.5, 0.25)
    assert any("2 numbers for 3 depths" in line for line in mistakes(*given, "algorithm.depth_weights=[1,2]"))
    assert mistakes(*given, "algorithm.depth_weights=[0,0,0]")


@pytest.mark.parametrize(
    ("recipe", "word", "reason"),
    [
        ("eagle", "draft.vocab_size=8192", "draft.vocab_size must be 0 for an EAGLE-1 head"),
        ("eagle", "draft.layer_ids=[1,2,3]", "draft.layer_ids must be null"),
        ("hass", "draft.fc_norm=true", "draft.fc_norm must be false"),
        ("hass", "draft.norm_output=true", "draft.norm_output must be false"),
        ("hass", "draft.norm_before_residual=true", "draft.norm_before_residual must be false"),
        ("eagle", "algorithm.depths=3", "algorithm.depths must be 1 for algorithm eagle (it trains one depth"),
        ("eagle3", "draft.fc_bias=true", "draft.fc_bias must be false for an EAGLE-3 head"),
        ("eagle3_1", "algorithm.noise=0.1", "algorithm.noise must be 0.0 for algorithm eagle3"),
        ("eagle3", "algorithm.loss=smooth_l1 + kl", "which an EAGLE-3 head does not predict"),
        ("eagle", "algorithm.loss=smooth_l1", "needs a loss on the logits beside it"),
        ("eagle3", "algorithm.noise_length=512", "noise_length scales algorithm.noise, which is 0"),
    ],
)
def test_what_an_algorithm_cannot_follow_is_refused(recipe: str, word: str, reason: str) -> None:
    assert reason in mistakes(f"recipe={recipe}", word)[0]


def test_all_that_does_not_apply_is_named_at_once() -> None:
    (line,) = mistakes("recipe=eagle", "draft.vocab_size=100", "algorithm.depths=2")
    assert "draft.vocab_size" in line and "algorithm.depths" in line
