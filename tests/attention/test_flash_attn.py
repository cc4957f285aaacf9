"""What FlashAttention is called with, by a stand-in that computes what its documentation says of each argument.

The stand-in takes every quirk that the sources show: LSE +inf of rows without keys and the LSE of causal ALiBi
(flash-attn 2), windows of -1 and None, LSE [H, T]. The real kernels are judged in gpu/.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from attention.backends.base import AttentionSpec
from attention.backends.flash_attn import FlashAttention, library_call
from attention.backends.oracle import attend
from attention.cases import AttentionCase
from attention.errors import UserError
from attention.replay.figures import compare
from attention.replay.problems import Problem, make

LAYOUTS = ("paged_nhd", "paged_hnd", "ragged", "contiguous")


def compute(
    q_THD: torch.Tensor,
    members: list[tuple[slice, torch.Tensor, torch.Tensor]],
    scale: float,
    causal: bool,
    window: tuple[int | None, int | None],
    softcap: float,
    **features: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, D] and LSE [H, T]."""
    out = torch.full_like(q_THD, float("nan"))
    lse = torch.full(q_THD.shape[:2], float("nan"))
    for rows, k_LGD, v_LGD in members:
        heads = (q_THD.shape[1], k_LGD.shape[1], q_THD.shape[2], v_LGD.shape[2])
        spec = AttentionSpec(*heads, q_THD.dtype, scale, causal, window, softcap or None, **features)
        truth = attend(q_THD[rows], k_LGD, v_LGD, spec)
        out[rows], lse[rows] = truth.out_QHD.to(out.dtype), truth.lse_QH.float()
    return out, lse.T


def spans(starts: torch.Tensor) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(starts.tolist())]


def paged(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    return cache[table.long()].flatten(0, 1)[:length]


def fa2_quirks(
    out: torch.Tensor, lse_HT: torch.Tensor, slopes: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    assert slopes is None or not causal, "its causal ALiBi moves the LSE"
    return out, lse_HT.masked_fill(lse_HT == -float("inf"), float("inf"))


def features_of(slopes: torch.Tensor | None) -> dict[str, Any]:
    return {} if slopes is None else {"alibi_slopes": tuple(slopes.tolist())}


class FakeFa2(ModuleType):
    """flash_attn_2_cuda, by flash_api.cpp of flash-attn 2.8.3."""

    calls: list[str]

    def varlen_fwd(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        cu_q: Any,
        cu_k: Any,
        seqused_k: Any,
        leftpad: Any,
        table: Any,
        slopes: Any,
        max_q: int,
        max_k: int,
        dropout: float,
        scale: float,
        zero: bool,
        causal: bool,
        left: int,
        right: int,
        softcap: float,
        return_softmax: bool,
        generator: Any,
    ) -> tuple[Any, ...]:
        self.calls.append("varlen_fwd")
        assert (out, leftpad, dropout, zero, return_softmax, generator) == (None, None, 0.0, False, False, None)
        assert all(t.dtype == torch.int32 for t in (cu_q, cu_k))
        assert max_q > 1 or len(q) == len(cu_q) - 1, "one token a member, or the reshape fails"
        members = []
        for i, (rows, keys) in enumerate(zip(spans(cu_q), spans(cu_k), strict=True)):
            length = int(seqused_k[i]) if seqused_k is not None else keys.stop - keys.start
            assert rows.stop - rows.start <= max_q and length <= max_k
            if table is not None:
                members.append((rows, paged(k, table[i], length), paged(v, table[i], length)))
            else:
                held = slice(keys.start, keys.start + length)
                members.append((rows, k[held], v[held]))
        window = (left if left >= 0 else None, right if right >= 0 else None)
        found = compute(q, members, scale, causal, window, softcap, **features_of(slopes))
        return *fa2_quirks(*found, slopes, causal), None, None

    def fwd_kvcache(
        self,
        q: Any,
        k: Any,
        v: Any,
        new_k: Any,
        new_v: Any,
        lengths: Any,
        cos: Any,
        sin: Any,
        order: Any,
        leftpad: Any,
        table: Any,
        slopes: Any,
        out: Any,
        scale: float,
        causal: bool,
        left: int,
        right: int,
        softcap: float,
        interleaved: bool,
        num_splits: int,
    ) -> tuple[Any, ...]:
        self.calls.append("fwd_kvcache")
        assert (new_k, new_v, cos, sin, order, leftpad, out) == (None,) * 7
        assert num_splits == 0
        batch, q_len = q.shape[:2]
        members = []
        for i, length in enumerate(lengths.tolist()):
            rows = slice(i * q_len, (i + 1) * q_len)
            keys = [paged(c, table[i], length) if table is not None else c[i, :length] for c in (k, v)]
            members.append((rows, keys[0], keys[1]))
        window = (left if left >= 0 else None, right if right >= 0 else None)
        found = compute(q.flatten(0, 1), members, scale, causal, window, softcap, **features_of(slopes))
        out, lse_HT = fa2_quirks(*found, slopes, causal)
        return out.view(q.shape), lse_HT.T.view(batch, q_len, -1).transpose(1, 2).contiguous()


def fake_fa4(q: Any, k: Any, v: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_attn.cute.flash_attn_varlen_func, by interface.py of flash-attn-4 4.0.0b36."""
    assert given["return_lse"]
    table, used, cu_k = given["page_table"], given["seqused_k"], given["cu_seqlens_k"]
    assert table is None or cu_k is None
    members = []
    for i, rows in enumerate(spans(given["cu_seqlens_q"])):
        if table is not None:
            keys = [paged(c, table[i], int(used[i])) for c in (k, v)]
        else:
            keys = [c[spans(cu_k)[i]] if cu_k is not None else c[i] for c in (k, v)]
        members.append((rows, keys[0], keys[1]))
    sinks = given["learnable_sink"]
    return compute(
        q,
        members,
        given["softmax_scale"],
        given["causal"],
        given["window_size"],
        given["softcap"],
        sinks=None if sinks is None else tuple(sinks.tolist()),
    )


@pytest.fixture
def fa2(monkeypatch: pytest.MonkeyPatch) -> FakeFa2:
    module = FakeFa2("flash_attn_2_cuda")
    module.calls = []
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", module)
    return module


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = fake_fa4  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)


def problem(batch: str, seed: int = 1, **changes: Any) -> Problem:
    fields: dict[str, Any] = {"phase": "extend", "heads_q": 6, "heads_kv": 2, "head_dim_qk": 16, "head_dim_vo": 16}
    fields |= {"dtype": "float32", "layout": "paged_nhd", "page_size": 16, **changes}
    if not fields["layout"].startswith("paged"):
        fields["page_size"] = None
    return make(AttentionCase(batch=batch, **fields), "normal", seed)


def assert_right(one: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    figures = compare(out, lse, one.truth, one.spec.dtype)
    assert figures.finite_mask_equal
    assert figures.max_abs < 1e-5
    assert lse is not None
    torch.testing.assert_close(lse.double(), one.truth.lse_QH, rtol=0, atol=1e-5)


BATCHES = {
    "mixed": "q5s40_q1s33_q20",
    "decode": "q1s40_q1s33_q1s7",
    "speculative": "3q4s33",
    "long even": "2q20s33",
    "no keys": "q3s0_q5s20",
    "decode without keys": "q1s0_q1s20",
    "no queries": "q0s20_q1s9",
    "more queries": "q9s5_q3s8",
    "nothing": "q4s0",
}


@pytest.mark.parametrize(
    "changes",
    [{}, {"window": (6, 0)}, {"causal": False}, {"causal": False, "window": (5, 3)}, {"softcap": 2.0}, {"alibi": True}],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_flash_attention_2_gets_the_batch_as_it_lies(
    fa2: FakeFa2, batch: str, layout: str, changes: dict[str, Any]
) -> None:
    one = problem(batch, layout=layout, **changes)
    if one.batch.paged and batch == BATCHES["no keys"]:
        with pytest.raises(UserError, match="loses the LSE of member 0"):
            FlashAttention("fa2", "cpu").plan(one.batch, one.spec)
        return
    planned = FlashAttention("fa2", "cpu").plan(one.batch, one.spec)
    assert_right(one, *planned.run(one.q_THD, one.k, one.v))
    assert planned.forced_copies == []
    assert len(fa2.calls) <= 1


@pytest.mark.parametrize(
    ("batch", "changes", "served"),
    [
        ("q80s16_q1s5", {}, False),
        ("q79s16_q1s5", {}, True),  # its one block has a row that sees a key
        ("q80s16_q1s5", {"causal": False}, True),
        ("q80s16_q1s5", {"layout": "ragged"}, True),
        ("2q1s40", {}, True),
    ],
)
def test_flash_attention_2_refuses_a_block_of_queries_that_see_no_key_over_pages(
    fa2: FakeFa2, batch: str, changes: dict[str, Any], served: bool
) -> None:
    one = problem(batch, **changes)
    if served:
        planned = FlashAttention("fa2", "cpu").plan(one.batch, one.spec)
        assert_right(one, *planned.run(one.q_THD, one.k, one.v))
    else:
        with pytest.raises(UserError, match=r"varlen over pages loses the LSE of member 0 \(q80s16\)"):
            FlashAttention("fa2", "cpu").plan(one.batch, one.spec)


@pytest.mark.parametrize(
    ("batch", "layout", "call"),
    [
        ("q1s40_q1s33", "paged_nhd", "fwd_kvcache"),
        ("q1s40_q1s33", "contiguous", "fwd_kvcache"),
        ("4q4s33", "paged_hnd", "fwd_kvcache"),
        ("q1s40_q1s33", "ragged", "varlen_fwd"),
        ("q1s40_q2s33", "paged_nhd", "varlen_fwd"),
        ("2q64", "paged_nhd", "varlen_fwd"),
    ],
)
def test_few_rows_a_member_take_the_call_that_splits_keys(fa2: FakeFa2, batch: str, layout: str, call: str) -> None:
    one = problem(batch, layout=layout)
    FlashAttention("fa2", "cpu").plan(one.batch, one.spec).run(one.q_THD, one.k, one.v)
    assert fa2.calls == [call]


@pytest.mark.parametrize(
    ("batch", "name"),
    [("q1s40_q1s33", "flash_attn_with_kvcache"), ("q1s40_q2s33", "flash_attn_varlen_func")],
)
def test_the_plain_call_is_the_packages_public_function_on_the_same_batch(
    fa2: FakeFa2, batch: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = problem(batch, window=(6, 0))
    given: dict[str, Any] = {}
    package = ModuleType("flash_attn")
    setattr(package, name, lambda *args, **options: given.update(options, args=args))
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    planned = FlashAttention("fa2", "cpu").plan(one.batch, one.spec, lse=False)
    assert planned.run(one.q_THD, one.k, one.v)[1] is None, "without the LSE nothing is done to it"
    library_call(planned, one.q_THD, one.k, one.v)()
    assert (given["causal"], given["window_size"], given["softcap"]) == (True, (6, 0), 0.0)
    assert given["softmax_scale"] == one.spec.scale
    assert given["block_table"].shape[0] == 2
    if name == "flash_attn_with_kvcache":
        assert given["cache_seqlens"].tolist() == [40, 33]
    else:
        assert [part if isinstance(part, int) else part.tolist() for part in given["args"][3:]] == [
            [0, 1, 3], [0, 40, 73], 2, 40,
        ]  # fmt: skip
    with pytest.raises(UserError, match="NHD pages"):
        ragged = problem(batch, layout="ragged")
        library_call(FlashAttention("fa2", "cpu").plan(ragged.batch, ragged.spec), one.q_THD, one.k, one.v)


def test_contiguous_keys_may_lie_in_a_longer_cache(fa2: FakeFa2) -> None:
    one = problem("q5s40_q1s33", layout="contiguous")
    longer = [torch.cat([cache, torch.full_like(cache, float("nan"))], 1) for cache in (one.k, one.v)]
    planned = FlashAttention("fa2", "cpu").plan(one.batch, one.spec)
    assert_right(one, *planned.run(one.q_THD, longer[0], longer[1]))
    assert_right(one, *planned.run(one.q_THD, one.k, one.v))


@pytest.mark.parametrize(
    "changes", [{}, {"window": (6, 0)}, {"causal": False}, {"softcap": 2.0}, {"sinks": True}], ids=str
)
@pytest.mark.parametrize("layout", ["paged_nhd", "paged_hnd", "ragged"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_flash_attention_4_gets_the_batch_as_it_lies(
    fa4: None, batch: str, layout: str, changes: dict[str, Any]
) -> None:
    one = problem(batch, layout=layout, **changes)
    planned = FlashAttention("fa4", "cpu").plan(one.batch, one.spec)
    assert_right(one, *planned.run(one.q_THD, one.k, one.v))
    assert planned.forced_copies == []


def test_flash_attention_4_takes_contiguous_keys_of_one_length_only(fa4: None) -> None:
    even, uneven = (problem(batch, layout="contiguous") for batch in ("2q4s33", "q4s33_q4s30"))
    backend = FlashAttention("fa4", "cpu")
    assert_right(even, *backend.plan(even.batch, even.spec).run(even.q_THD, even.k, even.v))
    with pytest.raises(UserError, match="contiguous keys only where all members have as many"):
        backend.plan(uneven.batch, uneven.spec)


def test_flash_attention_4_refuses_pages_that_are_a_tile(fa4: None) -> None:
    one = problem("q4s33", page_size=128)
    with pytest.raises(UserError, match="a page of 128 is a tile at head dim 16"):
        FlashAttention("fa4", "cpu").plan(one.batch, one.spec)


@pytest.mark.parametrize(
    ("kernel", "feature"), [("fa2", "sinks"), ("fa3", "ALiBi"), ("fa4", "ALiBi"), ("fa4", "masks")]
)
def test_a_plan_never_drops_a_feature(kernel: str, feature: str) -> None:
    one = problem("q4s33", sinks=feature == "sinks", alibi=feature == "ALiBi", custom_mask=feature == "masks")
    with pytest.raises(UserError, match=f"flash_attn:{kernel}: no .*{feature}"):
        FlashAttention(kernel, "cpu").plan(one.batch, one.spec)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batches", [("q5s40_q1s33", "q5s20_q1s2"), ("2q1s40", "q1s0_q1s40")])
def test_a_graph_plan_serves_shorter_batches_in_its_own_buffers(
    fa2: FakeFa2, layout: str, batches: tuple[str, str]
) -> None:
    long, short = (problem(batch, layout=layout) for batch in batches)
    planned = FlashAttention("fa2", "cpu").plan(long.batch, long.spec, graph=True)
    assert_right(long, *planned.run(long.q_THD, long.k, long.v))
    planned.replan(short.batch)
    assert_right(short, *planned.run(short.q_THD, short.k, short.v))
    with pytest.raises(ValueError, match="above the captured one"):
        planned.replan(replace(long.batch, q_lens=(2, 2)))
    with pytest.raises(UserError, match="was not planned for a CUDA graph"):
        FlashAttention("fa2", "cpu").plan(long.batch, long.spec).replan(short.batch)


def test_a_paged_graph_plan_refuses_a_member_that_lost_its_keys(fa2: FakeFa2) -> None:
    long, short = (problem(batch) for batch in ("q5s40_q1s33", "q5s20_q1s0"))
    planned = FlashAttention("fa2", "cpu").plan(long.batch, long.spec, graph=True)
    with pytest.raises(UserError, match="loses the LSE of member 1"):
        planned.replan(short.batch)
