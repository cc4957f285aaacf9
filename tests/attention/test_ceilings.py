"""The ceilings do the work that they say, on random data."""

from __future__ import annotations

import torch

from attention import ceilings
from attention.cases import AttentionCase

CASE = AttentionCase(
    phase="decode", batch="4q1s1k", heads_q=4, heads_kv=2, head_dim_qk=64, head_dim_vo=64, dtype="float32"
)


def test_a_product_counts_two_operations_a_term() -> None:
    one = ceilings.matmul(torch.float32, "cpu")
    one.call()
    a, b, out = one.held
    assert one.work == 2.0 * a.shape[0] ** 3
    torch.testing.assert_close(out, a @ b)
    assert a.std() > 0.5, "zeros draw less power"


def test_a_read_is_of_at_least_the_bytes_that_the_case_moves() -> None:
    one = ceilings.read(CASE, "cpu")
    assert CASE.num_bytes() <= one.work < CASE.num_bytes() + (1 << 16)
    assert one.held.nbytes == one.work
    assert one.held.std() > 0.5
    assert ceilings.read(CASE, "cpu", least_bytes=1 << 24).work == 1 << 24
