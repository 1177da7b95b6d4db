"""The EAGLE-3 head: three streams of the target → one state → one draft layer → logits on the draft vocabulary.

Row i at depth k takes the embedding of token i+1+k and a state, stands at position i+k, and predicts token i+2+k.
At depth 0 the state is `project(streams of position i)`; deeper, it is what the row's step before fed back.
Source: EAGLE-3 (arXiv 2503.01840) and the class that serves it in vLLM (`LlamaForCausalLMEagle3`).
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_train.draft.head import States, Tables
from eagle_train.draft.layers import Attend, FirstLayer, HeadConfig, PlainLayer, RMSNorm, Rotary
from eagle_train.draft.vocab import DraftVocab


class Eagle3Head(nn.Module):
    """Tensors named as vLLM's plain form names them (CHECKPOINTS: `midlayer.*`, `fc`, `norm`, `lm_head`, `d2t`, `t2d`).

    The embedding belongs to the target: `attach` borrows it; it is neither trained nor saved. `DraftHead` says what
    each method is for.
    """

    method: ClassVar[str] = "eagle3"
    owns_lm_head: ClassVar[bool] = True

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig, vocab: DraftVocab) -> None:
        super().__init__()
        assert vocab.t2d.shape[0] == config.vocab_size, (vocab.t2d.shape, config.vocab_size)
        assert vocab.d2t.shape[0] == config.draft_vocab_size, (vocab.d2t.shape, config.draft_vocab_size)
        self.config = config
        width, streams = config.target_hidden_size, len(config.layer_ids)
        self.fc = nn.Linear(streams * width, config.hidden_size, bias=False)
        norms = [RMSNorm(width, config.rms_norm_eps) for _ in range(streams)] if config.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self.midlayer = FirstLayer(config)
        self.layers = nn.ModuleList(PlainLayer(config, i) for i in range(1, config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config)
        self.register_buffer("d2t", vocab.d2t.clone())
        self.register_buffer("t2d", vocab.t2d.clone())
        self._embedding: Tensor | None = None

    @property
    def vocab(self) -> DraftVocab:
        """The map between draft ids and target ids."""
        return DraftVocab(self.d2t.cpu(), self.t2d.cpu())

    @property
    def dtype(self) -> torch.dtype:
        """Of the head's own tensors."""
        return self.fc.weight.dtype

    @property
    def output_weight(self) -> Tensor:
        """lm_head's weight [Vd, H]."""
        return self.lm_head.weight

    def attach(self, target: Tables) -> None:
        """Use the target's raw embedding table [V, H] (shared, frozen).

        Raises:
            AssertionError: a table of another vocabulary or width.
        """
        table = target.embedding
        assert table.shape == (self.config.vocab_size, self.config.hidden_size), (table.shape, self.config)
        self._embedding = table.detach()

    def reads(self, states: States) -> Tensor:
        """The streams [N, A·Ht]."""
        return states.streams

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [N] → [N, H], in the head's dtype."""
        assert self._embedding is not None, "attach was not called"
        return F.embedding(ids, self._embedding).to(self.dtype)

    def project(self, states: Tensor) -> Tensor:
        """The target's streams [N, A·Ht] → depth-0 states [N, H]."""
        streams = states.to(self.dtype)
        if self.config.fc_norm:
            parts = streams.split(self.config.target_hidden_size, dim=-1)
            streams = torch.cat([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(streams)

    def step(self, emb: Tensor, state: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """One draft step for N rows: emb and state [N, H], positions [N] → the layers' output [N, H], before `norm`.

        The one step of training and of serving; `attend` says which keys a row sees and keeps the new ones. With
        `rows` [R], places among the N: the output of those alone [R, H]; the last layer's other rows give keys only.
        """
        cos, sin = self.rotary(positions, emb)
        deepest = len(self.layers)
        x = self.midlayer(emb, state, cos, sin, attend, rows if deepest == 0 else None)
        for index, layer in enumerate(self.layers, 1):
            x = layer(x, cos, sin, attend, rows if index == deepest else None)
        return x

    def feedback(self, hidden: Tensor) -> Tensor:
        """What a row's next depth takes as its state [N, H]: `hidden` itself, or its norm with `norm_output`."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def output(self, hidden: Tensor) -> Tensor:
        """`step`'s output [N, H] → its norm [N, H]."""
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """`step`'s output [N, H] → logits [N, Vd] on the draft vocabulary."""
        return self.lm_head(self.norm(hidden))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids → target ids (any shape)."""
        return draft_ids + self.d2t[draft_ids]
