"""`python -m eagle_train recipe=eagle3 …` trains, as `accelerate launch -m` needs it; a verb runs that verb."""

from __future__ import annotations

import sys

from eagle_train.cli import main

if __name__ == "__main__":
    words = sys.argv[1:]
    raise SystemExit(main(["train", *words] if words and "=" in words[0] else words))
