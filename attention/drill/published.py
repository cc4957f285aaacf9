"""The rules by which other projects accept an attention output, on the outputs that ours judges.

`exceeded` says of each rule whether it would reject. Sources as read in 2026 (facts: performance_and_numerics 3.1):

    allclose_1e-2   vLLM, tests/v1/attention/test_attention_backends.py: finite, and assert_close(1e-2, 1e-2)
    allclose_1e-3   FlashInfer, tests/attention for float16
    fa2             FlashAttention, tests/test_flash_attn.py: max error <= 2x that of eager attention in the dtype
    fa3             FlashAttention, hopper/test_flash_attn.py: the same (3x with softcap), plus
                    fwd_atol = 2 max|(ref + 0.3 - 0.3) - ref|
    flex            PyTorch, test/inductor/test_flex_attention.py: mean error <= 1.1x eager's (10x in float32;
                    20x in paged layouts)
    flashinfer_bench  flashinfer-bench, bench/utils.py: an element fails where abs > 1e-2 and rel > 1e-2; NaN fails

Their references: FlashAttention's and flashinfer-bench's are rounded to the dtype; FlexAttention's is float64.
"""

from __future__ import annotations

import math

import torch

from attention.backends.base import member_keys, positions_mask
from attention.replay.problems import Problem

RULES: tuple[str, ...] = ("allclose_1e-2", "allclose_1e-3", "fa2", "fa3", "flex", "flashinfer_bench")


def eager(problem: Problem) -> torch.Tensor:
    """Attention [T, H, D_vo] as eager PyTorch does it in the dtype: both products and the weights rounded to it,
    the softmax in float32 (FlashAttention's attention_ref with upcast=False, FlexAttention's math_attention)."""
    outs, row = [], 0
    for index, q_len in enumerate(problem.batch.q_lens):
        outs.append(_eager_member(problem, index, problem.q_THD[row : row + q_len]))
        row += q_len
    return torch.cat(outs)


def _eager_member(problem: Problem, index: int, q_QHD: torch.Tensor) -> torch.Tensor:
    spec, batch = problem.spec, problem.batch
    kv_len, ratio = batch.kv_lens[index], spec.heads_q // spec.heads_kv
    k, v = (member_keys(cache, batch, index).float() for cache in (problem.k, problem.v))
    k_HLD = (k * spec.k_scale).to(spec.dtype).transpose(0, 1).repeat_interleave(ratio, 0)
    v_HLD = (v * spec.v_scale).to(spec.dtype).transpose(0, 1).repeat_interleave(ratio, 0)
    s_HQL = (q_QHD.transpose(0, 1) @ k_HLD.transpose(1, 2)).float() * spec.scale
    if spec.softcap is not None:
        s_HQL = spec.softcap * torch.tanh(s_HQL / spec.softcap)
    if spec.alibi_slopes is not None:
        diagonal = torch.arange(kv_len - len(q_QHD), kv_len)[:, None]
        slopes = torch.tensor(spec.alibi_slopes)[:, None, None]
        s_HQL = s_HQL - slopes * (diagonal - torch.arange(kv_len)).abs()
    allowed = positions_mask(len(q_QHD), kv_len, spec, q_QHD.device)
    for mask in (allowed, None if batch.masks is None else batch.masks[index]):
        if mask is not None:
            s_HQL = s_HQL.masked_fill(~mask, -math.inf)
    if spec.sinks is not None:
        sinks = torch.tensor(spec.sinks)[:, None, None].expand(-1, len(q_QHD), 1)
        s_HQL = torch.cat([s_HQL, sinks], -1)
    p_HQL = torch.softmax(s_HQL, -1).nan_to_num(0.0).to(spec.dtype)[..., :kv_len]
    return (p_HQL @ v_HLD).transpose(0, 1)


def exceeded(out_THD: torch.Tensor, eager_THD: torch.Tensor, problem: Problem) -> dict[str, bool]:
    """Rule -> whether it rejects the output; what is not finite where the reference is, every rule rejects."""
    exact, dtype = problem.truth.out_QHD, problem.spec.dtype
    out, ref = out_THD.double(), exact.to(dtype).double()
    if not bool(torch.isfinite(out).all()):
        return dict.fromkeys(RULES, True)
    error, eager_error = (out - ref).abs(), (eager_THD.double() - ref).abs()
    rounded = exact.to(dtype)
    fwd_atol = 2 * float((rounded + 0.3 - 0.3 - rounded).abs().max())
    times = 2 if problem.spec.softcap is None else 3
    fudge = (20.0 if problem.batch.paged else 10.0) if dtype == torch.float32 else 1.1
    return {
        "allclose_1e-2": bool((error > 1e-2 + 1e-2 * ref.abs()).any()),
        "allclose_1e-3": bool((error > 1e-3 + 1e-3 * ref.abs()).any()),
        "fa2": float(error.max()) > 2 * float(eager_error.max()),
        "fa3": float(error.max()) > times * float(eager_error.max()) + fwd_atol,
        "flex": float((out - exact).abs().mean()) > fudge * float((eager_THD.double() - exact).abs().mean()),
        "flashinfer_bench": bool(((error > 1e-2) & (error > 1e-2 * ref.abs())).any()),
    }
