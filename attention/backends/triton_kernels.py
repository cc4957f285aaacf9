"""The kernels of `triton:paged`: forward attention over pages, ragged or contiguous keys.

A *tile* is BLOCK_M rows of one member, attended over the keys `begin .. end - 1`. Its rows are (query token, head)
pairs: with PACK = 1 the tokens of one query head, with PACK = H / G the tokens times the heads that share a KV
head, so that a decode step fills the M dimension of a matrix product. Prefill and decode are the same kernel at
other block sizes, compiled as `attention_release_paged_prefill` and `..._decode` so that a profiler tells them
apart. Where the keys of a member are split over several tiles (flash-decoding), each tile writes its part and
`attention_release_paged_combine` merges them.

Scores are float32 and the softmax works in base 2: exp2(score * scale * log2(e) - max). The scale multiplies the
float32 scores and not q, which would round q a second time. P is rounded to the dtype of the second product.

Without a GPU the kernels run in Triton's interpreter: TRITON_INTERPRET=1 before Triton is first imported.
Shape legend as in base.py; B* are the block sizes of the compiled kernel.
"""

# mypy: ignore-errors
# (the functions below are typed by Triton's compiler)

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_NEG_INF = tl.constexpr(float("-inf"))
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _dot(a, b, acc):
    """a @ b + acc in float32."""
    if _INTERPRETED:  # the interpreter would multiply the bits of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _pages(table, start, offs_n, kv_len, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of every key of a block, or the one page that holds the whole block.

    Not widened here: only a load that the loop carries as it is gets issued a whole block ahead (Triton 3.6).
    """
    if PAGE_SIZE % BLOCK_N == 0:
        pages = tl.load(table + start // PAGE_SIZE, mask=start < kv_len, other=0)
    else:
        keys = start + offs_n
        pages = tl.load(table + keys // PAGE_SIZE, mask=keys < kv_len, other=0)
    return pages


@triton.jit
def _key_rows(base, pages, start, offs_n, stride_page, stride_slot, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers [BLOCK_N] to the rows of a block of keys; 64-bit, since page * stride passes 2**31."""
    if PAGE_SIZE == 0:
        rows = base + (start + offs_n).to(tl.int64) * stride_slot
    elif PAGE_SIZE % BLOCK_N == 0:
        rows = base + (pages.to(tl.int64) * stride_page + (start % PAGE_SIZE) * stride_slot) + offs_n * stride_slot
    else:
        rows = base + (pages.to(tl.int64) * stride_page + ((start + offs_n) % PAGE_SIZE) * stride_slot)
    return rows


@triton.jit
def _load(rows, dims, inside, DIM: tl.constexpr, WHOLE: tl.constexpr, MASKED: tl.constexpr):
    """A block [rows, dims], 0 outside. A plain load where nothing is outside: that is what gets pipelined best."""
    pointers = rows[:, None] + dims[None, :]
    if MASKED and not WHOLE:
        block = tl.load(pointers, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    elif MASKED:
        block = tl.load(pointers, mask=inside[:, None], other=0.0)
    elif not WHOLE:
        block = tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    else:
        block = tl.load(pointers)
    return block


@triton.jit
def _tanh(x, PRECISE: tl.constexpr):
    """1 - 2 / (exp(2x) + 1): cannot overflow. Near 0 it cancels, which only float32 inputs can tell: a series there."""
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * _LOG2E)) + 1.0)
    if PRECISE:
        y = x * x
        series = -0.3333333333333333 + y * (0.13333333333333333 + y * (-0.05396825396825397 + y * 0.021869488536155203))
        far = tl.where(y < 0.04, x + x * y * series, far)
    return far


@triton.jit
def _attend(
    acc, total, top,
    q0, q1,
    k_base, v_base, table,
    begin, end, low, high, kv_len,
    diagonals, slopes, mask_rows, row_inside,
    scale,
    stride_kp, stride_ks, stride_vp, stride_vs,
    DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    SHARED_V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend over the blocks `begin .. end - 1`; MASKED where a row may not see every key of a block."""
    offs_n = tl.arange(0, BLOCK_N)
    dims_0 = tl.arange(0, BLOCK_D0)
    dims_v = tl.arange(0, BLOCK_DV)
    pages = 0
    if PAGE_SIZE > 0:
        pages = _pages(table, begin, offs_n, kv_len, PAGE_SIZE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + offs_n
        inside = (keys >= low) & (keys < high)
        k_rows = _key_rows(k_base, pages, start, offs_n, stride_kp, stride_ks, PAGE_SIZE, BLOCK_N)
        v_rows = k_rows
        if not SHARED_V:
            v_rows = _key_rows(v_base, pages, start, offs_n, stride_vp, stride_vs, PAGE_SIZE, BLOCK_N)
        if PAGE_SIZE > 0:  # one block ahead, so that no load of keys waits for the page table
            pages = _pages(table, start + BLOCK_N, offs_n, kv_len, PAGE_SIZE, BLOCK_N)

        k0 = _load(k_rows, dims_0, inside, DIM, BLOCK_D0 <= DIM, MASKED).to(q0.dtype)
        s = _dot(q0, tl.trans(k0), tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32))
        if BLOCK_D1 > 0:
            dims_1 = BLOCK_D0 + tl.arange(0, BLOCK_D1)
            k1 = _load(k_rows, dims_1, inside, DIM, BLOCK_D0 + BLOCK_D1 <= DIM, MASKED).to(q0.dtype)
            s = _dot(q1, tl.trans(k1), s)

        # `factor` turns scores into base 2; with a cap or a bias they are there already.
        factor = scale * _LOG2E
        if SOFTCAP is not None:
            s = _tanh(s * (scale / SOFTCAP), q0.dtype == tl.float32) * (SOFTCAP * _LOG2E)
            factor = 1.0
        if slopes is not None:
            s = s * factor - (slopes * _LOG2E)[:, None] * tl.abs((diagonals[:, None] - keys[None, :]).to(tl.float32))
            factor = 1.0
        if MASKED:
            seen = inside[None, :]
            if LEFT is not None:
                seen = seen & (keys[None, :] >= diagonals[:, None] - LEFT)
            if RIGHT is not None:
                seen = seen & (keys[None, :] <= diagonals[:, None] + RIGHT)
            if mask_rows is not None:
                allowed = tl.load(
                    mask_rows[:, None] + keys[None, :], mask=row_inside[:, None] & inside[None, :], other=0
                )
                seen = seen & (allowed != 0)
            s = tl.where(seen, s, _NEG_INF)

        new_top = tl.maximum(top, tl.max(s, 1) * factor)
        anchor = new_top
        if MASKED:  # a row that has seen no key yet: exp2(-inf - 0) is 0, exp2(-inf + inf) is NaN
            anchor = tl.where(new_top == _NEG_INF, 0.0, new_top)
        p = tl.exp2(s * factor - anchor[:, None])
        shrink = tl.exp2(top - anchor)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = k0
        if not SHARED_V:
            v = _load(v_rows, dims_v, inside, DIM_V, BLOCK_DV <= DIM_V, MASKED).to(q0.dtype)
        acc = _dot(p.to(v.dtype), v, acc)
        top = new_top
    return acc, total, top


@triton.jit
def _with_sink(total, top, sink):
    """The softmax's sum and maximum with one more logit, and the factor that the sum of values shrinks by."""
    sink = sink * _LOG2E
    new_top = tl.maximum(top, sink)
    shrink = tl.exp2(top - new_top)
    return total * shrink + tl.exp2(sink - new_top), new_top, shrink


@triton.jit(repr=lambda specialised: f"attention_release_paged_{specialised.constants['PHASE']}")
def attend(
    q, k, v, out, lse, part_out, part_lse,
    tiles, members, tables, slopes, sinks, masks, mask_starts,
    scale, v_scale,
    stride_qt, stride_qh,
    stride_kp, stride_ks, stride_kh,
    stride_vp, stride_vs, stride_vh,
    stride_table,
    HEADS: tl.constexpr, RATIO: tl.constexpr, PACK: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    SHARED_V: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """One tile of one group of PACK heads. Groups are neighbours in the grid: they share pages, so also the L2.

    tiles int32 [tiles, 4]: member (-1: nothing to do), block of rows, begin, end. members int32 [B, 4]: first query
    row, query length, KV length, first key (ragged: its row, contiguous: the member).
    """
    GROUPS: tl.constexpr = HEADS // PACK
    tile = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    member = tl.load(tiles + tile * 4)
    if member < 0:
        return
    row_start = tl.load(tiles + tile * 4 + 1) * BLOCK_M
    begin = tl.load(tiles + tile * 4 + 2)
    end = tl.load(tiles + tile * 4 + 3)
    q_start = tl.load(members + member * 4)
    q_len = tl.load(members + member * 4 + 1)
    kv_len = tl.load(members + member * 4 + 2)
    kv_start = tl.load(members + member * 4 + 3)

    rows = row_start + tl.arange(0, BLOCK_M)
    tokens = rows // PACK
    heads = group * PACK + rows % PACK
    row_inside = rows < q_len * PACK
    kv_head = (group * PACK) // RATIO

    # Keys that the first and the last row's token stand on bound what the tile may see.
    diagonals = kv_len - q_len + tokens
    first = kv_len - q_len + row_start // PACK
    last = kv_len - q_len + tl.minimum(row_start + BLOCK_M - 1, q_len * PACK - 1) // PACK
    low = begin
    high = tl.minimum(end, kv_len)
    if LEFT is not None:
        low = tl.maximum(low, first - LEFT)
    if RIGHT is not None:
        high = tl.minimum(high, last + RIGHT + 1)
    block_low = low // BLOCK_N * BLOCK_N
    block_high = tl.maximum(tl.cdiv(high, BLOCK_N) * BLOCK_N, block_low)
    # Blocks from plain_low to plain_high - 1 are seen whole by every row.
    plain_low = block_low
    plain_high = high
    if LEFT is not None:
        plain_low = tl.cdiv(tl.maximum(low, last - LEFT), BLOCK_N) * BLOCK_N
        plain_low = tl.minimum(plain_low, block_high)
    if RIGHT is not None:
        plain_high = tl.minimum(high, first + RIGHT + 1)
    plain_high = tl.maximum(plain_high, 0) // BLOCK_N * BLOCK_N
    if masks is not None:
        plain_high = plain_low
    plain_high = tl.maximum(plain_high, plain_low)

    q_rows = q + (q_start + tokens).to(tl.int64) * stride_qt + heads * stride_qh
    q0 = _load(q_rows, tl.arange(0, BLOCK_D0), row_inside, DIM, BLOCK_D0 <= DIM, True)
    q1 = q0
    if BLOCK_D1 > 0:
        q1 = _load(q_rows, BLOCK_D0 + tl.arange(0, BLOCK_D1), row_inside, DIM, BLOCK_D0 + BLOCK_D1 <= DIM, True)
    if PAGE_SIZE == 0:
        k_base = k + kv_start.to(tl.int64) * stride_kp + kv_head * stride_kh
        v_base = v + kv_start.to(tl.int64) * stride_vp + kv_head * stride_vh
    else:
        k_base = k + kv_head * stride_kh
        v_base = v + kv_head * stride_vh
    table = tables
    if PAGE_SIZE > 0:
        table = tables + member.to(tl.int64) * stride_table
    row_slopes = None
    if slopes is not None:
        row_slopes = tl.load(slopes + heads)
    mask_rows = None
    if masks is not None:
        mask_rows = masks + tl.load(mask_starts + member) + tokens.to(tl.int64) * kv_len

    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], _NEG_INF, dtype=tl.float32)
    if LEFT is not None:
        acc, total, top = _attend(
            acc, total, top, q0, q1, k_base, v_base, table, block_low, plain_low, low, high, kv_len,
            diagonals, row_slopes, mask_rows, row_inside, scale, stride_kp, stride_ks, stride_vp, stride_vs,
            DIM, DIM_V, BLOCK_M, BLOCK_N, BLOCK_D0, BLOCK_D1, BLOCK_DV, PAGE_SIZE, LEFT, RIGHT, SOFTCAP, SHARED_V, True,
        )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q0, q1, k_base, v_base, table, plain_low, plain_high, low, high, kv_len,
        diagonals, row_slopes, mask_rows, row_inside, scale, stride_kp, stride_ks, stride_vp, stride_vs,
        DIM, DIM_V, BLOCK_M, BLOCK_N, BLOCK_D0, BLOCK_D1, BLOCK_DV, PAGE_SIZE, LEFT, RIGHT, SOFTCAP, SHARED_V, False,
    )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q0, q1, k_base, v_base, table, plain_high, block_high, low, high, kv_len,
        diagonals, row_slopes, mask_rows, row_inside, scale, stride_kp, stride_ks, stride_vp, stride_vs,
        DIM, DIM_V, BLOCK_M, BLOCK_N, BLOCK_D0, BLOCK_D1, BLOCK_DV, PAGE_SIZE, LEFT, RIGHT, SOFTCAP, SHARED_V, True,
    )  # fmt: skip

    if sinks is not None and part_out is None:
        total, top, shrink = _with_sink(total, top, tl.load(sinks + heads))
        acc = acc * shrink[:, None]
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    acc = acc * (v_scale / safe)[:, None]
    row_lse = tl.where(empty, _NEG_INF, (top + tl.log2(safe)) * _LN2)
    dims_v = tl.arange(0, BLOCK_DV)
    inside_v = row_inside[:, None] & (dims_v < DIM_V)[None, :]
    if part_out is None:
        at = (q_start + tokens).to(tl.int64) * HEADS + heads
        tl.store(out + at[:, None] * DIM_V + dims_v[None, :], acc.to(out.dtype.element_ty), mask=inside_v)
        tl.store(lse + at, row_lse, mask=row_inside)
    else:
        at = (tile * GROUPS + group).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(part_out + at[:, None] * DIM_V + dims_v[None, :], acc, mask=inside_v)
        tl.store(part_lse + at, row_lse, mask=row_inside)


@triton.jit(repr=lambda specialised: "attention_release_paged_combine")
def combine(
    out, lse, part_out, part_lse, parts, sinks,
    HEADS: tl.constexpr, PACK: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """One (token, head): the parts of its output weighted by exp(LSE of the part - LSE of all).

    parts int32 [tokens, 4]: query row, token of the member, first tile of the member, number of its splits.
    """
    GROUPS: tl.constexpr = HEADS // PACK
    entry = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    q_row = tl.load(parts + entry * 4)
    row = tl.load(parts + entry * 4 + 1) * PACK + head % PACK
    num_splits = tl.load(parts + entry * 4 + 3)
    first = tl.load(parts + entry * 4 + 2) + row // BLOCK_M * num_splits
    # Row of split s in the parts: `base + s * GROUPS * BLOCK_M`.
    base = (first * GROUPS + head // PACK).to(tl.int64) * BLOCK_M + row % BLOCK_M

    splits = tl.arange(0, MAX_SPLITS)
    lses = tl.load(part_lse + base + splits * (GROUPS * BLOCK_M), mask=splits < num_splits, other=_NEG_INF)
    top = tl.max(lses, 0) * _LOG2E
    if sinks is not None:
        sink = tl.load(sinks + head)
        top = tl.maximum(top, sink * _LOG2E)
    top = tl.where(top == _NEG_INF, 0.0, top)
    total = tl.sum(tl.exp2(lses * _LOG2E - top), 0)
    if sinks is not None:
        total += tl.exp2(sink * _LOG2E - top)
    safe = tl.where(total == 0.0, 1.0, total)

    dims = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], dtype=tl.float32)
    for start in tl.range(0, num_splits, BLOCK_S):
        some = start + tl.arange(0, BLOCK_S)
        at = base + some * (GROUPS * BLOCK_M)
        weights = tl.exp2(tl.load(part_lse + at, mask=some < num_splits, other=_NEG_INF) * _LOG2E - top) / safe
        inside = (some < num_splits)[:, None] & (dims < DIM_V)[None, :]
        part = tl.load(part_out + at[:, None] * DIM_V + dims[None, :], mask=inside, other=0.0)
        acc += tl.sum(part * weights[:, None], 0)
    at_out = q_row.to(tl.int64) * HEADS + head
    tl.store(out + at_out * DIM_V + dims, acc.to(out.dtype.element_ty), mask=dims < DIM_V)
    tl.store(lse + at_out, tl.where(total == 0.0, _NEG_INF, (top + tl.log2(safe)) * _LN2))


@triton.jit
def read_sum(words, sums, BLOCK: tl.constexpr):
    """Reads BLOCK words a program and keeps their sum: what reading alone costs (triton_tune)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + tl.program_id(0), tl.sum(tl.load(words + at), 0))
