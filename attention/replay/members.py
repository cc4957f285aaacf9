"""One member of a batch, as its numbers are stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Member:
    """One member's inputs as they are stored: q [q_len, H, D], k and v [kv_len, G, D], mask [q_len, kv_len]."""

    q_QHD: torch.Tensor
    k_LGD: torch.Tensor
    v_LGD: torch.Tensor
    mask_QL: torch.Tensor | None = None
