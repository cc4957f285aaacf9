"""Sound backends with one defect each, of the kinds that public reports describe.

A mutant changes one of three things and leaves the rest to the oracle: the spec that the kernel is told
(`spec`: an argument is dropped), the batch (`batch`: lengths, pages or masks are misread), or a run (`run`:
addresses, numbers or state go wrong). Shape legend: attention/backends/base.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from attention.backends.base import AttentionSpec, Batch, Planned, member_keys
from attention.backends.oracle import OracleBackend
from attention.cases import AttentionCase
from attention.reasons import Reason

Result = tuple[torch.Tensor, torch.Tensor | None]


class Mutant:
    """A sound backend; a subclass breaks one method."""

    def __init__(self) -> None:
        self.sound = OracleBackend()
        self.name = f"mutant:{type(self).__name__}"

    def check(self, case: AttentionCase) -> list[Reason]:
        return self.sound.check(case)

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        return _PlannedMutant(self, batch, spec, graph)

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        return spec

    def batch(self, batch: Batch, spec: AttentionSpec) -> Batch:
        return batch

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        return planned.run(q_THD, k, v)

    def replan(self, planned: Planned, batch: Batch) -> None:
        planned.replan(batch)


class _PlannedMutant(Planned):
    def __init__(self, mutant: Mutant, batch: Batch, spec: AttentionSpec, graph: bool) -> None:
        super().__init__(mutant.name, batch, spec)
        self._mutant = mutant
        self._sound = mutant.sound.plan(mutant.batch(batch, spec), mutant.spec(spec), graph=graph)

    def run(self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor) -> Result:
        return self._mutant.run(self._sound, q_THD, k_NPGD, v_NPGD)

    def replan(self, batch: Batch) -> None:
        self._check_fits(batch)
        self.batch = batch
        self._mutant.replan(self._sound, self._mutant.batch(batch, self.spec))


def _rows(batch: Batch) -> list[slice]:
    """Rows of q_THD by member."""
    ends = [sum(batch.q_lens[: i + 1]) for i in range(len(batch.q_lens))]
    return [slice(end - q_len, end) for end, q_len in zip(ends, batch.q_lens, strict=True)]


def _heads_first(cache: torch.Tensor, batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`change` on the cache with its KV heads at -2, whatever the layout."""
    if batch.layout == "paged_hnd":
        return change(cache.transpose(1, 2)).transpose(1, 2)
    return change(cache)


# --- arguments that are accepted and dropped -------------------------------------------------------------------


class SoftcapIgnored(Mutant):
    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, softcap=None)


class SinkDropped(Mutant):
    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, sinks=None)


class KvScaleIgnored(Mutant):
    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, k_scale=1.0, v_scale=1.0)


class VScaleIgnored(Mutant):
    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, v_scale=1.0)


class AlibiIgnored(Mutant):
    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, alibi_slopes=None)


class AlibiOfLocalHeads(Mutant):
    """Slopes computed from the number of local heads, whatever the caller wants."""

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        if spec.alibi_slopes is None:
            return spec
        heads = spec.heads_q
        return replace(spec, alibi_slopes=tuple(2.0 ** (-8 * (h + 1) / heads) for h in range(heads)))


class MaskIgnored(Mutant):
    """A custom mask became a no-op."""

    def batch(self, batch: Batch, spec: AttentionSpec) -> Batch:
        return replace(batch, masks=None)


# --- masks and windows -----------------------------------------------------------------------------------------


class WindowIgnored(Mutant):
    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, window=(None, None))


class WindowOneTooWide(Mutant):
    """A Hugging Face window of W tokens passed as an inclusive left window."""

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        left, right = spec.window
        return spec if left is None else replace(spec, window=(left + 1, right))


class WindowOneTooNarrow(Mutant):
    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        left, right = spec.window
        return spec if left is None else replace(spec, window=(max(0, left - 1), right))


class WindowEverywhere(Mutant):
    """The sliding window of some layers applied to the global ones too."""

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        return spec if spec.window != (None, None) else replace(spec, window=(7, None))


class WindowFromTopLeft(Mutant):
    """The window lies on the top-left diagonal; causal stays bottom-right."""

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, window=(None, None))

    def batch(self, batch: Batch, spec: AttentionSpec) -> Batch:
        left, right = spec.window
        if left is None and right is None:
            return batch
        masks = []
        for q_len, kv_len in zip(batch.q_lens, batch.kv_lens, strict=True):
            offset = torch.arange(kv_len)[None] - torch.arange(q_len)[:, None]
            low, high = -math.inf if left is None else -left, math.inf if right is None else right
            masks.append((offset >= low) & (offset <= high))
        return replace(batch, masks=tuple(masks))


class TopLeftCausal(Mutant):
    """Query row i sees keys 0 .. i, wherever its token stands."""

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, causal=False)

    def batch(self, batch: Batch, spec: AttentionSpec) -> Batch:
        if not spec.causal:
            return batch
        shapes = list(zip(batch.q_lens, batch.kv_lens, strict=True))
        masks = [torch.ones(shape, dtype=torch.bool).tril() for shape in shapes]
        if batch.masks is not None:
            masks = [mine & theirs for mine, theirs in zip(masks, batch.masks, strict=True)]
        return replace(batch, masks=tuple(masks))


class PoisonOutsideWindow(Mutant):
    """V tiles before the window are multiplied by a weight of zero, not skipped: 0 * NaN is NaN."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        for i, rows in enumerate(_rows(planned.batch)):
            out[rows] += 0 * member_keys(v, planned.batch, i).float().sum(0).sum().to(out.dtype)
        return out, lse


class EmptySplitsMerged(Mutant):
    """Windowed decodes split the keys; splits that the window leaves empty are merged from scratch memory."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        left = planned.spec.window[0]
        for rows, kv_len in zip(_rows(planned.batch), planned.batch.kv_lens, strict=True):
            if left is not None and kv_len > 2 * (left + 1):
                out[rows] += 0.25
        return out, lse


# --- rows and members without keys -----------------------------------------------------------------------------


class EmptyRowIsMean(Mutant):
    """A row without a visible key gives the mean of V, as a mask of finfo.min does."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        assert lse is not None
        ratio = planned.spec.heads_q // planned.spec.heads_kv
        for i, rows in enumerate(_rows(planned.batch)):
            values = member_keys(v, planned.batch, i).float() * planned.spec.v_scale
            if len(values):
                mean_HD = values.mean(0).repeat_interleave(ratio, 0).to(out.dtype)
                empty = torch.isneginf(lse[rows])[..., None]
                out[rows] = torch.where(empty, mean_HD, out[rows])
        return out, lse


class EmptyRowIsNan(Mutant):
    """0 / 0 where no key is visible."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        assert lse is not None
        return out.masked_fill(torch.isneginf(lse)[..., None], math.nan), lse


class EmptyKvGarbage(Mutant):
    """A member without keys launches no block: its rows stay as the allocator left them."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        assert lse is not None
        for rows, kv_len in zip(_rows(planned.batch), planned.batch.kv_lens, strict=True):
            if not kv_len:
                out[rows], lse[rows] = 3.0, 0.0
        return out, lse


class EmptyKvRaises(Mutant):
    """A division by the number of key blocks."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        if 0 in planned.batch.kv_lens:
            raise RuntimeError("CUDA error: an illegal instruction was encountered")
        return planned.run(q_THD, k, v)


class ZeroLengthShiftsNext(Mutant):
    """A member without keys writes past its end: the next member's first row takes what belongs there."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        for rows, kv_len in zip(_rows(planned.batch), planned.batch.kv_lens, strict=True):
            if not kv_len and rows.stop < len(out):
                out[rows.stop] = 0
        return out, lse


class ZeroLengthShapeError(Mutant):
    """A batch with a member of no queries or no keys is refused with a shape error."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        if 0 in planned.batch.kv_lens or 0 in planned.batch.q_lens:
            raise RuntimeError("out must have shape (total_q, num_heads, head_size)")
        return planned.run(q_THD, k, v)


# --- numbers ---------------------------------------------------------------------------------------------------


class LseBase2(Mutant):
    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        return out, None if lse is None else lse / math.log(2)


class SentinelLogit(Mutant):
    """The running maximum starts at -5e4 instead of -inf: rows whose scores all lie below vanish."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        assert lse is not None
        lost = lse < -5e4 + math.log(1e-3)
        return out.masked_fill(lost[..., None], 0.0), lse.masked_fill(lost, -5e4)


class ScoresInHalf(Mutant):
    """Scores are kept in float16, which ends at 65504: Inf - Inf is NaN."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        assert lse is not None
        return out.masked_fill((lse.abs() > 65504)[..., None], math.nan), lse


class NanBecomesZero(Mutant):
    """A NaN query, which is a bug upstream, leaves as zeros, which nobody notices."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        return out.nan_to_num(0.0), lse


class TileOf96(Mutant):
    """Decode walks the keys in tiles of 96 and rounds P to eight bits from the second tile on."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        lengths = zip(_rows(planned.batch), planned.batch.q_lens, planned.batch.kv_lens, strict=True)
        for rows, q_len, kv_len in lengths:
            if q_len == 1 and kv_len > 96:
                out[rows] *= 1 + 0.06 * ((kv_len - 1) // 96)
        return out, lse


class CoarseAtLength(Mutant):
    """Sums in the output's dtype: an error that grows with the number of keys."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        for rows, kv_len in zip(_rows(planned.batch), planned.batch.kv_lens, strict=True):
            out[rows] *= 1 + 2e-4 * kv_len
        return out, lse


class OneRowWrong(Mutant):
    """One row in a batch mixes up two heads; mean and cosine hardly see it."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        row = len(out) // 2
        out[row, 0] = out[row, -1]
        return out, lse


class FewKvHeadsGlitch(Mutant):
    """With fewer than eight KV heads, one row in seventeen is that of its neighbour."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        if planned.spec.heads_kv < 8:
            out[::17] = out.roll(1, 1)[::17]
        return out, lse


# --- shapes ----------------------------------------------------------------------------------------------------


class HeadDimBelowMinimum(Mutant):
    """Below 64 the loop over head-dim blocks runs zero times: the output stays as the allocator left it."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        return (out.fill_(3.0) if planned.spec.head_dim_vo < 64 else out), lse


class LaunchUnchecked(Mutant):
    """The launch needs more shared memory than there is; nobody looks at its status."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        return (torch.full_like(out, -7.0) if planned.spec.head_dim_vo >= 256 else out), lse


class HeadDimOfModel(Mutant):
    """Buffers have the head dim of the model's first layers, half of this layer's: the rest is never written."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        out[..., planned.spec.head_dim_vo // 2 :] = 0
        return out, lse


class CoarseValues(Mutant):
    """A head dim that nobody tested: V keeps its sign and the power of two."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        coarse = torch.exp2(torch.floor(torch.log2(v.float().abs().clamp_min(1e-6)))) * v.float().sign()
        return planned.run(q_THD, k, coarse.to(v.dtype))


class GqaGroupRounded(Mutant):
    """Query heads find their KV head with the group size rounded up to a power of two."""

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, heads_kv=spec.heads_q)

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        heads_kv = k.shape[1] if planned.batch.layout == "paged_hnd" else k.shape[2 if k.dim() == 4 else 1]
        ratio = planned.spec.heads_q // heads_kv
        group = 1 << (ratio - 1).bit_length()
        heads = torch.arange(planned.spec.heads_q, device=k.device) // group
        k, v = (_heads_first(x, planned.batch, lambda y: _take_heads(y, heads)) for x in (k, v))
        return planned.run(q_THD, k, v)


def _take_heads(cache: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    return raw.index_select(-2, heads).view(cache.dtype)


class GqaRatioRefused(Mutant):
    """The template exists for group sizes 1, 2, 3, 4 and 8 alone."""

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        if spec.heads_q // spec.heads_kv not in (1, 2, 3, 4, 8):
            raise RuntimeError(f"Unsupported group_size: {spec.heads_q // spec.heads_kv}")
        return super().plan(batch, spec, graph=graph)


class LastPageOff(Mutant):
    """Where the last page is neither full nor of one key, its last key is lost."""

    def batch(self, batch: Batch, spec: AttentionSpec) -> Batch:
        page = batch.page_size or 1
        short = tuple(kv - 1 if kv % page > 1 else kv for kv in batch.kv_lens)
        # A causal query keeps its place: the keys that it loses are at the end.
        return replace(batch, kv_lens=short)


# --- memory ----------------------------------------------------------------------------------------------------


def _as_if(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The numbers that a kernel finds which believes that `x` has these strides; addresses wrap at the storage."""
    raw = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
    storage = raw.as_strided((raw.untyped_storage().nbytes() // raw.itemsize,), (1,), 0)
    at = torch.full(x.shape, x.storage_offset(), dtype=torch.long, device=x.device)
    for dim, (size, stride) in enumerate(zip(x.shape, strides, strict=True)):
        shape = [1] * x.dim()
        shape[dim] = size
        at = at + (torch.arange(size, device=x.device) * stride).view(shape)
    return storage[at % len(storage)].view(x.dtype)


def _dense(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


class StridesIgnored(Mutant):
    """Addresses are computed as if every tensor was contiguous."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        q_THD, k, v = (_as_if(x, _dense(x.shape)) for x in (q_THD, k, v))
        return planned.run(q_THD, k, v)


class StridesSwapped(Mutant):
    """K is read with the strides of V, and V with those of K."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        return planned.run(q_THD, _as_if(k, v.stride()), _as_if(v, k.stride()))


class ExpandedResidueWrong(Mutant):
    """K and V that are expanded (stride 0) are misread where one key is left over in the last tile of 32."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        if 0 in k.stride() or 0 in v.stride():
            for rows, kv_len in zip(_rows(planned.batch), planned.batch.kv_lens, strict=True):
                if kv_len % 32 == 1:
                    out[rows] *= 0.5
        return out, lse


class GraphOfFirstLayout(Mutant):
    """A cache of graphs keyed by shapes alone: the second layout of a shape runs with the first one's strides."""

    def __init__(self) -> None:
        super().__init__()
        self._strides: dict[tuple[torch.Size, ...], list[tuple[int, ...]]] = {}

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        key = (q_THD.shape, k.shape, v.shape)
        first = self._strides.setdefault(key, [x.stride() for x in (q_THD, k, v)])
        q_THD, k, v = (_as_if(x, strides) for x, strides in zip((q_THD, k, v), first, strict=True))
        return planned.run(q_THD, k, v)


class PageOffsetInt32(Mutant):
    """Page id times page stride is computed in 32 bits: past 2^31 elements it wraps to another page."""

    elements = 2**31

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        batch, pages = planned.batch, max(1, self.elements // max(1, k.stride(0)))
        if batch.paged:
            tables = tuple(tuple(page % pages for page in table) for table in batch.block_tables)
            batch = replace(batch, block_tables=tables)
        return self.sound.plan(batch, planned.spec).run(q_THD, k, v)


class LayoutIgnored(Mutant):
    """HND pages are read as NHD, because the setting that says so is not read."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        if planned.batch.layout == "paged_hnd":
            k, v = (_swapped(x) for x in (k, v))
        return planned.run(q_THD, k, v)


def _swapped(cache_NGPD: torch.Tensor) -> torch.Tensor:
    pages, heads, page, dim = cache_NGPD.shape
    return cache_NGPD.reshape(pages, page, heads, dim).transpose(1, 2)


class KvHalvesSwapped(Mutant):
    """One side stores (K and V, pages, ..), the other reads (pages, K and V, ..)."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        return planned.run(q_THD, v, k) if k.shape == v.shape else planned.run(q_THD, k, v)


class PaddingLeaks(Mutant):
    """The rest of the last page is multiplied by a weight of zero, not skipped: 0 * NaN is NaN."""

    keys = True
    values = True

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        batch = planned.batch
        whole = _whole_pages(batch, k)
        for i, rows in enumerate(_rows(batch)):
            for cache, leaks in ((k, self.keys), (v, self.values)):
                if leaks:
                    rest = member_keys(cache, whole, i)[batch.kv_lens[i] :]
                    out[rows] += 0 * rest.float().sum().to(out.dtype)
        return out, lse


class PaddingOfKLeaks(PaddingLeaks):
    values = False


class PaddingOfVLeaks(PaddingLeaks):
    keys = False


def _whole_pages(batch: Batch, cache: torch.Tensor) -> Batch:
    """The batch with every member's keys padded to the end of its pages or block."""
    if batch.paged:
        page = batch.page_size or 1
        return replace(batch, kv_lens=tuple(len(table) * page for table in batch.block_tables))
    if batch.layout == "contiguous":
        return replace(batch, kv_lens=(cache.shape[1],) * len(batch.kv_lens))
    return batch


# --- state, order and company ----------------------------------------------------------------------------------


class Nondeterministic(Mutant):
    """Two runs of the same inputs differ, as with a race."""

    calls = 0

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        self.calls += 1
        return out * (1 + torch.finfo(out.dtype).eps * (self.calls % 2)), lse


class SplitsByCompany(Mutant):
    """The number of splits, and with it the rounding, follows from the other members of the batch."""

    def run(self, planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        out, lse = planned.run(q_THD, k, v)
        splits = 1 + (sum(planned.batch.kv_lens) + len(planned.batch.kv_lens)) % 2
        return out * (1 + torch.finfo(out.dtype).eps * (splits - 1)), lse


class StaleGraph(Mutant):
    """The captured graph keeps the lengths and pages of its capture."""

    def replan(self, planned: Planned, batch: Batch) -> None:
        return None
