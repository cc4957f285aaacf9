"""The ceilings of a machine as calls to be timed: a large matrix product, and a read of memory.

Both on random data: zeros draw less power, and a matrix product of them runs a sixth faster on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attention.cases import AttentionCase
from attention.timing import Call

_MATMUL_N = {"cuda": 8192, "cpu": 512}
_READ_BLOCK = 8192  # 32-bit words a program reads
_LEAST_READ = 1 << 16


@dataclass(frozen=True)
class Ceiling:
    """A call and the work that it does: FLOPs of a product, bytes of a read."""

    call: Call
    work: float
    held: Any  # its tensors


def matmul(dtype: torch.dtype, device: str) -> Ceiling:
    """A square product in the case's dtype; its size keeps a GPU busy and a CPU core for milliseconds."""
    n = _MATMUL_N["cuda" if device.startswith("cuda") else "cpu"]
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in "ab")
    out = torch.empty(n, n, device=device, dtype=dtype)
    return Ceiling(lambda: torch.mm(a, b, out=out), 2.0 * n**3, (a, b, out))


def num_words(case: AttentionCase, least_bytes: int) -> int:
    """32-bit words of the read beside a case: as many bytes as it moves, `least_bytes` at least."""
    words = max(case.num_bytes(), least_bytes, _LEAST_READ) // 4
    return words + -words % _READ_BLOCK


def read(case: AttentionCase, device: str, least_bytes: int = 0) -> Ceiling:
    """A read-only reduction over `num_words`."""
    num = num_words(case, least_bytes)
    words = torch.randn(num, device=device)
    if not device.startswith("cuda"):
        return Ceiling(lambda: words.sum(), 4.0 * num, words)
    from attention.backends.triton_kernels import read_sum

    grid = (num // _READ_BLOCK,)
    as_ints, sums = words.view(torch.int32), torch.empty(grid, dtype=torch.int32, device=device)

    def call() -> None:
        read_sum[grid](as_ints, sums, BLOCK=_READ_BLOCK, num_warps=8)

    return Ceiling(call, 4.0 * num, (words, sums))
