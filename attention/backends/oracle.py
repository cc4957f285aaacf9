"""The oracle: attention in float64, the truth that every backend's error is measured against.

Also the error that a dtype class itself makes. 16 bits: float64 products, rounded where a kernel of that
class rounds: scores and P are float32 (every class accumulates there), P has 16 bits in the second
product, and so has the output; see `_rounded` for sums and parts. float32: eager attention in float32,
since there the sums themselves are most of the error and it grows with the length. A sound kernel's error
is of that size; dividing by it gives ratios that mean the same at every shape and length, which no
absolute tolerance does (error scale falls with 1/sqrt(kv_len)).

Works in query chunks, so that memory stays near `chunk * kv_len * heads` float64 numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attention.backends.base import AttentionSpec, Batch, Planned, member_keys, positions_mask
from attention.cases import AttentionCase
from attention.reasons import Reason

_CHUNK_SCORES = 1 << 24  # float64 scores held at once: 128 MB
_LEAST_PART, _MOST_PARTS = 128, 4  # keys of a part whose output is rounded, and how many parts there are


@dataclass(frozen=True)
class Truth:
    """Exact output and LSE of one member, and what rounding alone makes of the output.

    out_QHD, rounded_QHD: float64 [q_len, H, D_vo]; lse_QH: float64 natural log.
    """

    out_QHD: torch.Tensor
    lse_QH: torch.Tensor
    rounded_QHD: torch.Tensor


def attend(
    q_QHD: torch.Tensor,
    k_LGD: torch.Tensor,
    v_LGD: torch.Tensor,
    spec: AttentionSpec,
    mask_QL: torch.Tensor | None = None,
) -> Truth:
    """Attention of one member in float64; the inputs are taken as they are, exact: quantised K and V are
    what is stored times their scale.

    A row that sees no key gives output 0 and LSE -inf (with a sink: 0 and the sink).

    Raises RuntimeError in float32 where this process lets TF32 into products of float32 (NVIDIA): what stands for
    float32's own error would be TF32's, a thousand times larger.
    """
    q_len, kv_len = q_QHD.shape[0], k_LGD.shape[0]
    if spec.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        raise RuntimeError("float32 products run in TF32 here: torch.set_float32_matmul_precision('highest')")
    k_GLD, v_GLD = (
        (cache.double() if factor == 1 else cache.double() * factor).transpose(0, 1)
        for cache, factor in ((k_LGD, spec.k_scale), (v_LGD, spec.v_scale))
    )
    scaled_QHD = q_QHD.double() * spec.scale  # here it costs no pass over the scores
    allowed_QL = positions_mask(q_len, kv_len, spec, q_QHD.device)
    if mask_QL is not None:
        allowed_QL = mask_QL if allowed_QL is None else allowed_QL & mask_QL
    hidden_QL = None if allowed_QL is None else ~allowed_QL
    if hidden_QL is not None:  # what no query sees may hold NaN, and a weight of 0 times NaN is NaN
        v_GLD = v_GLD.masked_fill(hidden_QL.all(0)[:, None], 0.0)
    step = max(1, _CHUNK_SCORES // max(1, spec.heads_q * kv_len))
    outs, lses, roundeds = [], [], []
    for start in range(0, max(1, q_len), step):  # once also without a query: empty results of the right shape
        rows = slice(start, min(q_len, start + step))
        # The keys that some of these rows may see: half of all in a causal prefill.
        keys = slice(0, max(0, min(kv_len, kv_len - q_len + rows.stop)) if spec.causal else kv_len)
        k_GdL, v_GLd = k_GLD[:, keys].transpose(1, 2), v_GLD[:, keys]
        hidden = None if hidden_QL is None else hidden_QL[rows, keys]
        bias = None if spec.alibi_slopes is None else _alibi(rows, keys, kv_len - q_len, spec.alibi_slopes, k_GLD)
        s_HQL = _scores(_by_groups(scaled_QHD[rows].transpose(0, 1), k_GdL), spec, bias, hidden)
        top = _top(s_HQL, spec)
        out, lse = _softmax_times(s_HQL, v_GLd, spec, top)
        if spec.dtype == torch.float32:
            product = _by_groups(q_QHD[rows].float().transpose(0, 1), k_GdL.float()).mul_(spec.scale)
            s_HQL = _scores(product, spec, bias, hidden)
            rounded, _ = _softmax_times(s_HQL, v_GLd.float(), spec, _top(s_HQL, spec))
        else:
            rounded = _rounded(s_HQL.float(), v_GLd, spec, top.float(), out)
        outs.append(out.transpose(0, 1))
        lses.append(lse.transpose(0, 1))
        roundeds.append(rounded.double().transpose(0, 1))
    return Truth(torch.cat(outs), torch.cat(lses), torch.cat(roundeds))


def _scores(
    s_HQL: torch.Tensor, spec: AttentionSpec, bias_HQL: torch.Tensor | None, hidden_QL: torch.Tensor | None
) -> torch.Tensor:
    """Scores before the softmax, from the scaled products of q and K, which are written over."""
    if spec.softcap is not None:
        s_HQL = spec.softcap * torch.tanh(s_HQL / spec.softcap)
    if bias_HQL is not None:
        s_HQL += bias_HQL
    return s_HQL if hidden_QL is None else s_HQL.masked_fill_(hidden_QL, float("-inf"))


def _alibi(rows: slice, keys: slice, offset: int, slopes: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    """Bias [H, rows, keys]: -slope times the distance from the diagonal, which begins at key `offset`."""
    slopes_H11 = torch.tensor(slopes, dtype=like.dtype, device=like.device)[:, None, None]
    diagonal = torch.arange(rows.start, rows.stop, device=like.device)[:, None] + offset
    return -slopes_H11 * (diagonal - torch.arange(keys.stop, device=like.device)[None]).abs()


def _by_groups(a_HQX: torch.Tensor, b_GXY: torch.Tensor) -> torch.Tensor:
    """Product [H, Q, Y] of every head with what its KV head has, which is not copied for each head."""
    heads, rows, width = a_HQX.shape
    groups = len(b_GXY)
    return (a_HQX.reshape(groups, heads // groups * rows, width) @ b_GXY).view(heads, rows, b_GXY.shape[2])


def _top(s_HQL: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """The score [H, Q, 1] that P is relative to: the largest of a row, 0 where that is not finite."""
    # amax refuses an empty dimension: without a key every row is empty.
    top = s_HQL.amax(-1, keepdim=True) if s_HQL.shape[-1] else s_HQL.new_full((*s_HQL.shape[:2], 1), -math.inf)
    if spec.sinks is not None:
        top = torch.maximum(top, _sinks(spec, top))
    return top.nan_to_num_(0.0, 0.0, 0.0)


def _sinks(spec: AttentionSpec, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(spec.sinks, dtype=like.dtype, device=like.device)[:, None, None]


def _weights(s_HQL: torch.Tensor, spec: AttentionSpec, top: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
    """P (unnormalised, 0..1), and the sinks' part of its sum."""
    sunk = 0.0 if spec.sinks is None else torch.exp(_sinks(spec, top) - top)
    return (s_HQL - top).exp_(), sunk


def _softmax_times(
    s_HQL: torch.Tensor, v_GLD: torch.Tensor, spec: AttentionSpec, top: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [H, Q, D_vo] and LSE [H, Q] in the dtype of the arguments."""
    p_HQL, sunk = _weights(s_HQL, spec, top)
    total = p_HQL.sum(-1, keepdim=True) + sunk
    out = _by_groups(p_HQL, v_GLD).div_(total.clamp_min(torch.finfo(total.dtype).tiny))
    return out, (total.log_() + top)[..., 0]  # a row without a key: log 0, which is -inf


def _rounded(
    s_HQL: torch.Tensor, v_GLD: torch.Tensor, spec: AttentionSpec, top: torch.Tensor, exact_HQD: torch.Tensor
) -> torch.Tensor:
    """The output as a kernel of 16 bits rounds it: of two ways, element by element what is farther off.

    One sums P as it is and rounds the output. The other sums P as it was rounded for the product, and rounds the
    outputs of parts of the keys too before it merges them, as FlashInfer's FA2 kernels do. Scores and their largest
    are float32, as kernels have them; what a kernel sums in float32 is summed in float64.
    """
    p_HQL, sunk = _weights(s_HQL, spec, top)
    total = (p_HQL.sum(-1, keepdim=True) + sunk).double()
    p_HQL, tiny = p_HQL.to(spec.dtype), torch.finfo(torch.float64).tiny
    length = max(_LEAST_PART, -(-s_HQL.shape[-1] // _MOST_PARTS))
    whole, merged, merged_total = torch.zeros_like(exact_HQD), torch.zeros_like(exact_HQD), torch.zeros_like(total)
    parts = zip(*(p.split(length, -1) for p in (p_HQL, p_HQL.double())), v_GLD.split(length, 1), strict=True)
    for part_HQL, exact_part_HQL, v_part in parts:
        product, part_total = _by_groups(exact_part_HQL, v_part), part_HQL.sum(-1, keepdim=True, dtype=torch.float64)
        whole += product
        merged.addcmul_((product / part_total.clamp_min(tiny)).to(spec.dtype), part_total)
        merged_total += part_total
    one = (whole / total.clamp_min(tiny)).to(spec.dtype)
    other = (merged / (merged_total + sunk).clamp_min(tiny)).to(spec.dtype)
    return torch.where((other - exact_HQD).abs_() > (one - exact_HQD).abs_(), other, one)


class OracleBackend:
    """The oracle as a Backend: every feature, layout and KV dtype, right by construction, and slow.

    What checks are checked with: a mutant of it has one defect and no other, also in features that no CPU
    kernel has (softcap, sinks, ALiBi, quantised KV).
    """

    name = "oracle:fp64"

    def check(self, case: AttentionCase) -> list[Reason]:
        return []

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        return _PlannedOracle(self.name, batch, spec, lse=lse)


class _PlannedOracle(Planned):
    def __init__(self, backend: str, batch: Batch, spec: AttentionSpec, *, lse: bool) -> None:
        super().__init__(backend, batch, spec)
        self._lse = lse

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._check_tokens(q_THD)
        outs, lses, row = [], [], 0
        for i, q_len in enumerate(self.batch.q_lens):
            mask = None if self.batch.masks is None else self.batch.masks[i]
            k, v = (member_keys(cache, self.batch, i) for cache in (k_NPGD, v_NPGD))
            truth = attend(q_THD[row : row + q_len], k, v, self.spec, mask)
            outs.append(truth.out_QHD.to(q_THD.dtype))
            lses.append(truth.lse_QH.float())
            row += q_len
        return torch.cat(outs), torch.cat(lses) if self._lse else None

    def replan(self, batch: Batch) -> None:
        self._check_fits(batch)
        self.batch = batch
