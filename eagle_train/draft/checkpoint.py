"""A head as files: `config.json` and `model.safetensors` in the plain form of its kind (`draft/forms.py`).

Written whole or not at all; completeness is checked both ways (vLLM drops an unexpected bias and leaves a missing
tensor uninitialised, both in silence).
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

from eagle_train.draft.eagle import EagleConfig
from eagle_train.draft.forms import MAPS, config_dict, disk_name, new_head, parse_config, zero_biases
from eagle_train.draft.head import AnyHeadConfig, DraftHead
from eagle_train.draft.layers import HeadConfig
from eagle_train.draft.vocab import DraftVocab
from eagle_train.errors import UserError

AGAIN = "export it again, or take an older checkpoint"


def tensors(head: DraftHead, dtype: torch.dtype) -> dict[str, Tensor]:
    """The head's tensors under their names on disk; both maps are left out for a full vocabulary (vLLM raises)."""
    out, config = {}, _config(head)
    for name, value in head.state_dict().items():
        if name in MAPS:
            if not head.vocab.is_full:
                out[name] = value.cpu().contiguous()
            continue
        out[disk_name(config, name)] = value.detach().to("cpu", dtype).contiguous()
    return out | zero_biases(config, dtype)


def _config(head: DraftHead) -> HeadConfig | EagleConfig:
    """Its configuration, of one of the kinds that have a form."""
    assert isinstance(head.config, (HeadConfig, EagleConfig)), type(head.config)
    return head.config


def write_head(
    folder: Path, head: DraftHead, *, dtype: torch.dtype = torch.float32, extra: dict[str, Any] | None = None
) -> None:
    """Write `folder` whole or not at all (a temporary folder beside it, then a rename).

    Raises:
        UserError: `folder` exists, or the head has q/k norms, which the Llama class cannot hold.
    """
    config = _config(head)
    if config.qk_norm:
        raise UserError("a head with q/k norms cannot be written in the Llama form that this version exports")
    if folder.exists():
        raise UserError(f"{folder} exists; nothing was written.", hint="give another folder, or move that one away")
    folder.parent.mkdir(parents=True, exist_ok=True)
    tmp = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        save_file(tensors(head, dtype), tmp / "model.safetensors", metadata={"format": "pt"})
        (tmp / "config.json").write_text(json.dumps(config_dict(config, dtype) | (extra or {}), indent=2) + "\n")
        for path in [tmp, *tmp.iterdir()]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.replace(tmp, folder)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def read_head(folder: str | Path) -> DraftHead:
    """Load a head, every tensor accounted for, in the dtype it is stored in. Its target is still to be attached.

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
    head = new_head(config, vocab)
    state, faults = head.state_dict(), []
    expected = {disk_name(config, k): k for k in state if k not in MAPS}
    given = {k: v for k, v in loaded.items() if k not in MAPS}
    for name in zero_biases(config, torch.float32):
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
    maps = {"d2t": vocab.d2t, "t2d": vocab.t2d}
    head.load_state_dict({expected[k]: v for k, v in given.items()} | {k: maps[k] for k in MAPS if k in state})
    return head


def _read_vocab(config: AnyHeadConfig, loaded: dict[str, Tensor], where: str) -> DraftVocab:
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
