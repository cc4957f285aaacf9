"""`flex_attention:triton`: torch.nn.attention.flex_attention, compiled once a process and again for a new structure.

Lengths, masks and bounds are tensors that the rules read, so another batch, window or mask of the same structure
(rows, queries and keys one or more, head dims, dtype, features) uses what is compiled.

What a query may see is one rule for all batches: keys first .. last of its row, bounds that the plan computes
from lengths, causal and window. Members either lie end to end in one row of the kernel's batch or, where all have
as many queries, are rows of their own (so that decodes spread over the GPU). ALiBi and softcap change scores; a
sink changes the finished output, since it only adds to the softmax's sum.

Without torch.compile flex_attention materialises all scores, so it is never called so, and a compilation that
fails is an error (`fullgraph`).

Shape legend beyond base: R rows of the kernel's batch, Q queries a row, K keys a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from attention.backends.base import AttentionSpec, Batch, Planned
from attention.backends.edges import PlannedBlind, bounds, has_nothing_to_read, starts
from attention.cases import AttentionCase
from attention.errors import UserError
from attention.matrix import declared_reasons
from attention.reasons import Reason

#: Queries of a block of the mask. PyTorch's kernel for short queries wants all query heads of a KV head in one.
_QUERY_BLOCK = 128
#: Each dtype, head shape, feature and structure compiles anew; beyond the limit, `fullgraph` would raise.
_RECOMPILES = 256


class FlexAttention:
    """FlexAttention's Triton kernels on one CUDA device."""

    def __init__(self, kernel: str, device: str = "cuda") -> None:
        if kernel != "triton":
            raise UserError(f"flex_attention has no kernel {kernel!r}: known is triton")
        self.device = device
        self.name = "flex_attention:triton"

    def check(self, case: AttentionCase) -> list[Reason]:
        return declared_reasons(self.name, case, device=self.device)

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        refused = [f for f, on in {"CUDA graph": graph, "quantised KV": spec.kv_dtype is not None}.items() if on]
        if refused:
            raise UserError(f"{self.name}: no {', '.join(refused)}")
        if has_nothing_to_read(batch):
            return PlannedBlind(self.name, batch, spec, lse=lse)
        return _PlannedFlex(self.name, batch, spec, self.device, lse=lse)


def attend(
    q_RHQD: torch.Tensor,
    k_RGKD: torch.Tensor,
    v_RGKD: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None,
    block_mask: Any,
    scale: float,
    sinks_H1: torch.Tensor | None,
    long: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [R, H, Q, D_vo] and LSE [R, H, Q], with the sinks' share taken out of the one and in the other.

    `long` forbids the kernel for short queries, which PyTorch takes below 128 of them, whether they fit or not.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    out, aux = flex_attention(
        q_RHQD,
        k_RGKD,
        v_RGKD,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q_RHQD.shape[1] != k_RGKD.shape[1],
        return_aux=AuxRequest(lse=True),
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True} if long else None,
    )
    lse: Any = aux.lse
    if sinks_H1 is not None:
        total = torch.logaddexp(lse, sinks_H1)
        out = (out * torch.exp(lse - total)[..., None]).to(q_RHQD.dtype)
        lse = total
    return out, lse


@cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILES)
    return torch.compile(attend, fullgraph=True)


class _PlannedFlex(Planned):
    def __init__(self, backend: str, batch: Batch, spec: AttentionSpec, device: str, *, lse: bool) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        super().__init__(backend=backend, batch=batch, spec=spec)
        self._where, self._lse = torch.device(device), lse
        same_q, same_k = len(set(batch.q_lens)) == 1, len(set(batch.kv_lens)) == 1
        self._rows = len(batch.q_lens) if same_q and (same_k or batch.layout != "ragged") else 1
        together = self._rows > 1
        self._queries = sum(batch.q_lens) // self._rows
        self._keys = max(batch.kv_lens) if together else sum(batch.kv_lens)
        self._index = self._gather_index(together, same_k)
        first, last, diagonal, begin = self._bounds(together)
        custom = self._custom(batch.masks) if batch.masks is not None else None
        self._score_mod = _score_mod(spec, diagonal)
        mask_mod = _mask_mod(first, last, begin, custom)
        self._block_mask = create_block_mask(
            mask_mod, self._rows, None, self._queries, self._keys, device=self._where.type, BLOCK_SIZE=_QUERY_BLOCK
        )
        self._sinks_H1 = None if spec.sinks is None else torch.tensor(spec.sinks, device=self._where)[:, None]
        # _inductor/kernel/flex/flex_decoding.py: no choice is left where its block is longer than the mask's.
        self._long = self._queries * spec.heads_q // spec.heads_kv > _QUERY_BLOCK
        self._attend = _compiled()

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._check_tokens(q_THD)
        q_RHQD = q_THD.view(self._rows, self._queries, *q_THD.shape[1:]).transpose(1, 2)
        out, lse = self._attend(
            q_RHQD,
            self._dense(k_NPGD),
            self._dense(v_NPGD),
            self._score_mod,
            self._block_mask,
            self.spec.scale,
            self._sinks_H1,
            self._long,
        )
        out_THD = out.transpose(1, 2).reshape(*q_THD.shape[:2], -1)
        return out_THD, lse.transpose(1, 2).reshape(q_THD.shape[:2]) if self._lse else None

    def _dense(self, cache: torch.Tensor) -> torch.Tensor:
        """Keys (or values) as [R, G, K, D]."""
        if self._index is not None:
            outer, inner = self._index
            cache = cache[outer, :, inner] if self.batch.layout == "paged_hnd" else cache[outer, inner]
        elif self.batch.layout == "contiguous":
            return cache[:, : self._keys].transpose(1, 2)
        else:
            cache = cache[: self._rows * self._keys]
        return cache.view(self._rows, self._keys, *cache.shape[-2:]).transpose(1, 2)

    def _gather_index(self, together: bool, same_k: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where each key of the rows lies: (page, slot), or (member, place) of contiguous keys; None for a view.

        What pads a row is some key that belongs to the batch, so that nothing unowned is ever read.
        """
        batch = self.batch
        if batch.layout == "ragged" or (batch.layout == "contiguous" and together and same_k):
            return None
        self.forced_copies.append("paged KV gathered to dense" if batch.paged else "contiguous KV gathered to dense")
        if together and not same_k:
            self.forced_copies.append("KV padded to the longest member")
        some = next(i for i, kv_len in enumerate(batch.kv_lens) if kv_len)
        owned = [torch.arange(kv_len) for kv_len in batch.kv_lens]
        places = list(enumerate(owned))
        if together:
            padding = [(some, torch.zeros(self._keys - len(place), dtype=torch.long)) for place in owned]
            places = [part for pair in zip(places, padding, strict=True) for part in pair]
        if batch.page_size is None:
            parts = [(torch.full_like(place, member), place) for member, place in places]
        else:
            page = batch.page_size
            tables = [torch.tensor(table, dtype=torch.long) for table in batch.block_tables]
            parts = [(tables[member][place // page], place % page) for member, place in places]
        outer, inner = (torch.cat(part).to(self._where) for part in zip(*parts, strict=True))
        return outer, inner

    def _bounds(self, together: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """By query [R, Q], in places of the row's keys: first and last key that it may see, its diagonal, and
        where its member begins."""
        left, right = bounds(self.spec)
        parts: list[torch.Tensor] = []
        for q_len, kv_len, start in zip(
            self.batch.q_lens, self.batch.kv_lens, starts(self.batch.kv_lens), strict=False
        ):
            begin = 0 if together else start
            diagonal = torch.arange(kv_len - q_len, kv_len) + begin
            first = torch.full((q_len,), begin) if left is None else (diagonal - left).clamp_min(begin)
            end = begin + kv_len - 1
            last = torch.full((q_len,), end) if right is None else (diagonal + right).clamp_max(end)
            parts.append(torch.stack([first, last, diagonal, torch.full((q_len,), begin)]))
        whole = torch.cat(parts, 1).to(self._where, torch.int32).view(4, self._rows, -1)
        return whole[0].contiguous(), whole[1].contiguous(), whole[2].contiguous(), whole[3].contiguous()

    def _custom(self, masks: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Custom masks by query, [R, Q, longest kv_len]."""
        longest = max(self.batch.kv_lens)
        padded = [torch.nn.functional.pad(mask.to(self._where), (0, longest - mask.shape[1])) for mask in masks]
        return torch.cat(padded).view(self._rows, self._queries, longest)


def _mask_mod(
    first: torch.Tensor, last: torch.Tensor, begin: torch.Tensor, custom: torch.Tensor | None
) -> Callable[..., torch.Tensor]:
    def within(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k >= first[b, q]) & (k <= last[b, q])

    if custom is None:
        return within

    def within_and_custom(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        # Other members' keys have no place in the mask; the bounds hide them.
        place = (k - begin[b, q]).clamp(0, custom.shape[-1] - 1)
        return (k >= first[b, q]) & (k <= last[b, q]) & custom[b, q, place]

    return within_and_custom


def _score_mod(spec: AttentionSpec, diagonal: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    cap = slopes = None
    if spec.softcap is not None:
        # A tensor: a second value of a float would be traced as a symbol, which the lowering of 2.11 cannot take.
        cap = torch.tensor(spec.softcap, dtype=torch.float32, device=diagonal.device)
    if spec.alibi_slopes is not None:
        slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=diagonal.device)
    if cap is None and slopes is None:
        return None

    def changed(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            score = score - slopes[h] * (diagonal[b, q] - k).abs()
        return score

    return changed
