"""Seeded problems of the tensor layer: inputs on a paged cache, with their truth.

Three kinds of inputs. `normal` is N(0, 1). `needle` puts a key aligned with each query at the
first, the last and a page-boundary position, with position-coded V: random inputs average a lost
key away (0.7 % of the output at 16k keys), a needle does not (43 %). `large_logit` has logits of
several tens, where a kernel that rescales wrongly overflows.
Unused slots of the pages hold NaN, and pages are handed out in shuffled order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attention.backends.base import AttentionSpec, Batch
from attention.backends.oracle import Truth, attend
from attention.cases import AttentionCase, Inputs


@dataclass(frozen=True)
class Problem:
    """A batch on a paged cache, and the exact answer for all its tokens."""

    batch: Batch
    spec: AttentionSpec
    q_THD: torch.Tensor
    k_NPGD: torch.Tensor
    v_NPGD: torch.Tensor
    truth: Truth


def spec_of(case: AttentionCase) -> AttentionSpec:
    """The per-layer part of a case, with the default scale."""
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
    )


def make(case: AttentionCase, inputs: Inputs, seed: int, *, device: str = "cpu") -> Problem:
    """The problem of a case (paged NHD) for one kind of inputs and a seed; the same on every machine."""
    if case.page_size is None:
        raise ValueError("tensor problems live on a paged cache; give the case a page size")
    spec, page = spec_of(case), case.page_size
    generator = torch.Generator().manual_seed(seed)
    pages_of = [-(-m.kv_len // page) for m in case.members]
    order = torch.randperm(sum(pages_of) + 1, generator=generator).tolist()
    k_NPGD = torch.full((len(order), page, spec.heads_kv, spec.head_dim_qk), math.nan, dtype=spec.dtype)
    v_NPGD = torch.full((len(order), page, spec.heads_kv, spec.head_dim_vo), math.nan, dtype=spec.dtype)
    tables, queries, truths, used = [], [], [], 0
    for member, count in zip(case.members, pages_of, strict=True):
        table = tuple(order[used : used + count])
        used += count
        q, k, v = _member(member.q_len, member.kv_len, spec, page, inputs, generator)
        flat = torch.tensor([table[i // page] * page + i % page for i in range(member.kv_len)], dtype=torch.long)
        k_NPGD.view(-1, *k.shape[1:])[flat] = k
        v_NPGD.view(-1, *v.shape[1:])[flat] = v
        tables.append(table)
        queries.append(q)
        truths.append(attend(q, k, v, spec))
    batch = Batch(tuple(m.q_len for m in case.members), tuple(m.kv_len for m in case.members), tuple(tables), page)
    truth = Truth(
        torch.cat([t.out_QHD for t in truths]).to(device),
        torch.cat([t.lse_QH for t in truths]).to(device),
        torch.cat([t.rounded_QHD for t in truths]).to(device),
    )
    return Problem(batch, spec, torch.cat(queries).to(device), k_NPGD.to(device), v_NPGD.to(device), truth)


def _member(
    q_len: int, kv_len: int, spec: AttentionSpec, page: int, inputs: Inputs, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q_QHD = normal(q_len, spec.heads_q, spec.head_dim_qk)
    k_LGD = normal(kv_len, spec.heads_kv, spec.head_dim_qk)
    v_LGD = normal(kv_len, spec.heads_kv, spec.head_dim_vo)
    if inputs == "large_logit":
        q_QHD, k_LGD = q_QHD * 4, k_LGD * 2
    if inputs == "needle":
        ratio = spec.heads_q // spec.heads_kv
        # A logit near ln(kv_len) lets one key weigh about as much as all the others.
        wanted = math.log(max(2, kv_len)) / spec.scale
        # The last query gets the last key: under a causal mask no other query sees it.
        for row, key in enumerate(sorted({0, min(page, kv_len - 1), kv_len - 1}, reverse=True)):
            target = q_QHD[max(0, q_len - 1 - row)].view(spec.heads_kv, ratio, -1).mean(1)
            k_LGD[key] = target * (wanted / target.square().sum(-1, keepdim=True))
        v_LGD += torch.linspace(-1, 1, kv_len)[:, None, None]
    return q_QHD.to(spec.dtype), k_LGD.to(spec.dtype), v_LGD.to(spec.dtype)
