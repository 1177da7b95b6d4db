"""The frozen target: a Hugging Face causal LM, its streams, its last state, its head.

T tokens, H the target's width, A streams, V vocabulary. Everything here runs without gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from eagle_train.device.shapes import rounded
from eagle_train.errors import UserError
from eagle_train.targets.families import Family, check_layer_ids, default_layer_ids, family_of


@dataclass(frozen=True)
class Features:
    """What the target knew at each position of one conversation, in the target's dtype and on its device.

    `streams` [T, A·H]: the residual streams at the chosen layers, ascending, concatenated, before the final norm.
    `last` [T, H]: after the final norm, so that `head(last)` are the logits.
    """

    streams: Tensor
    last: Tensor


class Target:
    """A loaded, frozen target. `layer_ids` in this project's numbering: id k = the stream after k layers; () = none."""

    def __init__(self, model: Any, tokenizer: Any, layer_ids: Sequence[int] | None, path: str) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config: Any = model.config
        self.path = path
        self.family: Family = family_of(self.config.model_type)
        self.num_layers: int = self.config.num_hidden_layers
        ids = tuple(layer_ids) if layer_ids is not None else default_layer_ids(self.num_layers)
        self.layer_ids = check_layer_ids(ids, self.num_layers)
        self.base: Any = model.get_submodule(self.family.base)
        parameters = inspect.signature(self.base.forward).parameters
        # transformers renamed `past_key_values` to `cache` in 5.24; both stay supported.
        self.cache_keyword = "cache" if "cache" in parameters else "past_key_values"

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        layer_ids: Sequence[int] | None = None,
        trust_remote_code: bool = False,
    ) -> Target:
        """Load from a folder or a hub id (already resolved: see `assets.resolve_target`).

        Raises:
            UserError: it cannot be found or read, a tensor is missing, its family is unknown, or the layer ids do not
                fit it.
        """
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            family_of(config.model_type)
            depth = config.num_hidden_layers
            check_layer_ids(default_layer_ids(depth) if layer_ids is None else tuple(layer_ids), depth)
            # With loading info the loader returns a pair, which its annotations do not say.
            pair: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
            )
            model, found = pair
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, SafetensorError) as e:
            lines = str(e).strip().splitlines() or ["no reason given"]
            raise UserError(
                f"cannot load target {path}: {lines[0]}",
                hint="give a local folder with config.json and weights, a hub id that can be reached, or a bundled "
                "name that `eagle-train assets` brings (smollm2, glassllm)",
            ) from e
        lost = sorted({*found["missing_keys"], *(str(key[0]) for key in found["mismatched_keys"])})
        if lost:  # transformers would start these at random and go on
            raise UserError(f"target {path}: its weights lack {', '.join(lost[:8])}{' …' if len(lost) > 8 else ''}")
        return cls(model.to(device), tokenizer, layer_ids, str(path))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def embedding(self) -> Tensor:
        """The raw embedding table [V, H]; no family's multiplier is applied (engines share the raw table)."""
        return self.model.get_submodule(self.family.embedding).weight

    @property
    def head_weight(self) -> Tensor:
        """lm_head's weight [V, H] (the embedding's when tied)."""
        return self.model.get_submodule(self.family.lm_head).weight

    @property
    def norm(self) -> nn.Module:
        """The final norm."""
        return self.model.get_submodule(self.family.norm)

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers."""
        return list(self.model.get_submodule(self.family.layers).children())

    def head(self, last: Tensor) -> Tensor:
        """last [..., H] (after the final norm) → logits [..., V]."""
        return self.model.get_submodule(self.family.lm_head)(last)

    def forward(self, ids: Tensor, cache: Any = None) -> Features:
        """ids [T] of one conversation (following whatever `cache` holds) → its features."""
        streams, last = self._run(ids[None], cache)
        return Features(streams[0], last[0])

    def capture(self, conversations: Sequence[Sequence[int]]) -> list[Features]:
        """Several conversations in one pass, padded on the right: a causal model's earlier positions never see it."""
        width = rounded(max(len(ids) for ids in conversations))
        rows = torch.zeros(len(conversations), width, dtype=torch.int64, device=self.device)
        for row, ids in zip(rows, conversations, strict=True):
            row[: len(ids)] = torch.tensor(ids, device=self.device)
        streams, last = self._run(rows, None)
        return [
            Features(streams[i, : len(ids)].clone(), last[i, : len(ids)].clone()) for i, ids in enumerate(conversations)
        ]

    @torch.no_grad()
    def _run(self, ids: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """ids [B, T] → (streams [B, T, A·H], last [B, T, H])."""
        caught: dict[int, Tensor] = {}
        handles = [self._catch(k, caught) for k in self.layer_ids]
        try:
            options = {self.cache_keyword: cache} if cache is not None else {}
            out = self.base(input_ids=ids, use_cache=cache is not None, **options)
        finally:
            for handle in handles:
                handle.remove()
        last: Tensor = out.last_hidden_state
        streams = [caught[k] for k in self.layer_ids] or [last[..., :0]]
        return torch.cat(streams, dim=-1), last

    def _catch(self, k: int, caught: dict[int, Tensor]) -> Any:
        """A hook that stores stream k [1, T, H]: the output of layer k−1, or what enters the first one."""

        def output(_module: nn.Module, _args: Any, out: Any) -> None:
            caught[k] = out[0] if isinstance(out, tuple) else out

        def entry(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            caught[k] = args[0] if args else kwargs["hidden_states"]

        if k == 0:
            return self.layers[0].register_forward_pre_hook(entry, with_kwargs=True)
        return self.layers[k - 1].register_forward_hook(output)

    @torch.no_grad()
    def verify_head(self, ids: Sequence[int] = (1, 2, 3, 5, 8, 13)) -> float:
        """Check `head(last) == logits` on a probe; returns the largest difference relative to the largest logit.

        Raises:
            UserError: they differ: this family does something to its output that the family table does not know.
        """
        probe = torch.tensor([i % self.config.vocab_size for i in ids], device=self.device)
        ours = self.head(self.forward(probe).last).float()
        theirs = self.model(input_ids=probe[None]).logits[0].float()
        gap = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        if not gap <= 1e-3:
            raise UserError(
                f"head(last) differs from the model's logits by {gap:.2g} (relative) for {self.path}: its family "
                f"({self.config.model_type}) changes its output in a way that is not supported"
            )
        return gap
