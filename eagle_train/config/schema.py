"""Every setting of a training run, with its default, its range and, in its docstring, its meaning and unit.

The docstrings are the help: `eagle_train.config.help` prints them. Frozen: a run's settings never change under it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from eagle_train.config.applies import ALGORITHMS, misfits

SETTINGS = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

Text = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class DataConfig(BaseModel):
    """The conversations the head learns from, and those it is measured on."""

    model_config = SETTINGS

    train: Annotated[list[Text], Field(min_length=1)] = ["bundled"]
    """Training conversations: JSONL files, or `bundled` for the sample in recipes/data."""
    heldout: Annotated[list[Text], Field(min_length=1)] = ["bundled"]
    """Held-out conversations, never trained on: JSONL files, or `bundled` for the sample's held-out part."""
    max_length: int = Field(default=2048, ge=3)
    """Longest conversation, in tokens; what lies beyond is cut."""
    max_rows: int = Field(default=0, ge=0)
    """Training conversations to read, in rows; 0 = all."""
    skip_bad: bool = False
    """Skip and count rows that cannot be read, instead of stopping at the first."""
    max_bad_share: Share = 0.01
    """With skip_bad: the share of bad rows (0 to 1) beyond which the run stops."""
    chat_template: str = ""
    """Path of a Jinja chat template; empty = the tokenizer's own."""


class DraftConfig(BaseModel):
    """The draft head: its shape and its initial weights."""

    model_config = SETTINGS

    layers: int = Field(default=1, ge=1)
    """Decoder layers of the head."""
    vocab_size: int = Field(default=8192, ge=0)
    """Draft vocabulary, in tokens, the most frequent of the training text; 0 = the full target vocabulary (which is
    what EAGLE-1 heads need)."""
    layer_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Target streams the head reads: states after this many layers, ascending; null = [2, n//2, n-3] of n layers."""
    intermediate_size: int = Field(default=0, ge=0)
    """Width of the head's MLP, in units; 0 = the target's."""
    init: Literal["target", "random"] = "target"
    """Initial weights: copied from the target where shapes allow, or random."""
    norm_before_residual: bool = False
    """Take the residual after the hidden-state norm, instead of before it."""
    fc_norm: bool = False
    """Normalise each target stream before `fc` joins them."""
    norm_output: bool = False
    """Feed the normalised output, instead of the raw one, to the next depth."""
    fc_bias: bool = False
    """EAGLE-1 heads only: a bias in `fc`, as the released heads have; such a head cannot be exported for vLLM."""

    @field_validator("layer_ids")
    @classmethod
    def _ascending(cls, ids: list[int] | None) -> list[int] | None:
        if ids is not None and any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
            raise ValueError(f"the ids must be distinct and ascending, e.g. {sorted(set(ids))}")
        return ids


LOSSES = ("kl", "ce", "top_k", "tv", "lk", "lk_hybrid")
SMOOTH_L1 = "smooth_l1"  # the one loss on states instead of logits


def loss_terms(text: str) -> tuple[tuple[str, float], ...]:
    """`kl + 0.5*tv` → (("kl", 1.0), ("tv", 0.5)).

    Raises:
        ValueError: an unknown loss, one named twice, or a weight that is not a positive number.
    """
    terms: dict[str, float] = {}
    for part in text.split("+"):
        weight, _, name = part.strip().rpartition("*")
        name = name.strip()
        if name not in (*LOSSES, SMOOTH_L1) or name in terms:
            known = ", ".join((*LOSSES, SMOOTH_L1))
            raise ValueError(f"{part.strip()!r} is not a loss, or is named twice; one of {known}, e.g. kl + 0.5*tv")
        try:
            terms[name] = float(weight) if weight else 1.0
        except ValueError:
            raise ValueError(f"{weight!r} is not a number; write e.g. 0.5*{name}") from None
        if not 0 < terms[name] < float("inf"):
            raise ValueError(f"the weight of {name} is {weight}; it must be above 0")
    if terms.keys() == {SMOOTH_L1}:
        raise ValueError(f"{SMOOTH_L1} needs a loss on the logits beside it, e.g. {SMOOTH_L1} + 0.1*kl")
    return tuple(terms.items())


class AlgorithmConfig(BaseModel):
    """How the head is taught."""

    model_config = SETTINGS

    name: Text = "eagle3"
    """The algorithm: eagle, hass or eagle3, set by the recipe; or path/to/file.py:Class for one of your own."""
    depths: int = Field(default=7, ge=1, le=15)
    """Draft depths unrolled in training, in draft tokens; 1 for eagle."""
    depth_decay: float = Field(default=0.8, gt=0, le=1)
    """Weight of depth k in the loss is depth_decay to the power k."""
    depth_weights: list[Annotated[float, Field(ge=0)]] | None = None
    """Weight of each depth in the loss, one number per depth; null = by depth_decay."""
    loss: Text = "kl"
    """Loss of a row: kl, ce, top_k, tv, lk or lk_hybrid, or a weighted sum, e.g. `kl + 0.5*tv`; with an EAGLE-1 head
    also smooth_l1, on its state, e.g. `smooth_l1 + 0.1*kl`."""
    top_k: int = Field(default=10, ge=1)
    """For the loss top_k: how many of the target's likeliest tokens it looks at, in tokens."""
    mean: Literal["conversation", "token"] = "conversation"
    """What weighs the same in the loss: each conversation, or each trained token."""
    noise: float = Field(default=0.0, ge=0)
    """For eagle and hass: half-width of the uniform noise on the target states the head reads, in their own units."""
    noise_length: int = Field(default=0, ge=0)
    """With noise: its half-width holds for a conversation of this length, in tokens, and is scaled by length over it;
    0 = the same for all."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        path, _, attribute = name.rpartition(":")
        if name not in ALGORITHMS and not (path.endswith(".py") and attribute.isidentifier()):
            raise ValueError(f"unknown algorithm; there are: {', '.join(ALGORITHMS)}; or give path/to/file.py:Class")
        return name

    @field_validator("loss")
    @classmethod
    def _readable(cls, text: str) -> str:
        loss_terms(text)
        return text

    @model_validator(mode="after")
    def _one_weight_per_depth(self) -> AlgorithmConfig:
        given = self.depth_weights
        if given is not None and (len(given) != self.depths or not any(given)):
            raise ValueError(f"depth_weights has {len(given)} numbers for {self.depths} depths; not all may be 0")
        return self

    @model_validator(mode="after")
    def _noise_to_scale(self) -> AlgorithmConfig:
        if self.noise_length and not self.noise:
            raise ValueError("noise_length scales algorithm.noise, which is 0")
        return self

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each depth."""
        if self.depth_weights is not None:
            return tuple(self.depth_weights)
        return tuple(self.depth_decay**k for k in range(self.depths))


class TrainConfig(BaseModel):
    """The loop: how long, how fast, in which precision, where."""

    model_config = SETTINGS

    steps: int = Field(default=600, ge=1)
    """Length of the run, in optimizer steps."""
    batch_tokens: int = Field(default=1024, ge=3)
    """Packed tokens per micro-batch and process."""
    accumulation: int = Field(default=1, ge=1)
    """Micro-batches per optimizer step and process."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for all weights, or Muon for the matrices inside the head and AdamW for the rest."""
    lr: float = Field(default=1e-3, gt=0)
    """AdamW's peak learning rate, reached after the warm-up."""
    muon_lr: float = Field(default=0.02, gt=0)
    """Muon's peak learning rate."""
    min_lr_share: Share = 0.05
    """Learning rate at the end of the schedule, as a share (0 to 1) of the peak."""
    warmup_steps: int = Field(default=20, ge=0)
    """Linear warm-up, in optimizer steps."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up; wsd stays at its peak, then falls over the last decay_share."""
    decay_share: float = Field(default=0.2, gt=0, le=1)
    """With wsd: the share of the run (0 to 1) over which the rate falls."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay."""
    clip_norm: float = Field(default=0.5, gt=0)
    """Largest gradient norm; beyond it the gradient is scaled down."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Arithmetic of the head's forward and backward; the weights AdamW updates are always fp32."""
    features: Literal["online", "hybrid"] = "hybrid"
    """Target states: `online` captures them anew each epoch, `hybrid` keeps those of the first epoch."""
    features_gb: float = Field(default=8.0, ge=0)
    """With hybrid: memory the kept features may take, in GB; what lies beyond is captured again each epoch."""
    target_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Arithmetic of the frozen target in training."""
    save_every: int = Field(default=200, ge=1)
    """Distance between checkpoints, in optimizer steps."""
    log_every: int = Field(default=10, ge=1)
    """Distance between log lines, in optimizer steps."""
    max_seconds: float = Field(default=0.0, ge=0)
    """Time limit, in seconds; a run that reaches it ends its schedule early, evaluates and saves; 0 = no limit."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Where to run: auto takes npu before cuda before cpu. Which one of several: CUDA_VISIBLE_DEVICES and its like."""
    threads: int = Field(default=0, ge=0)
    """CPU threads per process; 0 = this machine's cores divided among its processes (`accelerate launch` says 1)."""


class EvalConfig(BaseModel):
    """Real acceptance during training: speculative decoding of held-out prompts."""

    model_config = SETTINGS

    every: int = Field(default=0, ge=0)
    """Distance between evaluations, in optimizer steps; 0 = only at the end."""
    prompts: int = Field(default=8, ge=1)
    """Held-out prompts decoded, in prompts."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Longest answer, in new tokens per prompt."""
    k: int = Field(default=3, ge=1)
    """Draft tokens per cycle."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of target and head while decoding."""
    heldout_rows: int = Field(default=64, ge=1)
    """Held-out conversations for the loss, in rows."""


class TrackConfig(BaseModel):
    """Experiment trackers; metrics.jsonl in the run folder is always written."""

    model_config = SETTINGS

    trackers: list[Literal["wandb", "tensorboard"]] = []
    """Trackers to report to; empty = none."""
    project: Text = "eagle_train"
    """The tracker's project name."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """wandb only: `offline` writes to the run folder, `online` sends."""

    @field_validator("trackers")
    @classmethod
    def _distinct(cls, trackers: list[str]) -> list[str]:
        if len(set(trackers)) < len(trackers):
            raise ValueError("each tracker may be named once")
        return trackers


class Config(BaseModel):
    """All settings of a training run."""

    model_config = SETTINGS

    recipe: Text
    """A recipe's name (`eagle-train recipes` lists them), or the path of a YAML file."""
    target: Text = "smollm2"
    """The frozen model: a bundled name (smollm2, glassllm), a local folder or a hub id."""
    run: str = ""
    """Folder that the run writes; empty = runs/<recipe>."""
    seed: int = Field(default=0, ge=0)
    """Seed of weights, order and sampling."""
    trust_remote_code: bool = False
    """Run Python code that the target's folder or hub repository brings along."""
    data: DataConfig = DataConfig()
    draft: DraftConfig = DraftConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    track: TrackConfig = TrackConfig()

    @model_validator(mode="after")
    def _all_applies(self) -> Config:
        wrong = misfits(self.flat(), self.algorithm.name)
        if self.algorithm.name == "eagle3" and SMOOTH_L1 in dict(loss_terms(self.algorithm.loss)):
            wrong.append(f"algorithm.loss: {SMOOTH_L1} compares states, which an EAGLE-3 head does not predict")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def flat(self) -> dict[str, Any]:
        """Dotted key → value."""
        out: dict[str, Any] = {}
        for key, value in self:
            out |= {f"{key}.{k}": v for k, v in value} if isinstance(value, BaseModel) else {key: value}
        return out

    @property
    def run_dir(self) -> Path:
        """`run`, or runs/<recipe> where it is empty."""
        return Path(self.run).expanduser() if self.run else Path("runs") / Path(self.recipe).stem
