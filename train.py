"""`accelerate launch train.py recipe=eagle3 key=value …`: the `train` verb, for a launcher that wants a script."""

from __future__ import annotations

import sys

from eagle_train.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))
