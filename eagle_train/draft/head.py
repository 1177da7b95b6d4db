"""What every draft head can do: the one interface of training, evaluation, decoding and files.

N rows, H the head's width, Ht the target's, S the width of what a head reads, V and Vd vocabularies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from eagle_train.draft.layers import Attend
from eagle_train.draft.vocab import DraftVocab


class Tables(Protocol):
    """What a head borrows from its target: the raw embedding table [V, Ht] and lm_head's weight [V, Ht]."""

    @property
    def embedding(self) -> Tensor: ...
    @property
    def head_weight(self) -> Tensor: ...


class States(Protocol):
    """What the target knew at N positions: `streams` [N, A·Ht] of A layers, `last` [N, Ht] after the final norm."""

    @property
    def streams(self) -> Tensor: ...
    @property
    def last(self) -> Tensor: ...


class AnyHeadConfig(Protocol):
    """What others ask of a head's configuration; `layer_ids` is empty for a head that reads no streams."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def target_hidden_size(self) -> int: ...
    @property
    def layer_ids(self) -> tuple[int, ...]: ...


H = TypeVar("H", bound="DraftHead")


class DraftHead(Protocol):
    """A head is a module whose parameters are what is trained and saved; what it borrows is neither.

    method: what the engines call its kind; owns_lm_head: whether its output head is among its own tensors.
    """

    method: ClassVar[str]
    owns_lm_head: ClassVar[bool]

    @property
    def config(self) -> AnyHeadConfig: ...
    @property
    def vocab(self) -> DraftVocab:
        """The map between draft ids and target ids."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the head's own tensors."""
        ...

    @property
    def output_weight(self) -> Tensor:
        """[Vd, H]: `logits` is `output` times this."""
        ...

    def attach(self, target: Tables) -> None:
        """Borrow the target's tables: shared, frozen, never saved. A head takes only those it needs."""
        ...

    def reads(self, states: States) -> Tensor:
        """The part of the target's states that this kind of head reads [N, S]."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [N] → [N, H], in the head's dtype."""
        ...

    def project(self, states: Tensor) -> Tensor:
        """What `reads` gave [N, S] → depth-0 states [N, H]."""
        ...

    def step(self, emb: Tensor, state: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """One draft step for N rows: emb and state [N, H], positions [N] → the layers' output [N, H].

        The one step of training and of serving; `attend` says which keys a row sees and keeps the new ones. With
        `rows` [R], places among the N: the output of those alone [R, H]; the last layer's other rows give keys only.
        """
        ...

    def feedback(self, hidden: Tensor) -> Tensor:
        """`step`'s output [N, H] → what a row's next depth takes as its state [N, H]."""
        ...

    def output(self, hidden: Tensor) -> Tensor:
        """`step`'s output [N, H] → what the output head reads [N, H]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """`step`'s output [N, H] → logits on the draft vocabulary [N, Vd]."""
        ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids → target ids (any shape)."""
        ...

    # What `nn.Module` brings along.
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> Any: ...
    def to(self: H, *args: Any) -> H: ...
