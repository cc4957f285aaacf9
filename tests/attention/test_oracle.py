"""The oracle: float64 softmax attention, the same in any chunking, defined where a row sees nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attention.backends import oracle
from attention.backends.base import AttentionSpec

SPEC = AttentionSpec(4, 2, 16, 24, torch.bfloat16, 1 / 4)


def tensors(q_len: int, kv_len: int, spec: AttentionSpec = SPEC) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (
        (q_len, spec.heads_q, spec.head_dim_qk),
        (kv_len, spec.heads_kv, spec.head_dim_qk),
        (kv_len, spec.heads_kv, spec.head_dim_vo),
    )
    q, k, v = (torch.randn(shape, generator=generator).to(spec.dtype) for shape in shapes)
    return q, k, v


def by_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> tuple[torch.Tensor, ...]:
    """One (row, head) at a time, over the keys that it sees."""
    left = spec.window[0]
    out = torch.zeros(q.shape[0], spec.heads_q, spec.head_dim_vo, dtype=torch.float64)
    lse = torch.zeros(q.shape[:2], dtype=torch.float64)
    for row in range(q.shape[0]):
        own = k.shape[0] - q.shape[0] + row
        low = 0 if left is None else max(0, own - left)
        high = own + 1 if spec.causal else k.shape[0]
        for head in range(spec.heads_q):
            group = head // (spec.heads_q // spec.heads_kv)
            logits = k[low:high, group].double() @ q[row, head].double() * spec.scale
            if spec.softcap is not None:
                logits = spec.softcap * torch.tanh(logits / spec.softcap)
            out[row, head] = torch.softmax(logits, 0) @ v[low:high, group].double()
            lse[row, head] = torch.logsumexp(logits, 0)
    return out, lse


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, causal=False),
        replace(SPEC, window=(5, 0)),
        replace(SPEC, softcap=2.0),
        replace(SPEC, heads_kv=1),
        replace(SPEC, heads_kv=4, dtype=torch.float32),
    ],
)
@pytest.mark.parametrize(("q_len", "kv_len"), [(9, 9), (1, 33), (7, 20)])
def test_it_is_softmax_attention_in_float64(spec: AttentionSpec, q_len: int, kv_len: int) -> None:
    q, k, v = tensors(q_len, kv_len, spec)
    out, lse = by_softmax(q, k, v, spec)
    truth = oracle.attend(q, k, v, spec)
    torch.testing.assert_close(truth.out_QHD, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(truth.lse_QH, lse, rtol=1e-12, atol=1e-12)


def test_chunking_does_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(37, 50)
    whole = oracle.attend(q, k, v, SPEC)
    monkeypatch.setattr(oracle, "_CHUNK_SCORES", 4 * 50 * 5)
    parts = oracle.attend(q, k, v, SPEC)
    for name in ("out_QHD", "lse_QH", "rounded_QHD"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-13, atol=1e-13)


def test_a_row_that_sees_no_key_is_zero_with_an_lse_of_minus_infinity() -> None:
    q, k, v = tensors(3, 2)  # bottom-right: the first of three queries stands before the first key
    truth = oracle.attend(q, k, v, SPEC)
    assert not truth.out_QHD[0].any()
    assert not truth.rounded_QHD[0].any()
    assert torch.equal(truth.lse_QH[0], torch.full((4,), -math.inf, dtype=torch.float64))
    assert torch.isfinite(truth.lse_QH[1:]).all()


def test_a_member_without_keys_is_all_empty_rows() -> None:
    truth = oracle.attend(*tensors(2, 0), SPEC)
    assert truth.out_QHD.shape == truth.rounded_QHD.shape == (2, 4, 24)
    assert not truth.out_QHD.any()
    assert torch.equal(truth.lse_QH, torch.full((2, 4), -math.inf, dtype=torch.float64))


def test_rounding_is_of_the_size_of_the_dtype() -> None:
    errors = {}
    for dtype, most in ((torch.float32, 2), (torch.bfloat16, 1)):  # float32: of its sums, not of one rounding
        spec = replace(SPEC, dtype=dtype)
        truth = oracle.attend(*tensors(64, 64, spec), spec)
        errors[dtype] = float((truth.rounded_QHD - truth.out_QHD).norm() / truth.out_QHD.norm())
        assert 0.05 * torch.finfo(dtype).eps < errors[dtype] < most * torch.finfo(dtype).eps
    assert errors[torch.bfloat16] > 1e4 * errors[torch.float32]


def test_float32_is_judged_by_the_error_of_float32_sums_which_grows_with_the_length() -> None:
    """A decode over 8,192 keys of which one decides: its sum has an error that no single rounding has."""
    spec = replace(SPEC, dtype=torch.float32)
    q, k, v = tensors(1, 8192, spec)
    k[5] = 8 * q[0, :2]
    truth = oracle.attend(q, k, v, spec)
    own = (truth.rounded_QHD - truth.out_QHD).norm()
    error = (oracle.attend(q, k.flip(0), v.flip(0), spec).rounded_QHD - truth.out_QHD).norm()
    assert error < 5 * own  # the keys in another order
    assert own > 3 * (truth.out_QHD.float().double() - truth.out_QHD).norm()


def test_float32_is_not_judged_by_tf32() -> None:
    spec = replace(SPEC, dtype=torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(RuntimeError, match="float32 products run in TF32 here"):
            oracle.attend(*tensors(2, 2, spec), spec)
        oracle.attend(*tensors(2, 2), SPEC)
    finally:
        torch.set_float32_matmul_precision(before)
