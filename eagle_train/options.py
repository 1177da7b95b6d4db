"""The options of the verbs other than `train`, in the same grammar; no torch here, so that help is quick."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field

from eagle_train.config.help import help_text
from eagle_train.config.loader import parse_options
from eagle_train.config.schema import SETTINGS, Text

M = TypeVar("M", bound=BaseModel)


class ExportOptions(BaseModel):
    """A run's newest checkpoint → a folder that engines load."""

    model_config = SETTINGS

    run: Text
    """The run folder."""
    out: str = ""
    """Folder to write, which must not exist; empty = RUN/export."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the stored weights."""


class BenchOptions(BaseModel):
    """Acceptance as vLLM counts it, and speed against plain decoding, in one run."""

    model_config = SETTINGS

    head: Text
    """The exported head's folder."""
    target: Text = "smollm2"
    """The target: a bundled name, a local folder or a hub id."""
    prompts: Text = "bundled"
    """`bundled` (20 written for this project, 20 first turns of MT-bench), `written` (those 20), or a JSON(L) file."""
    limit: int = Field(0, ge=0)
    """Use the first so many prompts; 0 = all."""
    k: int = Field(3, ge=1)
    """Draft tokens per cycle."""
    max_new_tokens: int = Field(128, ge=1)
    """Longest answer, in new tokens per prompt."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of target and head."""
    device: str = Field("auto", pattern=r"^(auto|cpu|(cuda|npu)(:\d+)?)$")
    """auto (npu before cuda before cpu), cpu, cuda or npu."""
    modes: Annotated[list[Literal["sampled", "plain", "hf"]], Field(min_length=0)] = ["sampled", "plain", "hf"]
    """What to run beside greedy speculation: sampling at temperature 1, plain decoding, Hugging Face generate."""
    seed: int = Field(0, ge=0)
    """Seed of the sampled mode."""
    out: str = ""
    """File for the figures as JSON; empty = none."""
    bar: str = ""
    """Record the greedy acceptance length under this id in docs/results/bars.json; empty = do not."""


class GenerateOptions(BaseModel):
    """Decode one prompt with a head."""

    model_config = SETTINGS

    head: Text
    """The exported head's folder."""
    prompt: Text
    """What to ask; the target's chat template is applied when it has one."""
    target: Text = "smollm2"
    """The target: a bundled name, a local folder or a hub id."""
    k: int = Field(3, ge=1)
    """Draft tokens per cycle."""
    max_new_tokens: int = Field(128, ge=1)
    """Longest answer, in new tokens."""
    temperature: float = Field(0.0, ge=0)
    """0 = greedy."""
    top_k: int = Field(0, ge=0)
    """Keep the k most probable tokens; 0 = off."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of tokens of this probability; 1 = off."""
    seed: int = Field(0, ge=0)
    """Seed of sampling."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of target and head."""
    device: str = Field("auto", pattern=r"^(auto|cpu|(cuda|npu)(:\d+)?)$")
    """auto (npu before cuda before cpu), cpu, cuda or npu."""


def read(model: type[M], words: list[str], usage: str) -> M | None:
    """The options, or None after printing the help that was asked for."""
    if "--help" in words or "-h" in words:
        print(help_text(model, usage))
        return None
    options, _ = parse_options(model, words)
    return options
