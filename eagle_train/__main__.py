"""`python -m eagle_train recipe=eagle3 …` trains, as `accelerate launch -m` needs it; a verb runs that verb."""

from __future__ import annotations

import sys

from eagle_train.cli import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
