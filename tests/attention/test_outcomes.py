"""What came of a measurement is told in a fixed vocabulary."""

from __future__ import annotations

import pytest
import torch

from attention.errors import UserError
from attention.outcomes import MeasurementError, outcome_of


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MeasurementError("warm_cache", "too fast"), "warm_cache"),
        (UserError("no such backend"), "refused"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "illegal_access"),
        (RuntimeError("CUDA error: misaligned address"), "illegal_access"),
        (RuntimeError("Ninja build failed. Ninja output: ..."), "compile_failed"),
        (RuntimeError("PTXAS error: Internal Triton PTX codegen error"), "compile_failed"),
        (ValueError("kv_len must be positive"), "failed"),
    ],
)
def test_an_exception_stands_for_one_outcome(error: Exception, said: str) -> None:
    assert outcome_of(error) == said
