"""Which settings an algorithm and its head can follow: one that would change nothing is refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Built-in algorithm → the head that it teaches.
ALGORITHMS = {"eagle": "eagle", "hass": "eagle", "eagle3": "eagle3"}

_EAGLE_HEAD: dict[str, tuple[Any, str]] = {
    "draft.vocab_size": (0, "it ends in the target's lm_head, so it has the full vocabulary"),
    "draft.layer_ids": (None, "it reads the target's last state, no streams"),
    "draft.norm_before_residual": (False, "its first layer has no norm on its input"),
    "draft.fc_norm": (False, "it reads the target's last state, which is normed already"),
    "draft.norm_output": (False, "it has no norm after its last layer"),
}
_EAGLE3_HEAD: dict[str, tuple[Any, str]] = {
    "draft.fc_bias": (False, "no engine's EAGLE-3 class has a bias there"),
}
HEADS = {"eagle": _EAGLE_HEAD, "eagle3": _EAGLE3_HEAD}
_OWN: dict[str, dict[str, tuple[Any, str]]] = {
    "eagle": {"algorithm.depths": (1, "it trains one depth; hass trains more with the same head")},
    "eagle3": {
        "algorithm.noise": (0.0, "noise is for heads that learn from true states alone"),
        "algorithm.noise_length": (0, "noise is for heads that learn from true states alone"),
    },
}


def head_misfits(values: Mapping[str, Any], head: str) -> list[str]:
    """The settings (dotted key → value) that a head of this kind cannot follow, with what each must be, and why."""
    return _misfits(values, HEADS[head], f"an {'EAGLE-1' if head == 'eagle' else 'EAGLE-3'} head")


def misfits(values: Mapping[str, Any], algorithm: str) -> list[str]:
    """The same for a built-in algorithm and its head; nothing for one of the user's, which says so itself."""
    if algorithm not in ALGORITHMS:
        return []
    own = _misfits(values, _OWN.get(algorithm, {}), f"algorithm {algorithm}")
    return own + head_misfits(values, ALGORITHMS[algorithm])


def _misfits(values: Mapping[str, Any], needs: Mapping[str, tuple[Any, str]], whose: str) -> list[str]:
    wrong = [(key, need, why) for key, (need, why) in needs.items() if values[key] != need]
    return [f"{key} must be {_text(need)} for {whose} ({why}), not {_text(values[key])}" for key, need, why in wrong]


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
