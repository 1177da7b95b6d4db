"""Row counts that repeat. On a CPU oneDNN compiles a kernel for every new matrix shape (10 to 20 ms each, and its cache
is small): packs of ever-changing length spent half of their time in that compiler. Padded rows are computed, then
dropped.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

MULTIPLE = 64


def rounded(n: int) -> int:
    """The next multiple of `MULTIPLE` from n on."""
    return -(-n // MULTIPLE) * MULTIPLE


def pad_rows(x: Tensor) -> Tensor:
    """x [R, …] with zero rows added up to the next multiple."""
    missing = rounded(x.shape[0]) - x.shape[0]
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
