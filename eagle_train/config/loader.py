"""`recipe=NAME key=value …` → settings: defaults < the recipe's YAML < the command line. Imports no torch.

Nothing here guesses a type: every scalar, in a file or on the command line, stays text until the schema reads it, so
`1e-4` is a float where a float is due and `run=2024` a folder. All mistakes are gathered and raised at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from eagle_train.config.help import doc, field_type, leaves, unwrap, value_text
from eagle_train.config.schema import Config
from eagle_train.errors import UserError

COMMAND_LINE = "command line"
DEFAULT = "default"
NULLS = ("null", "Null", "NULL", "~")
# What other trainers call it → our key; used for advice only, never accepted.
ALIASES = {
    "learning_rate": "train.lr",
    "min_lr": "train.min_lr_share",
    "batch": "train.batch_tokens",
    "batch_size": "train.batch_tokens",
    "per_device_train_batch_size": "train.batch_tokens",
    "micro_batch_size": "train.batch_tokens",
    "gradient_accumulation_steps": "train.accumulation",
    "grad_accum": "train.accumulation",
    "epochs": "train.steps",
    "num_epochs": "train.steps",
    "num_train_epochs": "train.steps",
    "max_steps": "train.steps",
    "warmup": "train.warmup_steps",
    "warmup_ratio": "train.warmup_steps",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "max_grad_norm": "train.clip_norm",
    "grad_clip": "train.clip_norm",
    "adam_epsilon": "train.eps",
    "bf16": "train.precision",
    "mixed_precision": "train.precision",
    "save_steps": "train.save_every",
    "logging_steps": "train.log_every",
    "eval_steps": "eval.every",
    "num_spec_tokens": "eval.k",
    "num_speculative_tokens": "eval.k",
    "speculative_tokens": "eval.k",
    "ttt_length": "algorithm.depths",
    "ttt_steps": "algorithm.depths",
    "depth": "algorithm.depths",
    "output_dir": "run",
    "out_dir": "run",
    "save_dir": "run",
    "model": "target",
    "model_name": "target",
    "model_name_or_path": "target",
    "target_model": "target",
    "base_model": "target",
    "config": "recipe",
    "train_data": "data.train",
    "train_file": "data.train",
    "dataset": "data.train",
    "eval_data": "data.heldout",
    "validation_file": "data.heldout",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "seq_length": "data.max_length",
    "max_samples": "data.max_rows",
    "draft_vocab_size": "draft.vocab_size",
    "num_hidden_layers": "draft.layers",
    "num_layers": "draft.layers",
    "aux_layer_ids": "draft.layer_ids",
    "report_to": "track.trackers",
    "wandb": "track.trackers",
    "wandb_project": "track.project",
}

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Loaded:
    """Settings, and for each dotted key where its value came from."""

    config: Config
    origins: dict[str, str]
    """Dotted key → "default", "recipe NAME" or "command line"."""


@dataclass(frozen=True)
class _Given:
    """One value as it was written; `where` is `file:line: ` for a file, empty for the command line."""

    key: str
    node: yaml.Node
    origin: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where}{self.key}={value_text(_plain(self.node))}"


def load_config(args: Sequence[str], *, recipes_dir: Path | None = None) -> Loaded:
    """The settings of a training run from its command line's words, e.g. `["recipe=eagle3", "train.lr=1e-4"]`.

    Raises:
        UserError: one report of all mistakes: unknown recipe or keys, bad values, words that are not key=value.
    """
    keys = leaves(Config)
    words, errors = _read_words(args, keys, _names(recipes_dir))
    chosen = words.pop("recipe", None)
    from_file: dict[str, _Given] = {}
    if chosen is None:
        errors.insert(0, f"no recipe given; start with recipe=NAME, one of: {', '.join(_names(recipes_dir))}")
    else:
        path, trouble = _find_recipe(str(_plain(chosen.node)), recipes_dir)
        errors += trouble
        if path is not None:
            from_file, trouble = _read_file(path, f"recipe {_plain(chosen.node)}", keys)
            errors += trouble
            if not trouble:
                errors += _check_algorithm(path, from_file, words)
            name = yaml.ScalarNode("tag:yaml.org,2002:str", path.stem)
            from_file.setdefault("recipe", _Given("recipe", name, COMMAND_LINE))
    placeholder = {} if "recipe" in from_file else {"recipe": "?"}
    config, origins = _build(Config, {**from_file, **words}, errors, placeholder)
    return Loaded(config, origins)


def parse_options(model: type[M], args: Sequence[str]) -> tuple[M, dict[str, str]]:
    """Options of a verb in the same grammar: (the filled-in `model`, dotted key → "default" or "command line").

    Raises:
        UserError: one report of all mistakes.
    """
    words, errors = _read_words(args, leaves(model), [])
    return _build(model, words, errors, {})


def recipes_dir() -> Path:
    """The folder of the shipped recipes: the wheel's copy if there is one, else `recipes/` of the checkout.

    Raises:
        UserError: neither is there.
    """
    # The wheel's first: next to an installed package, `recipes` may be a folder of someone else.
    folders = [Path(__file__).parents[1] / "_recipes", Path(__file__).parents[2] / "recipes"]
    for folder in folders:
        if any(folder.glob("*.yaml")):
            return folder
    raise UserError(f"no recipes in {' or '.join(map(str, folders))}.", hint="install eagle-train again")


def list_recipes(folder: Path | None = None) -> list[tuple[str, str]]:
    """(name, first comment line of the file) of each recipe in `folder` (default: those shipped), by name."""
    found = []
    for path in sorted((folder or recipes_dir()).glob("*.yaml")):
        comments = [line.lstrip("# ").rstrip() for line in path.read_text("utf-8").splitlines() if line.startswith("#")]
        found.append((path.stem, next((c for c in comments if c), "")))
    return found


def dump_yaml(config: Config) -> str:
    """The resolved settings as YAML; saved to a file, `recipe=FILE.yaml` loads the same settings again."""
    header = "# All settings of this run, resolved; `recipe=THIS_FILE.yaml` loads them again.\n"
    return header + yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


def print_config(loaded: Loaded) -> str:
    """One line a key: name, value, (origin)."""
    rows = [(key, value_text(_at(loaded.config, key)), origin) for key, origin in loaded.origins.items()]
    wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return "".join(f"{key:<{wide[0]}}  {value:<{wide[1]}}  ({origin})\n" for key, value, origin in rows)


def suggest(key: str, keys: Sequence[str]) -> list[str]:
    """Keys that `key` may have meant, likeliest first: another trainer's name, a bare leaf, or a slip; up to three."""
    wanted = key.strip().lstrip("-").replace("-", "_").lower()
    leaf = wanted.rpartition(".")[2]
    for alias in (wanted, leaf):
        ours = ALIASES.get(alias, "")
        # An option model of another verb may have the same setting without its section.
        for name in (ours, ours.rpartition(".")[2]):
            if name and name in keys:
                return [name]
    if wanted in keys:
        return [wanted]
    same_leaf = [k for k in keys if k.rpartition(".")[2] == leaf]
    if same_leaf:
        return same_leaf[:3]

    def likeness(ours: str) -> float:
        pairs = ((wanted, ours), (leaf, ours.rpartition(".")[2]))
        ratios = [difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs]
        return sum(ratios) / 2 if "." in wanted else max(ratios)

    best = sorted(((likeness(k), k) for k in keys), reverse=True)[:3]
    return [k for score, k in best if score >= 0.65 and score >= best[0][0] - 0.05]


def _names(folder: Path | None) -> list[str]:
    return [name for name, _ in list_recipes(folder)]


def _read_words(
    args: Sequence[str], keys: Mapping[str, FieldInfo], recipes: Sequence[str]
) -> tuple[dict[str, _Given], list[str]]:
    given: dict[str, _Given] = {}
    errors: list[str] = []
    for word in args:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not key or not equals:
            errors.append(f"{word!r}: expected key=value{_instead(word, keys, recipes)}")
        elif key not in keys:
            errors.append(f"{word}: {_unknown(key, keys)}")
        elif key in given:
            errors.append(f"{word}: {key} was given before, as {given[key]}; keep one of them")
        else:
            try:
                given[key] = _Given(key, _value_node(text), COMMAND_LINE)
            except yaml.YAMLError as e:
                errors.append(f"{word}: not valid YAML ({_reason(e)}); expected {_expected(keys[key])}")
    return given, errors


def _instead(word: str, keys: Mapping[str, FieldInfo], recipes: Sequence[str]) -> str:
    if word in recipes:
        return f"; did you mean recipe={word}?"
    found = suggest(word, list(keys)) if word.strip("-= ") else []
    return f"; did you mean {found[0]}=…? ({doc(keys[found[0]])})" if found else ""


def _unknown(key: str, keys: Mapping[str, FieldInfo]) -> str:
    inside = [k for k in keys if k.startswith(f"{key}.")]
    if inside:
        return f"{key} is a section, not a value; set one of its keys, e.g. {inside[0]}"
    found = suggest(key, list(keys))
    if not found:
        return "unknown key; `--help` lists those there are"
    return f"unknown key; did you mean {' or '.join(found)}?" + (f" ({doc(keys[found[0]])})" if len(found) == 1 else "")


def _value_node(text: str) -> yaml.Node:
    # Only brackets and quotes need YAML; a bare `@x`, `*.jsonl` or `a: b` is the text itself.
    stripped = text.strip()
    node = yaml.compose(stripped, Loader=yaml.BaseLoader) if stripped[:1] in ("[", "{", '"', "'") else None
    return node or yaml.ScalarNode("tag:yaml.org,2002:str", stripped)


def _find_recipe(name: str, folder: Path | None) -> tuple[Path | None, list[str]]:
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        return (path, []) if path.is_file() else (None, [f"recipe={name}: there is no such file"])
    names = _names(folder)
    if name in names:
        return (folder or recipes_dir()) / f"{name}.yaml", []
    close = difflib.get_close_matches(name.lower().replace("-", "").replace("_", ""), names, n=1)
    advice = f"did you mean recipe={close[0]}? Else " if close else ""
    return None, [
        f"recipe={name}: unknown recipe; {advice}there are: {', '.join(names)}; or give a path ending in .yaml"
    ]


def _read_file(path: Path, origin: str, keys: Mapping[str, FieldInfo]) -> tuple[dict[str, _Given], list[str]]:
    try:
        root = yaml.compose(path.read_text("utf-8"), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        return {}, [f"{path}: cannot be read as YAML: {_reason(e)}"]
    given: dict[str, _Given] = {}
    errors: list[str] = []

    def walk(node: yaml.MappingNode, prefix: str) -> None:
        for name, value in node.value:
            where = f"{path}:{name.start_mark.line + 1}: "
            key = f"{prefix}{name.value if isinstance(name, yaml.ScalarNode) else _plain(name)}"
            inside = any(k.startswith(f"{key}.") for k in keys)
            if key in given:
                errors.append(f"{where}{key} is there twice, first as {given[key]}; keep one of them")
            elif key in keys:
                given[key] = _Given(key, value, origin, where)
            elif isinstance(value, yaml.MappingNode):
                walk(value, f"{key}.")
            elif not (inside and isinstance(value, yaml.ScalarNode) and value.value in ("", *NULLS)):
                errors.append(f"{where}{key}: {_unknown(key, keys)}")

    if not isinstance(root, yaml.MappingNode):
        return {}, [
            f"{path}: expected `key: value` lines, found {'no text' if root is None else root.tag.rpartition(':')[2]}"
        ]
    walk(root, "")
    return given, errors


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem}, line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return str(error)


def _check_algorithm(path: Path, recipe: Mapping[str, _Given], words: Mapping[str, _Given]) -> list[str]:
    name, other = recipe.get("algorithm.name"), words.get("algorithm.name")
    if name is None:
        return [f"{path}: a recipe must set algorithm.name; add `algorithm: {{name: eagle3}}`"]
    # A file of the user's may take the place of a recipe's algorithm; a built-in one has a recipe of its own.
    own = other is not None and ".py:" in str(_plain(other.node))
    if other is not None and not own and _plain(other.node) != _plain(name.node):
        return [f"{other}: the recipe sets algorithm.name, here to {_plain(name.node)}; choose another recipe instead"]
    return []


def _plain(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {str(_plain(k)): _plain(v) for k, v in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    assert isinstance(node, yaml.ScalarNode), node
    return node.value


def _value(node: yaml.Node, field: FieldInfo) -> Any:
    """What the schema is given: text, null, or a list of texts where the field wants a list."""
    bare, _, nullable = unwrap(field.annotation)
    if not isinstance(node, yaml.ScalarNode) or node.style is not None:
        return _plain(node)
    if node.value in NULLS or (nullable and not node.value):
        return None
    if get_origin(bare) in (list, tuple):
        return [item.strip() for item in node.value.split(",")] if node.value else []
    return node.value


def _expected(field: FieldInfo) -> str:
    text = doc(field)
    return field_type(field) + (f" ({text})" if text else "")


def _build(
    model: type[M], given: Mapping[str, _Given], errors: list[str], placeholder: Mapping[str, Any]
) -> tuple[M, dict[str, str]]:
    keys = leaves(model)
    nested: dict[str, Any] = dict(placeholder)
    for key, item in given.items():
        *sections, leaf = key.split(".")
        into = nested
        for section in sections:
            into = into.setdefault(section, {})
        into[leaf] = _value(item.node, keys[key])
    built: M | None = None
    try:
        built = model.model_validate(nested)
    except ValidationError as e:
        errors = errors + list(dict.fromkeys(_bad_value(item, keys, given) for item in e.errors(include_url=False)))
    if errors or built is None:
        count = f"{len(errors)} mistakes" if len(errors) > 1 else "1 mistake"
        lines = "".join(f"\n  {line}" for line in errors)
        raise UserError(f"{count} in the settings:{lines}", hint="`--help` lists every key with its type and default")
    origins = {key: given[key].origin if key in given else DEFAULT for key in keys}
    return built, origins


def _bad_value(error: Any, keys: Mapping[str, FieldInfo], given: Mapping[str, _Given]) -> str:
    loc = [str(part) for part in error["loc"]]
    key = next((k for n in range(len(loc), 0, -1) if (k := ".".join(loc[:n])) in keys), None)
    own = str(error["ctx"]["error"]) if error["type"] == "value_error" else ""
    if key is None:
        return f"{'.'.join(loc) or 'settings'}: {own or error['msg']}"
    if key not in given:
        return f"{key}: missing; give {key}=VALUE, expected {_expected(keys[key])}"
    return f"{given[key]}: {own + '; ' if own else ''}expected {_expected(keys[key])}"


def _at(config: BaseModel, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
