"""`torch_sdpa:{flash,efficient,cudnn,math}`: PyTorch's scaled_dot_product_attention, one kernel forced.

PyTorch chooses among these by itself; here each is a backend of its own, called through the operator that
`F.scaled_dot_product_attention` would dispatch to, so that a refusal is an error and never another kernel.
The operators also return the LSE (all but math), which the public function drops. Their tensors are dense:
pages are gathered first, a copy that the layout forces and that the plan records; ragged and contiguous keys
are views.

Rules: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (CUDA) and sdp_utils_cpp.cpp (CPU).

Shape legend beyond base: B members in one call, Q queries a member, L keys of the longest member.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.backends.base import AttentionSpec, Batch, Planned, gather_pages, positions_mask
from attention.backends.edges import PlannedBlind, blind_rows, bounds, has_nothing_to_read, starts
from attention.cases import AttentionCase
from attention.errors import UserError
from attention.matrix import declared_reasons
from attention.reasons import Reason

KERNELS = ("flash", "efficient", "cudnn", "math")


class TorchSdpa:
    """One forced SDPA kernel on one device."""

    def __init__(self, kernel: str, device: str = "cpu") -> None:
        if kernel not in KERNELS:
            raise UserError(f"torch_sdpa has no kernel {kernel!r}: known are {', '.join(KERNELS)}")
        self.kernel = kernel
        self.device = device
        self.name = f"torch_sdpa:{kernel}"

    def check(self, case: AttentionCase) -> list[Reason]:
        return declared_reasons(self.name, case, device=self.device)

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        asked = {
            "CUDA graph": graph,
            "softcap": spec.softcap is not None,
            "sinks": spec.sinks is not None,
            "quantised KV": spec.kv_dtype is not None,
        }
        refused = [feature for feature, on in asked.items() if on]
        if refused:
            raise UserError(f"{self.name}: no {', '.join(refused)}")
        if has_nothing_to_read(batch):
            return PlannedBlind(self.name, batch, spec, lse=lse)
        planned = _PlannedTogether if self._in_one_call(batch, spec) else _PlannedMembers
        return planned(self.name, batch, spec, self.kernel, self.device, lse=lse and self.kernel != "math")

    def _in_one_call(self, batch: Batch, spec: AttentionSpec) -> bool:
        """Members of equal lengths, and single-token decodes where a mask may hide their padding."""
        if len(batch.q_lens) == 1 or len(set(batch.q_lens)) > 1:
            return False
        if self.kernel == "efficient" and spec.heads_q != spec.heads_kv:
            return False  # its batch is taken: see _attend_by_groups
        if len(set(batch.kv_lens)) == 1:
            return True
        masks = self.kernel != "flash" or self.device == "cpu"
        return masks and batch.q_lens[0] == 1 and batch.layout != "ragged"


class _PlannedSdpa(Planned):
    def __init__(self, backend: str, batch: Batch, spec: AttentionSpec, kernel: str, device: str, *, lse: bool) -> None:
        super().__init__(backend=backend, batch=batch, spec=spec)
        self._lse = lse
        if batch.paged:
            self.forced_copies.append("paged KV gathered to dense")
        self._where = torch.device(device)
        self._kernel, self._is_cpu = kernel, self._where.type == "cpu"
        self._hnd = batch.layout == "paged_hnd"
        # The flash operator of CUDA is bottom-right aligned, as its kernels are (torch.nn.attention.bias says
        # so too); the others' `is_causal` is top-left aligned, right for square problems only.
        self._any_causal = kernel == "flash" and not self._is_cpu
        visible = [self._visible(i) for i in range(len(batch.q_lens))]
        blind = set(blind_rows(batch, spec))
        if batch.masks is not None:
            for start, mask in zip(starts(batch.q_lens), visible, strict=False):
                if mask is not None:
                    blind.update(start + row for row in (~mask.any(-1)).nonzero()[:, 0].tolist())
        self._blind = torch.tensor(sorted(blind), dtype=torch.long, device=self._where) if blind else None
        self._prepare(visible)

    def _prepare(self, visible: list[torch.Tensor | None]) -> None:
        raise NotImplementedError("a planned batch prepares its own masks")

    def _visible(self, member: int) -> torch.Tensor | None:
        """Boolean [q_len, kv_len] of one member; None where nothing hides a key, or causal alone does."""
        q_len, kv_len = self.batch.q_lens[member], self.batch.kv_lens[member]
        if self._causal(member):
            return None
        mask = positions_mask(q_len, kv_len, self.spec, self._where)
        if self.batch.masks is not None:
            custom = self.batch.masks[member].to(self._where)
            mask = custom if mask is None else mask & custom
        return mask

    def _causal(self, member: int) -> bool:
        """Whether the operator's own causal flag says all that there is to mask."""
        q_len, kv_len = self.batch.q_lens[member], self.batch.kv_lens[member]
        alone = bounds(self.spec) == (None, 0) and self.spec.alibi_slopes is None and self.batch.masks is None
        return alone and q_len > 1 and (q_len == kv_len or self._any_causal)

    def _bias(self, mask_QL: torch.Tensor | None, q_len: int, kv_len: int) -> torch.Tensor | None:
        """What is added to the scores, [1 or H, Q, L]: ALiBi, and -inf where a key is hidden."""
        if mask_QL is None and self.spec.alibi_slopes is None:
            return None
        # A half type would round slope * distance. The fused CUDA operators take no other mask: their rules say so.
        wide = self._is_cpu or self._kernel == "math"
        dtype = torch.float32 if wide and self.spec.alibi_slopes is not None else self.spec.dtype
        heads = 1 if self.spec.alibi_slopes is None else self.spec.heads_q
        # The efficient kernel wants rows that start at multiples of 16 bytes.
        padded = -(-kv_len // 16) * 16
        bias_HQL = torch.zeros(heads, q_len, padded, dtype=dtype, device=self._where)[:, :, :kv_len]
        if self.spec.alibi_slopes is not None:
            slopes_H11 = torch.tensor(self.spec.alibi_slopes, device=self._where)[:, None, None]
            diagonal_Q1 = torch.arange(kv_len - q_len, kv_len, device=self._where)[:, None]
            distance_QL = (diagonal_Q1 - torch.arange(kv_len, device=self._where)[None]).abs()
            bias_HQL.copy_(-slopes_H11 * distance_QL)
        if mask_QL is not None:
            bias_HQL.masked_fill_(~mask_QL, float("-inf"))
        return bias_HQL

    def _attend(
        self, q_BHQD: torch.Tensor, k_BGLD: torch.Tensor, v_BGLD: torch.Tensor, bias: torch.Tensor | None, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One call of the kernel: output [B, H, Q, D] and LSE [B, H, Q] (math: None)."""
        scale, aten = self.spec.scale, torch.ops.aten
        if self._kernel == "math":
            gqa = self.spec.heads_q != self.spec.heads_kv
            out, _ = aten._scaled_dot_product_attention_math(
                q_BHQD, k_BGLD, v_BGLD, bias, 0.0, causal, scale=scale, enable_gqa=gqa
            )
            return out, None
        if self._kernel == "efficient":
            return self._attend_by_groups(q_BHQD, k_BGLD, v_BGLD, bias, causal)
        if self._kernel == "cudnn":
            out, lse = aten._scaled_dot_product_cudnn_attention(
                q_BHQD, k_BGLD, v_BGLD, bias, True, 0.0, causal, False, scale=scale
            )[:2]
            return out, lse.view(q_BHQD.shape[:3])
        if self._is_cpu:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q_BHQD, k_BGLD, v_BGLD, 0.0, causal, attn_mask=bias, scale=scale
            )
            return out, lse
        out, lse = aten._scaled_dot_product_flash_attention(q_BHQD, k_BGLD, v_BGLD, 0.0, causal, False, scale=scale)[:2]
        return out, lse

    def _attend_by_groups(
        self, q_BHQD: torch.Tensor, k_BGLD: torch.Tensor, v_BGLD: torch.Tensor, bias: torch.Tensor | None, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The efficient kernel knows no GQA: for one member the groups become its batch, keys of stride 0 its
        heads, all of them views."""
        batch, heads, queries = q_BHQD.shape[:3]
        groups = k_BGLD.shape[1]
        if heads != groups:
            q_BHQD = q_BHQD.view(groups, heads // groups, *q_BHQD.shape[2:])
            k_BGLD = k_BGLD[0][:, None].expand(-1, heads // groups, -1, -1)
            v_BGLD = v_BGLD[0][:, None].expand(-1, heads // groups, -1, -1)
            if bias is not None and bias.shape[1] == heads:
                bias = bias.view(groups, heads // groups, *bias.shape[2:])
        if bias is not None:
            bias = bias.expand(*q_BHQD.shape[:3], k_BGLD.shape[2])
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            q_BHQD, k_BGLD, v_BGLD, bias, True, 0.0, causal, scale=self.spec.scale
        )[:2]
        # Rows of the LSE are padded to a multiple of 32.
        return out.reshape(batch, heads, queries, -1), lse[..., :queries].reshape(batch, heads, queries)

    def _finish(self, out_THD: torch.Tensor, lse_TH: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows that see no key: the kernels give NaN, 0 or the mean, and LSE of either infinity."""
        lse_TH = lse_TH if self._lse else None
        if self._blind is not None:
            out_THD = out_THD.index_fill(0, self._blind, 0)
            lse_TH = None if lse_TH is None else lse_TH.index_fill(0, self._blind, float("-inf"))
        return out_THD, lse_TH


class _PlannedMembers(_PlannedSdpa):
    """One call a member; members without queries or keys have none."""

    def _prepare(self, visible: list[torch.Tensor | None]) -> None:
        batch = self.batch
        self._biases = [
            None if (bias := self._bias(mask, q_len, kv_len)) is None else bias[None]
            for mask, q_len, kv_len in zip(visible, batch.q_lens, batch.kv_lens, strict=True)
        ]
        self._causals = [self._causal(i) for i in range(len(batch.q_lens))]
        self._alone = len(batch.q_lens) == 1 and batch.q_lens[0] > 0 and batch.kv_lens[0] > 0
        self._tables = [torch.tensor(table, dtype=torch.long, device=self._where) for table in batch.block_tables]
        q_starts, kv_starts = starts(batch.q_lens), starts(batch.kv_lens)
        self._rows = [slice(a, b) for a, b in pairwise(q_starts)]
        self._key_rows = [slice(a, b) for a, b in pairwise(kv_starts)]

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._check_tokens(q_THD)
        if self._alone:
            # Nothing to put together: the kernel's own output, without a copy.
            out, lse = self._one(0, q_THD, k_NPGD, v_NPGD)
            return self._finish(out, lse)
        out_THD = q_THD.new_empty(q_THD.shape[0], self.spec.heads_q, self.spec.head_dim_vo)
        lse_TH = None if not self._lse else q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        for i, rows in enumerate(self._rows):
            if self.batch.q_lens[i] == 0 or self.batch.kv_lens[i] == 0:
                continue
            out, lse = self._one(i, q_THD[rows], k_NPGD, v_NPGD)
            out_THD[rows] = out
            if lse_TH is not None and lse is not None:
                lse_TH[rows] = lse
        return self._finish(out_THD, lse_TH)

    def _one(
        self, member: int, q_QHD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output [q_len, H, D] and LSE [q_len, H] of one member."""
        k_BGLD, v_BGLD = (self._keys(cache, member).transpose(0, 1)[None] for cache in (k_NPGD, v_NPGD))
        q_BHQD = q_QHD.transpose(0, 1)[None]
        out, lse = self._attend(q_BHQD, k_BGLD, v_BGLD, self._biases[member], self._causals[member])
        return out[0].transpose(0, 1), None if lse is None else lse[0].transpose(0, 1)

    def _keys(self, cache: torch.Tensor, member: int) -> torch.Tensor:
        """Keys (or values) of one member as [kv_len, G, D]."""
        if self.batch.layout == "ragged":
            return cache[self._key_rows[member]]
        kv_len = self.batch.kv_lens[member]
        if self.batch.layout == "contiguous":
            return cache[member, :kv_len]
        return gather_pages(cache.transpose(1, 2) if self._hnd else cache, self._tables[member], kv_len)


class _PlannedTogether(_PlannedSdpa):
    """All members in one call, keys padded to the longest.

    Padded slots may hold anything, NaN too, and a masked NaN still poisons the sum: they are zeroed in a copy.
    """

    def _prepare(self, visible: list[torch.Tensor | None]) -> None:
        batch, longest = self.batch, max(self.batch.kv_lens)
        self._causal_all = self._causal(0)
        pages, self._length = None, longest
        if batch.page_size is not None:
            pages = -(-longest // batch.page_size)
            self._length = pages * batch.page_size
            tables = [(*table, *([0] * pages))[:pages] for table in batch.block_tables]
            self._pages = torch.tensor(tables, dtype=torch.long, device=self._where).flatten()
        lengths_B1 = torch.tensor(batch.kv_lens, device=self._where)[:, None]
        hidden_BL = torch.arange(self._length, device=self._where)[None] >= lengths_B1
        self._padding = hidden_BL.flatten().nonzero()[:, 0]
        self._is_padded = bool(len(self._padding)) and len(set(batch.kv_lens)) > 1
        # Members of one length end together: what pages add behind them is cut off.
        self._cut = longest if not self._is_padded else self._length
        if self._is_padded:
            self.forced_copies.append("KV padded to the longest member" if batch.paged else "KV padding zeroed")
        self._bias_all = self._bias_of(visible)

    def _bias_of(self, visible: list[torch.Tensor | None]) -> torch.Tensor | None:
        """[B, 1 or H, Q, L] of all members; None where no key is hidden and nothing is added."""
        batch = self.batch
        plain = all(mask is None for mask in visible) and self.spec.alibi_slopes is None
        if plain and not self._is_padded:
            return None
        biases = []
        for mask, q_len, kv_len in zip(visible, batch.q_lens, batch.kv_lens, strict=True):
            shown = mask if mask is not None else torch.ones(q_len, kv_len, dtype=torch.bool, device=self._where)
            bias = self._bias(shown, q_len, kv_len)
            if bias is None:
                raise AssertionError("a mask always makes a bias")
            biases.append(torch.nn.functional.pad(bias, (0, self._cut - kv_len), value=float("-inf")))
        padded = -(-self._cut // 16) * 16
        whole = torch.stack(biases)
        room = whole.new_empty(*whole.shape[:3], padded)[..., : self._cut]
        return room.copy_(whole)

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._check_tokens(q_THD)
        members, q_len = len(self.batch.q_lens), self.batch.q_lens[0]
        q_BHQD = q_THD.view(members, q_len, *q_THD.shape[1:]).transpose(1, 2)
        k_BGLD, v_BGLD = self._dense(k_NPGD), self._dense(v_NPGD)
        out, lse = self._attend(q_BHQD, k_BGLD, v_BGLD, self._bias_all, self._causal_all)
        lse_TH = None if lse is None else lse.transpose(1, 2).reshape(-1, lse.shape[1])
        return self._finish(out.transpose(1, 2).reshape(q_THD.shape[0], *q_THD.shape[1:2], -1), lse_TH)

    def _dense(self, cache: torch.Tensor) -> torch.Tensor:
        """Keys (or values) of all members, [B, G, L, D]."""
        members = len(self.batch.kv_lens)
        if self.batch.layout == "ragged":
            return cache[: members * self._length].view(members, -1, *cache.shape[1:]).transpose(1, 2)
        if self.batch.layout == "contiguous":
            dense = cache[:, : self._length]
            if self._is_padded:
                dense = dense.clone(memory_format=torch.contiguous_format)
                dense.view(-1, *dense.shape[2:]).index_fill_(0, self._padding, 0)
            return dense.transpose(1, 2)
        flat = (cache.transpose(1, 2) if self._hnd else cache).index_select(0, self._pages)
        flat = flat.view(-1, *flat.shape[2:])
        if self._is_padded:
            flat.index_fill_(0, self._padding, 0)
        return flat.view(members, -1, *flat.shape[1:])[:, : self._cut].transpose(1, 2)


def library_call(planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What a user would write for a planned batch of one member: gather the pages, one call of SDPA.

    The yardstick of `bench dispatch`: whatever `planned.run` takes beyond it is ours. The kernel is forced as in the
    plan. UserError for a batch of several members, which SDPA has no plain call for, and for a spec whose mask does
    not go into `is_causal`.
    """
    spec, batch = planned.spec, planned.batch
    if len(batch.q_lens) != 1:
        raise UserError(f"{planned.backend}: SDPA has a plain call for one member, not for {len(batch.q_lens)}")
    q_len, kv_len = batch.q_lens[0], batch.kv_lens[0]
    if spec.window != (None, None) or not (q_len == kv_len or q_len == 1) or spec.alibi_slopes or batch.masks:
        raise UserError(f"{planned.backend}: the plain call has no mask beyond is_causal on a square problem")
    name = planned.backend.split(":")[1].upper()
    kernel = getattr(SDPBackend, name if name == "MATH" else f"{name}_ATTENTION")
    is_causal, gqa = spec.causal and q_len > 1, spec.heads_q != spec.heads_kv
    pages = torch.tensor(batch.block_tables[0], dtype=torch.long, device=k.device) if batch.paged else None

    def dense(cache: torch.Tensor) -> torch.Tensor:
        if pages is None:
            return cache[:kv_len] if batch.layout == "ragged" else cache[0, :kv_len]
        return gather_pages(cache.transpose(1, 2) if batch.layout == "paged_hnd" else cache, pages, kv_len)

    def call() -> torch.Tensor:
        with sdpa_kernel([kernel]):
            k_GLD, v_GLD = dense(k).transpose(0, 1)[None], dense(v).transpose(0, 1)[None]
            q_HQD = q_THD.transpose(0, 1)[None]
            return F.scaled_dot_product_attention(
                q_HQD, k_GLD, v_GLD, is_causal=is_causal, scale=spec.scale, enable_gqa=gqa
            )

    return call
