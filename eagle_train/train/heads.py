"""A new head of either kind, in its target's shape, with its first weights."""

from __future__ import annotations

from typing import Any

import torch

from eagle_train.config.schema import Config
from eagle_train.draft.eagle import EagleConfig, EagleHead
from eagle_train.draft.eagle3 import Eagle3Head
from eagle_train.draft.head import DraftHead
from eagle_train.draft.initialise import initialise, initialise_eagle
from eagle_train.draft.layers import HeadConfig
from eagle_train.draft.vocab import DraftVocab
from eagle_train.targets.hf import Target


def new_head(kind: str, config: Config, target: Target, vocab: DraftVocab) -> tuple[DraftHead, list[str]]:
    """The head, on the CPU, and the names of what could not be taken from the target."""
    last_layer = target.layers[-1].state_dict() if config.draft.init == "target" else None
    generator = torch.Generator().manual_seed(config.seed)
    norm = target.norm.get_parameter("weight").float()
    if kind == "eagle":
        first = EagleHead(eagle_config(config, target))
        return first, initialise_eagle(first, norm=norm, last_layer=last_layer, generator=generator)
    third = Eagle3Head(head_config(config, target, vocab), vocab)
    fresh = initialise(third, norm=norm, lm_head=target.head_weight.float(), last_layer=last_layer, generator=generator)
    return third, fresh


def _shape(config: Config, target: Target) -> dict[str, Any]:
    """What both kinds take from their target, but for what `draft` changes."""
    theirs = target.config
    heads = theirs.num_attention_heads
    return {
        "hidden_size": theirs.hidden_size,
        "intermediate_size": config.draft.intermediate_size or theirs.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": theirs.num_key_value_heads,
        "head_dim": getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
        "vocab_size": theirs.vocab_size,
        "rms_norm_eps": theirs.rms_norm_eps,
        "max_position_embeddings": theirs.max_position_embeddings,
        "rope": dict(theirs.rope_parameters),
        "num_layers": config.draft.layers,
    }


def eagle_config(config: Config, target: Target) -> EagleConfig:
    """An EAGLE-1 head in the target's own shape."""
    return EagleConfig(**_shape(config, target), fc_bias=config.draft.fc_bias)


def head_config(config: Config, target: Target, vocab: DraftVocab) -> HeadConfig:
    """An EAGLE-3 head in the target's own shape."""
    return HeadConfig(
        **_shape(config, target),
        draft_vocab_size=vocab.size,
        target_hidden_size=target.config.hidden_size,
        layer_ids=target.layer_ids,
        norm_before_residual=config.draft.norm_before_residual,
        fc_norm=config.draft.fc_norm,
        norm_output=config.draft.norm_output,
    )
