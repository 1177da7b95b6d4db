"""The plain forms of both kinds of head as vLLM, vllm-ascend and SGLang load them: `config.json` and tensor names.

Rules and their sources are in docs/checkpoints.md. In short: EAGLE-3 is `LlamaForCausalLMEagle3`, EAGLE-1
`LlamaForCausalLM`; tensors without a `model.` prefix, `d2t` as offsets, layer ids at the top level, every flag spelled
out, one spelling for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle_train.draft.eagle import EagleConfig, EagleHead
from eagle_train.draft.eagle3 import Eagle3Head
from eagle_train.draft.head import DraftHead
from eagle_train.draft.layers import HeadConfig
from eagle_train.draft.vocab import DraftVocab
from eagle_train.errors import UserError

EAGLE3, EAGLE = "LlamaForCausalLMEagle3", "LlamaForCausalLM"
FC_BIAS = "eagle_fc_bias"  # not `bias`: that is the released heads' word, and other readers may act on it
MAPS = ("d2t", "t2d")


def architecture(head: DraftHead) -> str:
    """What `architectures` says of this kind of head."""
    return EAGLE if isinstance(head, EagleHead) else EAGLE3


def config_dict(config: HeadConfig | EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` of the plain form."""
    own = _eagle_keys(config) if isinstance(config, EagleConfig) else _eagle3_keys(config)
    out: dict[str, Any] = {
        "architectures": [EAGLE if isinstance(config, EagleConfig) else EAGLE3],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.get("rope_theta", 10000.0),
        "rope_parameters": dict(config.rope),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if config.rope.get("rope_type", "default") != "default":
        out["rope_scaling"] = {k: v for k, v in config.rope.items() if k != "rope_theta"}
    return out | own


def _eagle3_keys(config: HeadConfig) -> dict[str, Any]:
    out: dict[str, Any] = {
        "attention_bias": config.qkv_bias,
        "eagle_aux_hidden_state_layer_ids": list(config.layer_ids),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    if config.target_hidden_size != config.hidden_size:
        out["target_hidden_size"] = config.target_hidden_size
    if len(config.layer_ids) != 3:
        out["num_aux_hidden_states"] = len(config.layer_ids)
    return out


def _eagle_keys(config: EagleConfig) -> dict[str, Any]:
    """vLLM's Llama reads `qkv_bias` for q, k and v; `attention_bias` would also make one for o."""
    return {"qkv_bias": config.qkv_bias, FC_BIAS: config.fc_bias}


def parse_config(raw: dict[str, Any], where: str) -> HeadConfig | EagleConfig:
    """`config.json` → the configuration of either kind.

    Raises:
        UserError: another architecture, or a key that is missing.
    """
    kinds = raw.get("architectures") or []
    if EAGLE3 not in kinds and not (EAGLE in kinds and FC_BIAS in raw):
        raise UserError(
            f"{where}: architectures is {raw.get('architectures')}, expected [{EAGLE3!r}], or [{EAGLE!r}] with the key "
            f"{FC_BIAS}",
            hint="only heads in the plain form that this project writes are read so far",
        )
    if raw.get("norm_before_fc"):
        raise UserError(f"{where}: norm_before_fc heads are not supported yet")
    try:
        return _eagle3_config(raw) if EAGLE3 in kinds else _eagle_config(raw)
    except KeyError as e:
        raise UserError(f"{where}: key {e} is missing") from e


def _shape(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_attention_heads": raw["num_attention_heads"],
        "num_key_value_heads": raw["num_key_value_heads"],
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        "vocab_size": raw["vocab_size"],
        "rms_norm_eps": raw["rms_norm_eps"],
        "max_position_embeddings": raw["max_position_embeddings"],
        "rope": raw.get("rope_parameters") or {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10000.0)},
        "num_layers": raw["num_hidden_layers"],
    }


def _eagle3_config(raw: dict[str, Any]) -> HeadConfig:
    return HeadConfig(
        **_shape(raw),
        draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
        target_hidden_size=raw.get("target_hidden_size") or raw["hidden_size"],
        layer_ids=tuple(raw["eagle_aux_hidden_state_layer_ids"]),
        qkv_bias=raw.get("attention_bias", False),
        norm_before_residual=raw.get("norm_before_residual", False),
        fc_norm=raw.get("fc_norm", False),
        norm_output=raw.get("norm_output", False),
    )


def _eagle_config(raw: dict[str, Any]) -> EagleConfig:
    return EagleConfig(**_shape(raw), qkv_bias=raw.get("qkv_bias", False), fc_bias=raw[FC_BIAS])


def new_head(config: HeadConfig | EagleConfig, vocab: DraftVocab) -> DraftHead:
    """A head to load tensors into."""
    return EagleHead(config) if isinstance(config, EagleConfig) else Eagle3Head(config, vocab)


def zero_biases(config: HeadConfig | EagleConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Zeros for `o_proj.bias`: with `attention_bias` vLLM's Llama class makes one beside those of q, k and v."""
    if not config.qkv_bias or isinstance(config, EagleConfig):
        return {}
    layers = ["midlayer", *(f"layers.{i}" for i in range(1, config.num_layers))]
    return {f"{layer}.self_attn.o_proj.bias": torch.zeros(config.hidden_size, dtype=dtype) for layer in layers}


def disk_name(config: HeadConfig | EagleConfig, name: str) -> str:
    """EAGLE-3: our `layers.0` is the second layer; on disk the first one is `midlayer`, the others count from 1."""
    if isinstance(config, HeadConfig) and name.startswith("layers."):
        _, index, rest = name.split(".", 2)
        return f"layers.{int(index) + 1}.{rest}"
    return name
