"""`algorithm.name` → the class: a built-in one, or `path/to/file.py:Class` of the user's."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from eagle_train.algorithms.eagle import Eagle
from eagle_train.algorithms.eagle3 import Eagle3
from eagle_train.algorithms.hass import Hass
from eagle_train.algorithms.interface import Algorithm
from eagle_train.config.applies import HEADS
from eagle_train.errors import UserError

BUILT_IN: dict[str, type[Algorithm]] = {"eagle": Eagle, "hass": Hass, "eagle3": Eagle3}
METHODS = ("configured", "share", "results")


def algorithm_class(name: str) -> type[Algorithm]:
    """The class that `name` means.

    Raises:
        UserError: the file cannot be run, has no such class, or the class lacks what an algorithm needs.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    path, _, attribute = name.rpartition(":")
    module = _run(Path(path).expanduser(), name)
    found = getattr(module, attribute, None)
    if not isinstance(found, type):
        there = [k for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
        raise UserError(f"algorithm.name={name}: {path} has no class {attribute}; it has {', '.join(there) or 'none'}")
    missing = [m for m in METHODS if not callable(getattr(found, m, None))]
    if missing:
        raise UserError(f"algorithm.name={name}: the class lacks {', '.join(missing)}", hint="see docs/training.md")
    teaches = getattr(found, "teaches", None)
    if teaches not in HEADS:
        raise UserError(f"algorithm.name={name}: `teaches` is {teaches!r}; it must be one of {', '.join(HEADS)}")
    return found


def source_hash(name: str) -> str | None:
    """sha256 of the user's file, so that an edited one is not taken for the one a run began with; None if built in."""
    if name in BUILT_IN:
        return None
    return hashlib.sha256(Path(name.rpartition(":")[0]).expanduser().read_bytes()).hexdigest()


def _run(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        raise UserError(f"algorithm.name={name}: there is no file {path.resolve()}")
    # Registered under a name of its own: dataclasses and pickles look their module up.
    label = f"eagle_train_algorithm_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(label, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[label] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise UserError(f"algorithm.name={name}: {path} cannot be run: {type(e).__name__}: {e}") from e
    return module
