"""Where each model family keeps what a draft needs. A new family is one row.

`layers`, `norm`, `embedding`, `lm_head` are attribute paths from the causal LM. No family here changes its logits
after lm_head; `Target.verify_head` refuses one that does.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle_train.errors import UserError


@dataclass(frozen=True)
class Family:
    """Attribute paths of one model family (`model_type`)."""

    base: str = "model"
    layers: str = "model.layers"
    norm: str = "model.norm"
    embedding: str = "model.embed_tokens"
    lm_head: str = "lm_head"


FAMILIES = {"llama": Family(), "qwen2": Family(), "qwen3": Family()}


def family_of(model_type: str) -> Family:
    """The row of `model_type`.

    Raises:
        UserError: a family that is not in the table.
    """
    if model_type not in FAMILIES:
        raise UserError(
            f"target of model_type {model_type!r} is not supported yet; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's streams: after 2, n//2 and n−3 layers. The three differ only for n ≥ 7.

    Raises:
        UserError: a shallower target.
    """
    ids = (2, num_layers // 2, num_layers - 3)
    if num_layers < 7:
        example = ",".join(map(str, range(max(num_layers - 3, 0), num_layers)))
        raise UserError(
            f"a target of {num_layers} layers is too shallow for the default streams (2, n//2, n−3).",
            hint=f"give draft.layer_ids yourself, ascending, each within 0…{num_layers}, e.g. [{example}]",
        )
    return ids


def check_layer_ids(ids: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """`ids` if they ascend and lie within 0…num_layers; none at all means that no stream is captured.

    Raises:
        UserError: out of range, repeated or unsorted.
    """
    if list(ids) != sorted(set(ids)) or any(not 0 <= k <= num_layers for k in ids):
        raise UserError(
            f"draft.layer_ids={list(ids)} must ascend without repeats, each within 0…{num_layers} "
            f"(id k = the residual stream after k layers; 0 = embeddings, {num_layers} = before the final norm)"
        )
    return ids
