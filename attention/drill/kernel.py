"""The pseudo-kernel over a whole problem: reads a batch's members, computes, writes; and where a fault enters.

A fault is a change at one of three places: what is read of a member, what happens in the loop, what is written.
Sound is the fault that changes nothing. Every random choice of a fault comes from the problem's seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attention.backends.base import AttentionSpec, member_keys, positions_mask
from attention.drill.emulator import RIGHT, Defects, Numbers, Read, Variant, attend
from attention.replay.problems import Problem


@dataclass(frozen=True)
class Member:
    """Which member of which problem is read, for faults that need more than what was read rightly."""

    problem: Problem
    index: int
    seed: int

    @property
    def tile(self) -> int:
        """Keys of a page, or of the tile that a kernel without pages copies."""
        return self.problem.batch.page_size or 16


@dataclass(frozen=True)
class Written:
    """What a kernel leaves in memory: out_THD in the dtype; lse_TH natural, float32, None where it gives none."""

    out_THD: torch.Tensor
    lse_TH: torch.Tensor | None


Reader = Callable[[Read, Member], Read]
Writer = Callable[[Written, "Scene"], Written]


@dataclass(frozen=True)
class Scene:
    """What a fault of writing may need: the problem, its seed, and what the step before had left (out_THD)."""

    problem: Problem
    seed: int
    before: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Fault:
    """One fault; as it stands, none. `variant` is the one in which the fault can show."""

    misread: Callable[[AttentionSpec], AttentionSpec] | None = None
    reader: Reader | None = None
    defects: Defects = RIGHT
    writer: Writer | None = None
    variant: Variant | None = None
    race: bool = False  # every other call takes the blocks in another order

    @property
    def outside(self) -> bool:
        """Whether it sits in the arguments or in the output alone, so that it goes around any backend."""
        return self.reader is None and self.defects == RIGHT and self.variant is None and not self.race


SOUND = Fault()
_USUAL = Variant()


def run(
    problem: Problem,
    numbers: Numbers,
    *,
    seed: int,
    variant: Variant = _USUAL,
    fault: Fault = SOUND,
    call: int = 0,
) -> Written:
    """One call of the kernel; `call` counts calls on the same inputs."""
    variant = fault.variant or variant
    if fault.race and call % 2:
        variant = replace(variant, reverse=not variant.reverse)
    written = _computed(problem, numbers, seed, variant, fault)

    def before(q_THD: torch.Tensor) -> torch.Tensor:
        return _computed(replace(problem, q_THD=q_THD), numbers, seed, variant, SOUND).out_THD

    return spoilt(written, problem, seed, fault, before)


def spoilt(
    written: Written, problem: Problem, seed: int, fault: Fault, before: Callable[[torch.Tensor], torch.Tensor]
) -> Written:
    """What a fault of writing leaves of an output; `before` computes the step before from its queries q_THD."""
    if fault.writer is None:
        return written
    return fault.writer(written, Scene(problem, seed, lambda: before(_other_queries(problem, seed))))


def _computed(problem: Problem, numbers: Numbers, seed: int, variant: Variant, fault: Fault) -> Written:
    spec = problem.spec if fault.misread is None else fault.misread(problem.spec)
    outs, lses, row = [], [], 0
    for index, q_len in enumerate(problem.batch.q_lens):
        read = _read(problem, index, problem.q_THD[row : row + q_len], spec)
        if fault.reader is not None:
            read = fault.reader(read, Member(problem, index, seed))
        out, lse = attend(read, variant, numbers, fault.defects)
        outs.append(out)
        lses.append(lse)
        row += q_len
    return Written(torch.cat(outs), torch.cat(lses))


def _read(problem: Problem, index: int, q_QHD: torch.Tensor, spec: AttentionSpec) -> Read:
    """What a sound kernel reads of one member."""
    batch = problem.batch
    q_len, kv_len = batch.q_lens[index], batch.kv_lens[index]
    ratio = spec.heads_q // spec.heads_kv
    k, v = (member_keys(cache, batch, index) for cache in (problem.k, problem.v))
    allowed = positions_mask(q_len, kv_len, spec, q_QHD.device)
    if allowed is None:
        allowed = torch.ones(q_len, kv_len, dtype=torch.bool)
    if batch.masks is not None:
        allowed = allowed & batch.masks[index]
    # The CPU repeats no float8; what is stored is exact in bfloat16 and every other dtype.
    if k.dtype.itemsize == 1:
        k, v = k.to(spec.dtype), v.to(spec.dtype)
    heads = torch.arange(spec.heads_q) // ratio
    return Read(q_QHD, k[:, heads], v[:, heads], allowed, torch.arange(kv_len - q_len, kv_len), spec)


def _other_queries(problem: Problem, seed: int) -> torch.Tensor:
    """Queries [T, H, D] of the step before, over the same cache."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(problem.q_THD.shape, generator=generator).to(problem.q_THD.dtype)
