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
    """Columns of `tensor_replay`. NaN figures mean that the finite masks differ.

    A row is one (token, head) of the output; an ulp is that of the output's dtype at the exact value.
    """

    finite_mask_equal: bool
    num_finite_differ: int
    first_finite_differ: str | None
    max_abs: float
    mean_abs: float
    rel_l2: float
    worst_row: float  # relative L2 of the worst row
    worst_row_index: int
    worst_row_at: str
    ulp_p50: float
    ulp_p99: float
    ulp_max: float
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


def row_name(row: int, num_heads: int, q_lens: tuple[int, ...]) -> str:
    """`member 1 token 4 head 2` for row `token * num_heads + head` of a packed output of members of those lengths."""
    token, head = divmod(row, num_heads)
    for member, q_len in enumerate(q_lens):
        if token < q_len:
            return f"member {member} token {token} head {head}"
        token -= q_len
    raise ValueError(f"row {row} lies behind the last of {sum(q_lens)} tokens of {num_heads} heads")


def compare(
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor | None,
    truth: Truth,
    dtype: torch.dtype,
    q_lens: tuple[int, ...] | None = None,
) -> Figures:
    """Figures of an output [T, H, D] against its Truth; `q_lens` are those of the members, default one."""
    exact, out, lengths = truth.out_QHD, out_THD.double(), q_lens or (len(truth.out_QHD),)
    differ = torch.isfinite(out) != torch.isfinite(exact)
    if bool(differ.any()):
        return _not_comparable(out, exact, differ, lengths)
    error, half = (out - exact).flatten(0, 1), half_ulp(exact, dtype).flatten(0, 1)
    own = torch.maximum((truth.rounded_QHD - exact).abs().flatten(0, 1), half)
    rows, norms = error.norm(dim=-1), exact.flatten(0, 1).norm(dim=-1)
    relative = rows / norms.clamp_min(torch.finfo(torch.float64).tiny)
    worst = int(relative.argmax())
    spread = float(error.std()) / math.sqrt(error.numel())
    ulps = (error.abs() / (2 * half)).flatten()
    return Figures(
        finite_mask_equal=True,
        num_finite_differ=0,
        first_finite_differ=None,
        max_abs=float(error.abs().max()),
        mean_abs=float(error.abs().mean()),
        rel_l2=float(error.norm() / exact.norm().clamp_min(torch.finfo(torch.float64).tiny)),
        worst_row=float(relative.max()),
        worst_row_index=worst,
        worst_row_at=row_name(worst, exact.shape[1], lengths),
        ulp_p50=_quantile(ulps, 0.5),
        ulp_p99=_quantile(ulps, 0.99),
        ulp_max=float(ulps.max()),
        cosine=float(torch.nn.functional.cosine_similarity(out.flatten(), exact.flatten(), dim=0)),
        bias_z=float(error.mean()) / spread if spread else 0.0,
        lse_max_abs=None if lse_TH is None else _lse_error(lse_TH, truth),
        r_max=float(error.abs().max() / own.max()),
        r_rms=float(error.norm() / own.norm()),
        r_row=float((rows / own.norm(dim=-1)).max()),
    )


def _not_comparable(
    out_THD: torch.Tensor, exact_THD: torch.Tensor, differ_THD: torch.Tensor, q_lens: tuple[int, ...]
) -> Figures:
    """Where the finite masks first differ, and NaN for every figure."""
    token, head, dim = (int(i) for i in differ_THD.nonzero()[0])
    row, nan = token * exact_THD.shape[1] + head, math.nan
    where = row_name(row, exact_THD.shape[1], q_lens)
    found, wanted = (float(t[token, head, dim]) for t in (out_THD, exact_THD))
    return Figures(
        finite_mask_equal=False,
        num_finite_differ=int(differ_THD.sum()),
        first_finite_differ=f"{where} dim {dim}: {found:.6g}, exact {wanted:.6g}",
        max_abs=nan,
        mean_abs=nan,
        rel_l2=nan,
        worst_row=nan,
        worst_row_index=row,
        worst_row_at=where,
        ulp_p50=nan,
        ulp_p99=nan,
        ulp_max=nan,
        cosine=nan,
        bias_z=nan,
        lse_max_abs=None,
        r_max=nan,
        r_rms=nan,
        r_row=nan,
    )


def _quantile(values: torch.Tensor, share: float) -> float:
    """The smallest value that at least `share` of them do not exceed (torch.quantile stops at 16 million numbers)."""
    return float(values.kthvalue(max(1, math.ceil(share * values.numel()))).values)


def _lse_error(lse_TH: torch.Tensor, truth: Truth) -> float:
    """Largest LSE error over the rows that see a key; NaN stays NaN."""
    seen = torch.isfinite(truth.lse_QH)
    return float((lse_TH.double() - truth.lse_QH)[seen].abs().max()) if bool(seen.any()) else 0.0
