"""Seeded problems of the tensor layer: inputs in the case's layout, with their truth.

The kinds of inputs stand in `attention.replay.inputs`.
Slots that no member owns hold NaN, and pages are handed out in shuffled order. Sinks are large enough to matter,
ALiBi slopes are those of models, quantised KV has scales of 1/4 and 1/2, and a custom mask hides a third of the keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from attention.backends.base import AttentionSpec, Batch, alibi_slopes
from attention.backends.oracle import Truth
from attention.cases import AttentionCase, Inputs
from attention.replay.draws import Draws
from attention.replay.inputs import Captured, Size, draw, num_drawn, stored
from attention.replay.members import Member
from attention.replay.truths import Oracle, compute


@dataclass(frozen=True)
class Problem:
    """A batch with its keys in the layout of the batch, and the exact answer for all its tokens."""

    batch: Batch
    spec: AttentionSpec
    q_THD: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    truth: Truth


def spec_of(case: AttentionCase) -> AttentionSpec:
    """The per-layer part of a case, with the default scale, and slopes, sinks and KV scales that matter."""
    heads = range(case.heads_q)
    quantised = case.kv_dtype not in ("auto", case.dtype)
    return AttentionSpec(
        heads_q=case.heads_q,
        heads_kv=case.heads_kv,
        head_dim_qk=case.head_dim_qk,
        head_dim_vo=case.head_dim_vo,
        dtype=getattr(torch, case.dtype),
        scale=1 / math.sqrt(case.head_dim_qk),
        causal=case.causal,
        window=case.window,
        softcap=case.softcap,
        kv_dtype=getattr(torch, case.kv_dtype) if quantised else None,
        k_scale=0.25 if quantised else 1.0,
        v_scale=0.5 if quantised else 1.0,
        alibi_slopes=alibi_slopes(case.heads_q) if case.alibi else None,
        sinks=tuple(2.0 + 0.5 * (h % 4) for h in heads) if case.sinks else None,
    )


def members_of(
    case: AttentionCase,
    spec: AttentionSpec,
    inputs: Inputs,
    seed: int,
    captured: Captured | None = None,
    device: str = "cpu",
) -> list[Member]:
    """Seeded inputs of every member of a case; the same draws on every machine and device.

    `captured` is what the inputs `activations` are cut from.
    """
    draws = Draws(seed, device)
    if inputs != "activations":
        draws.ahead(sum(num_drawn(Size(one.q_len, one.kv_len, 0), spec) for one in case.members))
    drawn, masks = [], []
    for one in case.members:
        drawn.append(draw(Size(one.q_len, one.kv_len, case.page_size or 16), spec, inputs, draws, captured))
        masks.append(draws.chance(2 / 3, one.q_len, one.kv_len) if case.custom_mask else None)
    # Stored together: a GPU counts launches.
    tensors = stored(spec, *(torch.cat(parts) for parts in zip(*drawn, strict=True)))
    lens = [[m.q_len for m in case.members], *2 * [[m.kv_len for m in case.members]]]
    parts = (tensor.split(sizes) for tensor, sizes in zip(tensors, lens, strict=True))
    return [Member(q, k, v, mask) for q, k, v, mask in zip(*parts, masks, strict=True)]


def make(
    case: AttentionCase,
    inputs: Inputs,
    seed: int,
    *,
    device: str = "cpu",
    captured: Captured | None = None,
    oracle: Oracle = compute,
) -> Problem:
    """The problem of a case for one kind of inputs and a seed; its draws are the same on every machine and device."""
    spec = spec_of(case)
    members = members_of(case, spec, inputs, seed, captured, device)
    return build(case, spec, members, seed=seed, device=device, oracle=oracle)


def build(
    case: AttentionCase,
    spec: AttentionSpec,
    members: list[Member],
    *,
    seed: int = 0,
    device: str = "cpu",
    poison: tuple[float, float] = (math.nan, math.nan),
    oracle: Oracle = compute,
) -> Problem:
    """The problem of given members in the case's layout, with its truth.

    Lengths are those of the case; `seed` shuffles the pages; slots that no member owns hold `poison` in K and V.
    """
    page = case.page_size
    tables = _tables(case, page, torch.Generator().manual_seed(seed)) if page is not None else ()
    batch = Batch(
        tuple(m.q_len for m in case.members),
        tuple(m.kv_len for m in case.members),
        tables,
        page,
        layout=case.layout,
        masks=tuple(m.mask_QL.to(device) for m in members if m.mask_QL is not None) if case.custom_mask else None,
    )
    k = _laid_out(batch, [m.k_LGD for m in members], poison[0]).to(device)
    v = _laid_out(batch, [m.v_LGD for m in members], poison[1]).to(device)
    q = torch.cat([m.q_QHD for m in members]).to(device)
    return Problem(batch, spec, q, k, v, oracle(members, spec, device))


def _tables(case: AttentionCase, page: int, generator: torch.Generator) -> tuple[tuple[int, ...], ...]:
    """Pages of every member, in shuffled order; one page belongs to nobody."""
    counts = [-(-m.kv_len // page) for m in case.members]
    order = torch.randperm(sum(counts) + 1, generator=generator).tolist()
    tables, used = [], 0
    for count in counts:
        tables.append(tuple(order[used : used + count]))
        used += count
    return tuple(tables)


def _laid_out(batch: Batch, members: list[torch.Tensor], poison: float) -> torch.Tensor:
    """Keys (or values) [kv_len, G, D] of all members in the batch's layout; what nobody owns holds `poison`."""
    (heads, dim), dtype = members[0].shape[1:], members[0].dtype
    if batch.layout == "ragged":
        return torch.cat(members)
    if batch.layout == "contiguous":
        dense = _full((len(members), max(batch.kv_lens), heads, dim), poison, members[0])
        for row, member in zip(dense, members, strict=True):
            row[: len(member)] = member
        return dense
    page = batch.page_size or 1
    cache = _full((sum(map(len, batch.block_tables)) + 1, page, heads, dim), poison, members[0])
    # The CPU has no indexed copy of float8; bytes are bytes.
    raw = torch.uint8 if dtype.itemsize == 1 else dtype
    flat = cache.view(raw).view(-1, heads, dim)
    flat[_slots(batch, page, cache.device)] = torch.cat(members).view(raw)
    return cache if batch.layout == "paged_nhd" else cache.transpose(1, 2).contiguous()


def _slots(batch: Batch, page: int, device: torch.device) -> torch.Tensor:
    """Where each key of all members lies; a GPU copies it by itself."""
    slots = [
        np.array(table, np.int64)[at // page] * page + at % page
        for table, kv_len in zip(batch.block_tables, batch.kv_lens, strict=True)
        for at in [np.arange(kv_len)]
    ]
    host = torch.from_numpy(np.concatenate(slots))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _full(shape: tuple[int, ...], value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float32, device=like.device).to(like.dtype)
