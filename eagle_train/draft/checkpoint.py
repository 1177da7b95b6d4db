"""A head as files: `config.json` and `model.safetensors` in the plain form that vLLM, vllm-ascend and SGLang load.

Rules and their sources are in docs/checkpoints.md. In short: `LlamaForCausalLMEagle3`, tensors without a `model.`
prefix, `d2t` as offsets, layer ids at the top level, every flag spelled out, completeness checked both ways (vLLM
drops an unexpected bias and leaves a missing tensor uninitialised, both in silence).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_train.draft.eagle3 import Eagle3Head
from eagle_train.draft.layers import HeadConfig
from eagle_train.draft.vocab import DraftVocab
from eagle_train.errors import UserError

ARCHITECTURE = "LlamaForCausalLMEagle3"
AGAIN = "export it again, or take an older checkpoint"


def config_dict(config: HeadConfig, dtype: torch.dtype, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """`config.json` of the plain form; `extra` holds what belongs to the target (token ids)."""
    out: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
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
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": list(config.layer_ids),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    if config.rope.get("rope_type", "default") != "default":
        out["rope_scaling"] = {k: v for k, v in config.rope.items() if k != "rope_theta"}
    if config.target_hidden_size != config.hidden_size:
        out["target_hidden_size"] = config.target_hidden_size
    if len(config.layer_ids) != 3:
        out["num_aux_hidden_states"] = len(config.layer_ids)
    return out | (extra or {})


def tensors(head: Eagle3Head, dtype: torch.dtype) -> dict[str, Tensor]:
    """The head's tensors under their names on disk; both maps are left out for a full vocabulary (vLLM raises)."""
    out = {}
    for name, value in head.state_dict().items():
        if name in ("d2t", "t2d"):
            if not head.vocab.is_full:
                out[name] = value.cpu().contiguous()
            continue
        out[_disk_name(name)] = value.detach().to("cpu", dtype).contiguous()
    return out | _output_biases(head.config, dtype)


def _output_biases(config: HeadConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Zeros for `o_proj.bias`: with `attention_bias` vLLM's Llama class makes one beside those of q, k and v."""
    if not config.qkv_bias:
        return {}
    layers = ["midlayer", *(f"layers.{i}" for i in range(1, config.num_layers))]
    return {f"{layer}.self_attn.o_proj.bias": torch.zeros(config.hidden_size, dtype=dtype) for layer in layers}


def _disk_name(name: str) -> str:
    """Our `layers.0` is the second layer: on disk the first one is `midlayer`, the others count from 1."""
    if name.startswith("layers."):
        _, index, rest = name.split(".", 2)
        return f"layers.{int(index) + 1}.{rest}"
    return name


def write_head(
    folder: Path, head: Eagle3Head, *, dtype: torch.dtype = torch.float32, extra: dict[str, Any] | None = None
) -> None:
    """Write `folder` whole or not at all (a temporary folder beside it, then a rename).

    Raises:
        UserError: `folder` exists, or the head has q/k norms, which the Llama class cannot hold.
    """
    if head.config.qk_norm:
        raise UserError("a head with q/k norms cannot be written in the Llama form that this version exports")
    if folder.exists():
        raise UserError(f"{folder} exists; nothing was written.", hint="give another folder, or move that one away")
    folder.parent.mkdir(parents=True, exist_ok=True)
    tmp = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        save_file(tensors(head, dtype), tmp / "model.safetensors", metadata={"format": "pt"})
        (tmp / "config.json").write_text(json.dumps(config_dict(head.config, dtype, extra), indent=2) + "\n")
        for path in [tmp, *tmp.iterdir()]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.replace(tmp, folder)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def parse_config(raw: dict[str, Any], where: str) -> HeadConfig:
    """`config.json` → `HeadConfig`.

    Raises:
        UserError: another architecture, or a key that is missing.
    """
    if ARCHITECTURE not in raw.get("architectures", []):
        raise UserError(
            f"{where}: architectures is {raw.get('architectures')}, expected [{ARCHITECTURE!r}]",
            hint="only EAGLE-3 heads in vLLM's plain form are read so far",
        )
    if raw.get("norm_before_fc"):
        raise UserError(f"{where}: norm_before_fc heads are not supported yet")
    try:
        return HeadConfig(
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_attention_heads=raw["num_attention_heads"],
            num_key_value_heads=raw["num_key_value_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            vocab_size=raw["vocab_size"],
            draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
            target_hidden_size=raw.get("target_hidden_size") or raw["hidden_size"],
            layer_ids=tuple(raw["eagle_aux_hidden_state_layer_ids"]),
            rms_norm_eps=raw["rms_norm_eps"],
            max_position_embeddings=raw["max_position_embeddings"],
            rope=raw.get("rope_parameters") or {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10000.0)},
            num_layers=raw["num_hidden_layers"],
            qkv_bias=raw.get("attention_bias", False),
            norm_before_residual=raw.get("norm_before_residual", False),
            fc_norm=raw.get("fc_norm", False),
            norm_output=raw.get("norm_output", False),
        )
    except KeyError as e:
        raise UserError(f"{where}: key {e} is missing") from e


def read_head(folder: str | Path) -> Eagle3Head:
    """Load a head, every tensor accounted for, in the dtype it is stored in. Its embedding is still to be attached.

    Raises:
        UserError: files missing or corrupt; a tensor missing, unexpected or of another shape (all are named); target
            ids in `d2t` that do not ascend, leave the vocabulary, or disagree with `t2d`.
    """
    folder = Path(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} is not a head: {name} is missing")
    try:
        raw = json.loads((folder / "config.json").read_text())
        loaded = load_file(folder / "model.safetensors")
    except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as e:
        raise UserError(f"{folder} is damaged: {e}", hint=AGAIN) from e
    if not isinstance(raw, dict):
        raise UserError(f"{folder} is damaged: config.json is not an object", hint=AGAIN)
    config = parse_config(raw, str(folder / "config.json"))
    vocab = _read_vocab(config, loaded, str(folder))
    head = Eagle3Head(config, vocab)
    state, faults = head.state_dict(), []
    expected = {_disk_name(k): k for k in state if k not in ("d2t", "t2d")}
    given = {k: v for k, v in loaded.items() if k not in ("d2t", "t2d")}
    for name in _output_biases(config, torch.float32):
        bias = given.pop(name, None)
        if bias is None or bool(bias.any()):
            faults.append(f"{name} is missing or not zero")
    faults += [f"missing {k}" for k in sorted(expected.keys() - given.keys())]
    faults += [f"unexpected {k}" for k in sorted(given.keys() - expected.keys())]
    for name in sorted(expected.keys() & given.keys()):
        want, got = tuple(state[expected[name]].shape), tuple(given[name].shape)
        if want != got:
            faults.append(f"{name} has shape {list(got)}, its config asks for {list(want)}")
    if faults:
        raise UserError(f"{folder}: the tensors do not fit config.json: " + "; ".join(faults))
    dtypes = {v.dtype for v in given.values()}
    if len(dtypes) != 1:
        raise UserError(f"{folder}: its tensors have several dtypes, {sorted(map(str, dtypes))}; expected one")
    head.to(dtypes.pop())
    head.load_state_dict({expected[k]: v for k, v in given.items()} | {"d2t": vocab.d2t, "t2d": vocab.t2d})
    return head


def _read_vocab(config: HeadConfig, loaded: dict[str, Tensor], where: str) -> DraftVocab:
    if ("d2t" in loaded) != ("t2d" in loaded):
        raise UserError(f"{where}: only one of d2t and t2d is there; both or neither are needed")
    if "d2t" not in loaded:
        if config.draft_vocab_size != config.vocab_size:
            raise UserError(f"{where}: draft_vocab_size {config.draft_vocab_size} needs d2t and t2d; they are missing")
        return DraftVocab.full(config.vocab_size)
    d2t, t2d = loaded["d2t"].to(torch.int64), loaded["t2d"].bool()
    if d2t.shape != (config.draft_vocab_size,) or t2d.shape != (config.vocab_size,):
        raise UserError(
            f"{where}: d2t {list(d2t.shape)} and t2d {list(t2d.shape)} do not fit draft_vocab_size "
            f"{config.draft_vocab_size} and vocab_size {config.vocab_size}"
        )
    ids = torch.arange(len(d2t)) + d2t
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise UserError(f"{where}: the target ids i + d2t[i] must ascend strictly and stay below {config.vocab_size}")
    marked = torch.zeros_like(t2d)
    marked[ids] = True
    if not bool((marked == t2d).all()):
        raise UserError(f"{where}: d2t and t2d disagree on {int((marked != t2d).sum())} tokens")
    return DraftVocab(d2t, t2d)
