"""What the kernels of the FlashInfer stand-in compute, in float64; `flashinfer` has the calls around it."""

from __future__ import annotations

import math

import torch

SENTINEL = -5e4  # data/include/flashinfer/math.cuh: inf


def attention(
    q_QHD: torch.Tensor,
    k_LGD: torch.Tensor,
    v_LGD: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    softcap: float = 0.0,
    alibi: bool = False,
    mask_QL: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One member in float64: output [Q, H, D] and base-2 LSE [Q, H]."""
    (q_len, heads, _), kv_len = q_QHD.shape, k_LGD.shape[0]
    ratio = heads // k_LGD.shape[1]
    k_HLD, v_HLD = (t.double().transpose(0, 1).repeat_interleave(ratio, 0) for t in (k_LGD, v_LGD))
    s_HQL = q_QHD.double().transpose(0, 1) @ k_HLD.transpose(1, 2) * scale
    row_Q1, key_1L = torch.arange(q_len)[:, None], torch.arange(kv_len)[None]
    if alibi:
        s_HQL = s_HQL + slopes_of(heads)[:, None, None] * (key_1L - row_Q1)
    if softcap:
        s_HQL = softcap * torch.tanh(s_HQL / softcap)
    seen_QL = torch.ones(q_len, kv_len, dtype=torch.bool) if mask_QL is None else mask_QL
    if causal and mask_QL is None:
        seen_QL = seen_QL & (key_1L <= row_Q1 + kv_len - q_len)
    if window_left >= 0:
        seen_QL = seen_QL & (key_1L >= row_Q1 + kv_len - q_len - window_left)
    s_HQL = s_HQL.masked_fill(~seen_QL, -math.inf)
    logits = s_HQL if sinks is None else torch.cat([s_HQL, sinks.double()[:, None, None].expand(-1, q_len, 1)], -1)
    lse_HQ = torch.logsumexp(logits, -1) if logits.shape[-1] else torch.full((heads, q_len), -math.inf).double()
    p_HQL = torch.exp(s_HQL - torch.where(lse_HQ.isinf(), 0.0, lse_HQ)[..., None])
    lse_2 = torch.where(seen_QL.any(-1)[None], lse_HQ / math.log(2), SENTINEL)
    return (p_HQL @ v_HLD).transpose(0, 1), lse_2.transpose(0, 1).float()


def slopes_of(heads: int) -> torch.Tensor:
    """utils.py get_alibi_slopes."""
    n = 2 ** math.floor(math.log2(heads))
    slopes = torch.pow(2.0 ** (-8.0 / n), torch.arange(1, 1 + n))
    if n < heads:
        slopes = torch.cat([slopes, torch.pow(2.0 ** (-4.0 / n), torch.arange(1, 1 + 2 * (heads - n), 2))])
    return slopes.double()


def gather(cache: torch.Tensor, layout: str, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
    """Keys [kv_len, G, D] of one member; only pages that it names are read."""
    paged = cache if layout == "NHD" else cache.transpose(1, 2)
    return paged[pages.long()].reshape(-1, *paged.shape[2:])[:kv_len]


def kv_lens_of(indptr: torch.Tensor, last: torch.Tensor, page_size: int) -> torch.Tensor:
    """page.py get_seq_lens."""
    return torch.clamp(indptr[1:] - indptr[:-1] - 1, min=0) * page_size + last
