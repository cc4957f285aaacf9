"""Figures of one attention output against the oracle.

The ratios divide the backend's error by the error that its dtype class itself makes (see
`attention.backends.oracle`), floored at half an ulp of the output. They read the same at every
shape: about 1 for a sound kernel, while absolute errors fall with 1/sqrt(kv_len).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attention.backends.oracle import Truth


@dataclass(frozen=True)
class Figures:
    """Columns of `tensor_replay`. NaN figures mean that the finite masks differ."""

    finite_mask_equal: bool
    max_abs: float
    mean_abs: float
    rel_l2: float
    worst_row: float  # relative L2 of the worst (token, head) row
    worst_row_index: int
    cosine: float
    bias_z: float  # mean signed error over its standard error
    lse_max_abs: float | None
    r_max: float
    r_rms: float
    r_row: float

    def row(self) -> dict[str, Any]:
        return asdict(self)


def half_ulp(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the spacing of `dtype` at each value, subnormals included (float64 in, float64 out)."""
    info = torch.finfo(dtype)
    magnitude = exact.abs().clamp_min(info.tiny)
    return torch.exp2(torch.floor(torch.log2(magnitude))) * (info.eps / 2)


def compare(out_THD: torch.Tensor, lse_TH: torch.Tensor | None, truth: Truth, dtype: torch.dtype) -> Figures:
    """Figures of an output [T, H, D] against its Truth."""
    exact, out = truth.out_QHD, out_THD.double()
    finite = torch.isfinite(out)
    if not bool(torch.equal(finite, torch.isfinite(exact))):
        row = int((~finite).flatten(0, 1).any(-1).nonzero()[0]) if bool((~finite).any()) else -1
        nan = math.nan
        return Figures(False, nan, nan, nan, nan, row, nan, nan, None, nan, nan, nan)
    error = (out - exact).flatten(0, 1)
    own = torch.maximum((truth.rounded_QHD - exact).abs(), half_ulp(exact, dtype)).flatten(0, 1)
    rows, norms = error.norm(dim=-1), exact.flatten(0, 1).norm(dim=-1)
    relative = rows / norms.clamp_min(torch.finfo(torch.float64).tiny)
    spread = float(error.std()) / math.sqrt(error.numel())
    lse_error = None
    if lse_TH is not None:
        both = torch.isfinite(truth.lse_QH)
        lse_error = float((lse_TH.double() - truth.lse_QH)[both].abs().max()) if bool(both.any()) else 0.0
    return Figures(
        finite_mask_equal=True,
        max_abs=float(error.abs().max()),
        mean_abs=float(error.abs().mean()),
        rel_l2=float(error.norm() / exact.norm().clamp_min(torch.finfo(torch.float64).tiny)),
        worst_row=float(relative.max()),
        worst_row_index=int(relative.argmax()),
        cosine=float(torch.nn.functional.cosine_similarity(out.flatten(), exact.flatten(), dim=0)),
        bias_z=float(error.mean()) / spread if spread else 0.0,
        lse_max_abs=lse_error,
        r_max=float(error.abs().max() / own.max()),
        r_rms=float(error.norm() / own.norm()),
        r_row=float((rows / own.norm(dim=-1)).max()),
    )
