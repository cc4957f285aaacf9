"""A pseudo-kernel: attention in blocks of keys with an online softmax, as flash kernels compute it.

Scores, sums and the accumulator are float32; P and the output are rounded to the dtype. Block size, order of the
blocks and number of KV splits are parameters, so that sound variants differ as sound kernels do. The same loop in
float64 without any rounding is the oracle, to 1e-12; a fault goes into both alike.

Shape suffixes as in `attention.backends.base`; L keys and Q queries of one member.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from attention.backends.base import AttentionSpec

_LEAST_ROUNDED = 128  # keys


@dataclass(frozen=True)
class Variant:
    """What a kernel's author may choose freely."""

    block: int = 64  # keys a step of the online softmax
    reverse: bool = False  # last block first
    splits: int = 1  # parts of the keys that are computed apart and merged through their LSE
    #: P is summed rounded, and outputs of splits are rounded before they are merged, as in FlashInfer's FA2 kernels
    #: (row sums on tensor cores, partial outputs of type DTypeO; no split has fewer than 128 keys there either).
    rounded: bool = False

    def __str__(self) -> str:
        more = {"reversed": self.reverse, "rounded": self.rounded}
        return ", ".join([f"block {self.block}", f"{self.splits} splits", *(name for name in more if more[name])])


@dataclass(frozen=True)
class Numbers:
    """What a kernel computes in: `work` for scores, sums and accumulator, `store` for P and output."""

    work: torch.dtype
    store: torch.dtype


EXACT = Numbers(torch.float64, torch.float64)


def kernel_numbers(dtype: torch.dtype) -> Numbers:
    """Those of every flash kernel: float32 inside, the dtype where tensor cores and memory want it."""
    return Numbers(torch.float32, dtype)


@dataclass(frozen=True)
class Defects:
    """What is wrong inside the loop; as it stands, nothing."""

    lost_split: int | None = None  # this split never reaches the merge
    merge_base2: bool = False  # the merge takes natural LSEs for base-2 ones
    accumulate: torch.dtype | None = None  # the accumulator is rounded to it after every block


RIGHT = Defects()


@dataclass(frozen=True)
class Read:
    """What a kernel has read of one member.

    q_QHD; k_LHD and v_LHD as stored, one KV head a query head; allowed_QL True where a query may look;
    diagonal_Q the position of each query among the keys (ALiBi).
    """

    q_QHD: torch.Tensor
    k_LHD: torch.Tensor
    v_LHD: torch.Tensor
    allowed_QL: torch.Tensor
    diagonal_Q: torch.Tensor
    spec: AttentionSpec


@dataclass(frozen=True)
class _Part:
    """Normalised output and LSE over some of the keys: out_HQD, lse_HQ1."""

    out_HQD: torch.Tensor
    lse_HQ1: torch.Tensor


def attend(
    read: Read, variant: Variant, numbers: Numbers, defects: Defects = RIGHT
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [Q, H, D_vo] in `numbers.store` and natural LSE [Q, H] of one member.

    A row that sees no key gives 0 and -inf (with a sink: 0 and the sink).
    """
    kv_len, spec = read.k_LHD.shape[0], read.spec
    size = max(_LEAST_ROUNDED if variant.rounded else 1, -(-kv_len // variant.splits))
    parts = [
        _part(read, range(start, min(start + size, kv_len)), variant, numbers, defects)
        for number, start in enumerate(range(0, max(1, kv_len), size))
        if number != defects.lost_split
    ]
    if variant.rounded and len(parts) > 1:
        parts = [replace(part, out_HQD=part.out_HQD.to(numbers.store).to(numbers.work)) for part in parts]
    if spec.sinks is not None:
        parts.append(_sink(spec.sinks, parts[0], numbers.work))
    whole = parts[0] if len(parts) == 1 else _merged(parts, base=2.0 if defects.merge_base2 else math.e)
    out_HQD = (whole.out_HQD * spec.v_scale).to(numbers.store)
    lse = whole.lse_HQ1[..., 0]
    return out_HQD.transpose(0, 1), (lse if numbers.work == torch.float64 else lse.float()).transpose(0, 1)


def _part(read: Read, keys: range, variant: Variant, numbers: Numbers, defects: Defects) -> _Part:
    """The online softmax over a range of keys."""
    work = numbers.work
    q_HQD = read.q_QHD.to(work).transpose(0, 1)
    heads, q_len = q_HQD.shape[:2]
    top = torch.full((heads, q_len, 1), -math.inf, dtype=work)
    total = torch.zeros(heads, q_len, 1, dtype=work)
    acc_HQD = torch.zeros(heads, q_len, read.v_LHD.shape[-1], dtype=work)
    starts = range(keys.start, keys.stop, variant.block)
    for start in reversed(starts) if variant.reverse else starts:
        block = slice(start, min(start + variant.block, keys.stop))
        s_HQL = _scores(q_HQD, read, block, work)
        higher = torch.maximum(top, s_HQL.amax(-1, keepdim=True))
        finite = torch.where(torch.isinf(higher), 0.0, higher)
        shrink, p_HQL = torch.exp(top - finite), torch.exp(s_HQL - finite)
        rounded_HQL = p_HQL.to(numbers.store).to(work)
        total = total * shrink + (rounded_HQL if variant.rounded else p_HQL).sum(-1, keepdim=True)
        # What stands in the cache of quantised KV is exact in every dtype; scales come in outside the loop.
        v_HLD = read.v_LHD[block].to(work).transpose(0, 1)
        acc_HQD = acc_HQD * shrink + rounded_HQL @ v_HLD
        if defects.accumulate is not None:
            acc_HQD = acc_HQD.to(defects.accumulate).to(work)
        top = higher
    empty = total == 0
    out = acc_HQD / torch.where(empty, 1.0, total)
    lse = torch.where(empty, -math.inf, torch.where(empty, 1.0, total).log() + torch.where(empty, 0.0, top))
    return _Part(out, lse)


def _scores(q_HQD: torch.Tensor, read: Read, block: slice, work: torch.dtype) -> torch.Tensor:
    """Scores [H, Q, keys of the block]; -inf where a query may not look."""
    spec = read.spec
    s_HQL = q_HQD @ read.k_LHD[block].to(work).permute(1, 2, 0) * (spec.scale * spec.k_scale)
    if spec.softcap is not None:
        s_HQL = spec.softcap * torch.tanh(s_HQL / spec.softcap)
    if spec.alibi_slopes is not None:
        slopes_H11 = torch.tensor(spec.alibi_slopes, dtype=work)[:, None, None]
        keys = torch.arange(block.start, block.stop)
        s_HQL = s_HQL - slopes_H11 * (read.diagonal_Q[:, None] - keys).abs().to(work)
    return s_HQL.masked_fill(~read.allowed_QL[:, block], -math.inf)


def _sink(sinks: tuple[float, ...], like: _Part, work: torch.dtype) -> _Part:
    """A sink is a part of its own, with its logit as LSE and no value."""
    lse = torch.tensor(sinks, dtype=work)[:, None, None].expand_as(like.lse_HQ1)
    return _Part(torch.zeros_like(like.out_HQD), lse)


def _merged(parts: list[_Part], base: float) -> _Part:
    """Parts weighted by base ** LSE; `base` is e, since every LSE here is a natural logarithm."""
    lses = torch.stack([part.lse_HQ1 for part in parts])
    top = lses.amax(0)
    finite = torch.where(torch.isinf(top), 0.0, top)
    weights = torch.exp((lses - finite) * math.log(base))
    total = weights.sum(0)
    empty = total == 0
    out = (torch.stack([part.out_HQD for part in parts]) * weights).sum(0) / torch.where(empty, 1.0, total)
    lse = torch.where(empty, -math.inf, torch.where(empty, 1.0, total).log() / math.log(base) + finite)
    return _Part(out, lse)
