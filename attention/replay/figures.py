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

_TINY = torch.finfo(torch.float64).tiny


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
    return measure(out_THD, lse_TH, truth, dtype, q_lens).fetch()


@dataclass(frozen=True)
class Measured:
    """Figures that lie on the output's device, so that a GPU goes on while nobody needs them."""

    values: torch.Tensor  # float64, in the order of _MEASURED
    has_lse: bool
    shape_THD: tuple[int, int, int]
    q_lens: tuple[int, ...]

    def fetch(self) -> Figures:
        """One copy to the host, which waits for the device."""
        found = dict(zip(_MEASURED, self.values.tolist(), strict=True))
        num, first, was, exact = (found.pop(name) for name in _DIFFERENCE)
        where, worst = None, int(found.pop("worst_row_index"))
        _, heads, dims = self.shape_THD
        if num:
            worst = int(first) // dims
            at = row_name(worst, heads, self.q_lens)
            where = f"{at} dim {int(first) % dims}: {was:.6g}, exact {exact:.6g}"
            found = dict.fromkeys(found, math.nan)
        lse_max_abs = found.pop("lse_max_abs")
        return Figures(
            finite_mask_equal=not num,
            num_finite_differ=int(num),
            first_finite_differ=where,
            worst_row_index=worst,
            worst_row_at=row_name(worst, heads, self.q_lens),
            lse_max_abs=lse_max_abs if self.has_lse and not num else None,
            **found,
        )


_DIFFERENCE = ("num_finite_differ", "first_index", "first_out", "first_exact")
_MEASURED = (
    *_DIFFERENCE,
    "worst_row_index",
    "lse_max_abs",
    *("max_abs", "mean_abs", "rel_l2", "worst_row", "ulp_p50", "ulp_p99", "ulp_max", "cosine", "bias_z"),
    *("r_max", "r_rms", "r_row"),
)


def measure(
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor | None,
    truth: Truth,
    dtype: torch.dtype,
    q_lens: tuple[int, ...] | None = None,
) -> Measured:
    """As `compare`, without waiting for the device."""
    tokens, heads, dims = truth.out_QHD.shape
    exact, out = truth.out_QHD.flatten(0, 1), out_THD.double().flatten(0, 1)
    differ = (_finite(out) != _finite(exact)).flatten()
    first = differ.view(torch.uint8).argmax()
    error, half = out - exact, half_ulp(exact, dtype)
    norm, error_norm = exact.norm(), error.norm()
    own = torch.maximum((truth.rounded_QHD.flatten(0, 1) - exact).abs(), half)
    size, rows = error.abs(), error.norm(dim=-1)
    largest, relative = size.max(), rows / exact.norm(dim=-1).clamp_min(_TINY)
    worst = relative.max(dim=0)
    spread = error.std() / math.sqrt(error.numel())
    halves = (size / half).flatten()  # of an ulp
    found = (
        differ.sum(),
        first,
        out.take(first),
        exact.take(first),
        worst.indices,
        halves.new_zeros(()) if lse_TH is None else _lse_error(lse_TH, truth),
        largest,
        size.mean(),
        error_norm / norm.clamp_min(_TINY),
        worst.values,
        *(torch.stack([*_quantiles(halves, 0.5, 0.99), halves.max()]) / 2),
        torch.dot(out.flatten(), exact.flatten()) / (out.norm() * norm).clamp_min(_TINY),
        torch.where(spread == 0, 0.0, error.mean() / spread),
        largest / own.max(),
        error_norm / own.norm(),
        (rows / own.norm(dim=-1)).max(),
    )
    values = torch.stack([one.double() for one in found])
    return Measured(values, lse_TH is not None, (tokens, heads, dims), q_lens or (tokens,))


def _finite(values: torch.Tensor) -> torch.Tensor:
    """`isfinite` in half its passes."""
    return values.abs() < math.inf


def _quantiles(values: torch.Tensor, *shares: float) -> list[torch.Tensor]:
    """For each share the smallest value that at least so many do not exceed (torch.quantile stops at 16 million)."""
    ranks = [max(1, math.ceil(share * values.numel())) for share in shares]
    if values.is_cuda:  # kthvalue is one block's work there
        ordered = values.sort().values
        return [ordered[rank - 1] for rank in ranks]
    return [values.kthvalue(rank).values for rank in ranks]


def _lse_error(lse_TH: torch.Tensor, truth: Truth) -> torch.Tensor:
    """Largest LSE error. A row that sees no key has -inf: every other number there is infinitely far, NaN is NaN."""
    lse_QH = lse_TH.double()
    return torch.where(lse_QH == truth.lse_QH, 0.0, (lse_QH - truth.lse_QH).abs()).max()  # -inf less -inf is NaN
