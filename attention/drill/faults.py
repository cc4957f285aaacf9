"""How each fault does what it does: small functions over what is read, and over what is written.

Pure, and right for float64 as for a kernel's dtypes: the same function is injected into both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from attention.backends.base import AttentionSpec, Batch
from attention.drill.emulator import Read
from attention.drill.kernel import Member, Reader, Scene, Written


def key_dropped(place: Callable[[int, int], int]) -> Reader:
    """The key at `place(kv_len, tile)` is seen by no query."""

    def drop(read: Read, member: Member) -> Read:
        kv_len = len(read.k_LHD)
        allowed = read.allowed_QL.clone()
        allowed[:, min(place(kv_len, member.tile), kv_len - 1)] = False
        return replace(read, allowed_QL=allowed)

    return drop


def stale_page(read: Read, member: Member) -> Read:
    """A page in the middle holds what was there before it was handed to this member."""
    tile, kv_len = member.tile, len(read.k_LHD)
    page = slice(kv_len // 2 // tile * tile, kv_len // 2 // tile * tile + tile)
    generator = torch.Generator().manual_seed(member.seed + 2 + member.index)

    def old(keys_LHD: torch.Tensor) -> torch.Tensor:
        # One draw a KV head, repeated as the heads of the queries repeat it.
        found = keys_LHD.clone()
        heads_kv = read.spec.heads_kv
        length, heads, dim = found[page].shape
        drawn = torch.randn(length, heads_kv, dim, generator=generator).to(found.dtype)
        found[page] = drawn.repeat_interleave(heads // heads_kv, 1)
        return found

    return replace(read, k_LHD=old(read.k_LHD), v_LHD=old(read.v_LHD))


def top_left_causal(read: Read, member: Member) -> Read:
    """Row i sees keys 0 .. i, as PyTorch's is_causal reads (attention.cases.causal_of_top_left)."""
    q_len, kv_len = read.allowed_QL.shape
    return replace(read, allowed_QL=torch.ones(q_len, kv_len, dtype=torch.bool).tril())


def mask_ignored(read: Read, member: Member) -> Read:
    """The custom mask is not applied; causal and window are."""
    q_len, kv_len = read.allowed_QL.shape
    return replace(read, allowed_QL=torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len))


def heads_interleaved(read: Read, member: Member) -> Read:
    """Query head h reads KV head h % G instead of h // (H / G)."""
    spec = read.spec
    stored = torch.arange(spec.heads_q) % spec.heads_kv * (spec.heads_q // spec.heads_kv)
    return replace(read, k_LHD=read.k_LHD[:, stored], v_LHD=read.v_LHD[:, stored])


def slot_leaks(read: Read, member: Member) -> Read:
    """The slot after a member's last key counts as a key of every query; nothing where there is none."""
    problem = member.problem
    after = [_slot_after(cache, problem.batch, member.index) for cache in (problem.k, problem.v)]
    if after[0] is None or after[1] is None:
        return read
    ratio = read.spec.heads_q // read.spec.heads_kv
    k, v = (slot.to(read.spec.dtype).repeat_interleave(ratio, 0)[None] for slot in after if slot is not None)
    seen = torch.ones(len(read.q_QHD), 1, dtype=torch.bool)
    return replace(
        read,
        k_LHD=torch.cat([read.k_LHD, k]),
        v_LHD=torch.cat([read.v_LHD, v]),
        allowed_QL=torch.cat([read.allowed_QL, seen], 1),
    )


def _slot_after(cache: torch.Tensor, batch: Batch, index: int) -> torch.Tensor | None:
    """The slot [G, D] in which a kernel looks for the key after a member's last; None past the end of memory."""
    kv_len = batch.kv_lens[index]
    if batch.layout == "contiguous":
        return cache[index, kv_len] if kv_len < cache.shape[1] else None
    if batch.layout == "ragged":
        end = sum(batch.kv_lens[: index + 1])
        return cache[end] if end < len(cache) else None
    page = batch.page_size or 1
    owned, table = {page for table in batch.block_tables for page in table}, batch.block_tables[index]
    free = next(number for number in range(len(cache)) if number not in owned)
    number = table[kv_len // page] if kv_len // page < len(table) else free
    paged = cache if batch.layout == "paged_nhd" else cache.transpose(1, 2)
    return paged[number, kv_len % page]


def scaled(factor: float) -> Callable[[AttentionSpec], AttentionSpec]:
    return lambda spec: replace(spec, scale=spec.scale * factor)


def diagonal_moved(spec: AttentionSpec) -> AttentionSpec:
    """The causal bound one key too far: every query sees the key after its own."""
    return replace(spec, causal=False, window=(spec.window[0], 1))


def window_moved(spec: AttentionSpec) -> AttentionSpec:
    """A Hugging Face window W taken for ours, which does not count the current token: one key too many."""
    left, right = spec.window
    return replace(spec, window=(None if left is None else left + 1, right))


def without(**fields: object) -> Callable[[AttentionSpec], AttentionSpec]:
    """Some fields of the spec as if they had not been given."""
    return lambda spec: replace(spec, **fields)  # type: ignore[arg-type]


# Writing.


def row_of_nan(written: Written, scene: Scene) -> Written:
    out = written.out_THD.clone()
    token, head = _somewhere(out, scene.seed)
    out[token, head] = math.nan
    return replace(written, out_THD=out)


def rows_of_zeros(written: Written, scene: Scene) -> Written:
    """The last tile of queries is never written, in memory that was zero."""
    out = written.out_THD.clone()
    out[_last_tile(out) :] = 0
    return replace(written, out_THD=out)


def rows_of_before(written: Written, scene: Scene) -> Written:
    """The last tile of queries is never written, and holds what the step before had left."""
    out = written.out_THD.clone()
    start = _last_tile(out)
    out[start:] = scene.before()[start:]
    return replace(written, out_THD=out)


def wrong_rows(written: Written, scene: Scene) -> Written:
    """One row in a thousand, one at least, holds the row of another KV head."""
    out = written.out_THD.clone()
    tokens, heads, _ = out.shape
    ratio = heads // scene.problem.spec.heads_kv
    for number in range(max(1, tokens * heads // 1000)):
        token, head = _somewhere(out, scene.seed + number)
        out[token, head] = written.out_THD[token, (head + ratio) % heads]
    return replace(written, out_THD=out)


def one_element_off(written: Written, scene: Scene) -> Written:
    """The largest element is off in the lower half of its digits; the rest of its row is right."""
    out = written.out_THD.clone()
    at = out.abs().argmax()
    out.view(-1)[at] *= 1 + math.sqrt(torch.finfo(scene.problem.spec.dtype).eps)
    return replace(written, out_THD=out)


def lse_in_base2(written: Written, scene: Scene) -> Written:
    """The output is right; the LSE is returned as FlashInfer's native kernels give it."""
    return replace(written, lse_TH=None if written.lse_TH is None else written.lse_TH / math.log(2))


def _last_tile(out_THD: torch.Tensor) -> int:
    """First token of the last tile of 16 queries."""
    return (len(out_THD) - 1) // 16 * 16


def _somewhere(out_THD: torch.Tensor, seed: int) -> tuple[int, int]:
    generator = torch.Generator().manual_seed(seed)
    tokens, heads, _ = out_THD.shape
    found = int(torch.randint(tokens * heads, (1,), generator=generator))
    return found // heads, found % heads
