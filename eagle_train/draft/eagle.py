"""The EAGLE-1 head: the target's last state and the next embedding → one draft layer → the target's own lm_head.

Row i at depth k takes the embedding of token i+1+k and a state, stands at position i+k, and predicts the target's last
state at i+1+k, which the target's lm_head turns into token i+2+k. At depth 0 the state is the target's last state at i
(after its final norm); deeper, it is what the row's step before gave. The first layer has no norm before its attention
and nothing is normed after the last: the head predicts a state that was normed already.
Source: EAGLE (arXiv 2401.15077), its released code, and the class that serves it in vLLM (`EagleLlamaForCausalLM`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_train.draft.head import States, Tables
from eagle_train.draft.layers import Attend, PlainLayer, Rotary
from eagle_train.draft.vocab import DraftVocab


@dataclass(frozen=True)
class EagleConfig:
    """Everything that fixes an EAGLE-1 head's tensors and its arithmetic.

    Widths in elements. The head is as wide as its target and has the target's full vocabulary, for it ends in the
    target's lm_head. `rope` and `max_position_embeddings` as in `HeadConfig`; `fc_bias`: whether `fc` has a bias, as
    the released heads do (vLLM's class has none).
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    num_layers: int = 1
    qkv_bias: bool = False
    qk_norm: bool = False
    fc_bias: bool = False

    @property
    def draft_vocab_size(self) -> int:
        """V."""
        return self.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """H."""
        return self.hidden_size

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """None: the head reads no streams."""
        return ()


class EagleHead(nn.Module):
    """Tensors named as vLLM's plain form names them (`fc`, `layers.N.*`); the embedding's half of `fc` comes first.

    Embedding and lm_head belong to the target: `attach` borrows them; they are neither trained nor saved. `DraftHead`
    says what each method is for.
    """

    method: ClassVar[str] = "eagle"
    owns_lm_head: ClassVar[bool] = False

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(PlainLayer(config, i, input_norm=i > 0) for i in range(config.num_layers))
        self.rotary = Rotary(config)
        self._embedding: Tensor | None = None
        self._lm_head: Tensor | None = None

    @property
    def vocab(self) -> DraftVocab:
        """The target's own, whole."""
        return DraftVocab.full(self.config.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """Of the head's own tensors."""
        return self.fc.weight.dtype

    @property
    def output_weight(self) -> Tensor:
        """The target's lm_head [V, H], without gradient."""
        assert self._lm_head is not None, "attach was not called"
        return self._lm_head

    def attach(self, target: Tables) -> None:
        """Use the target's embedding table and lm_head, both [V, H] (shared, frozen).

        Raises:
            AssertionError: tables of another vocabulary or width.
        """
        for table in (target.embedding, target.head_weight):
            assert table.shape == (self.config.vocab_size, self.config.hidden_size), (table.shape, self.config)
        self._embedding, self._lm_head = target.embedding.detach(), target.head_weight.detach()

    def reads(self, states: States) -> Tensor:
        """The last state [N, H]."""
        return states.last

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [N] → [N, H], in the head's dtype."""
        assert self._embedding is not None, "attach was not called"
        return F.embedding(ids, self._embedding).to(self.dtype)

    def project(self, states: Tensor) -> Tensor:
        """The target's last states [N, H], as they are: `fc` reads them together with the embedding."""
        return states.to(self.dtype)

    def step(self, emb: Tensor, state: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """One draft step for N rows: emb and state [N, H], positions [N] → predicted last states, of `rows` alone."""
        cos, sin = self.rotary(positions, emb)
        x = self.fc(torch.cat((emb, state), dim=-1))
        for index, layer in enumerate(self.layers, 1):
            x = layer(x, cos, sin, attend, rows if index == len(self.layers) else None)
        return x

    def feedback(self, hidden: Tensor) -> Tensor:
        """The predicted state itself."""
        return hidden

    def output(self, hidden: Tensor) -> Tensor:
        """The predicted state itself."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """`step`'s output [N, H] → the target's lm_head of it [N, V]."""
        return F.linear(hidden, self.output_weight.to(hidden.dtype))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The same ids."""
        return draft_ids
