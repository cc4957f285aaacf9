"""torch_sdpa and the rules of flex_attention over every layout, mask and edge of a batch, against the oracle.

FlexAttention's kernels are replaced by what its documentation says of score_mod and mask_mod: the masks, bounds
and gathers are the same, and nothing is traced (which takes seconds a shape).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attention.backends import create, flex
from attention.backends.base import Planned
from attention.cases import AttentionCase
from attention.errors import UserError
from attention.replay.figures import compare
from attention.replay.problems import Problem, make

BACKENDS = ("torch_sdpa:flash", "torch_sdpa:math", "flex_attention:triton")
LAYOUTS = ("paged_nhd", "paged_hnd", "ragged", "contiguous")
BATCHES = {
    "mixed": "q5s40_q1s33_q20",
    "decode": "q1s40_q1s33_q1s7",
    "even decode": "2q1s40",
    "square": "2q8",
    "even": "2q3s21",
    "no keys": "q9s5_q3s0",
    "decode without keys": "q1s0_q1s5",
    "no queries": "q0s20_q3s9_q4s0",
    "nothing": "q4s0",
}
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"window": (6, 0)},
    {"causal": False, "window": (5, 3)},
    {"alibi": True},
    {"custom_mask": True},
    {"heads_kv": 6, "dtype": "bfloat16"},
)


def densely(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: float,
    sinks: Any,
    long: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What flex.attend computes, over all scores at once."""
    ratio = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(ratio, 1), v.float().repeat_interleave(ratio, 1)
    places = torch.meshgrid(*(torch.arange(n) for n in (*q.shape[:3], k.shape[2])), indexing="ij")
    scores = q.float() @ k.mT * scale
    if score_mod is not None:
        scores = score_mod(scores, *places)
    scores = scores.masked_fill(~block_mask.mask_mod(*places), -float("inf"))
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0)[..., None])
    return (weights @ v).to(q.dtype), lse


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flex, "_compiled", lambda: densely)
    with torch.inference_mode():
        yield


def problem(batch: str, layout: str, **changes: Any) -> Problem:
    fields: dict[str, Any] = {"phase": "extend", "heads_q": 6, "heads_kv": 2, "head_dim_qk": 16, "head_dim_vo": 16}
    page = 16 if layout.startswith("paged") else None
    fields |= {"dtype": "float32", "layout": layout, "page_size": page, **changes}
    return make(AttentionCase(batch=batch, **fields), "normal", 2)


def assert_right(one: Problem, planned: Planned) -> None:
    out, lse = planned.run(one.q_THD, one.k, one.v)
    limit = 1e-5 if one.spec.dtype == torch.float32 else 2e-2
    figures = compare(out, lse, one.truth, one.spec.dtype)
    assert figures.finite_mask_equal
    assert figures.max_abs < limit
    blind = ~torch.isfinite(one.truth.lse_QH)
    assert not out[blind].any()
    if lse is not None:
        torch.testing.assert_close(lse.double(), one.truth.lse_QH, rtol=0, atol=limit)


@pytest.mark.parametrize("changes", FEATURES, ids=str)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_layout_gives_the_oracles_answer(backend: str, batch: str, changes: dict[str, Any]) -> None:
    for layout in LAYOUTS:
        one = problem(batch, layout, **changes)
        assert_right(one, create(backend).plan(one.batch, one.spec))


@pytest.mark.parametrize("changes", [{"softcap": 2.0}, {"sinks": True}, {"softcap": 2.0, "alibi": True}], ids=str)
def test_flex_attention_caps_scores_and_gives_sinks_their_share(changes: dict[str, Any]) -> None:
    for batch in ("q5s40_q1s33_q20", "q1s0_q1s5", "2q3s21"):
        one = problem(batch, "ragged", **changes)
        assert_right(one, create("flex_attention:triton").plan(one.batch, one.spec))


@pytest.mark.slow  # tracing alone takes seconds
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_is_compiled_computes_the_same() -> None:
    one = problem("2q3s21", "ragged", sinks=True)
    planned = create("flex_attention:triton").plan(one.batch, one.spec)
    planned._attend = flex.attend  # type: ignore[attr-defined]
    assert_right(one, planned)


@pytest.mark.slow  # as above
def test_only_queries_that_fit_a_block_of_the_mask_go_to_the_kernel_for_short_ones() -> None:
    """On an H200 PyTorch found no kernel for extends of 33 to 127 tokens at 4 query heads a KV head."""
    for batch, long in (("q1s300", False), ("q64s300", True), ("q130s300", True)):
        one = problem(batch, "paged_nhd", heads_q=8, heads_kv=2)
        planned = create("flex_attention:triton").plan(one.batch, one.spec)
        assert planned._long is long  # type: ignore[attr-defined]


def test_other_lengths_windows_and_masks_use_what_is_compiled() -> None:
    compiled = CompileCounterWithBackend("eager")
    attend = torch.compile(flex.attend, fullgraph=True, backend=compiled)

    def run(batch: str, **changes: Any) -> int:
        one = problem(batch, "paged_nhd", **changes)
        planned = create("flex_attention:triton").plan(one.batch, one.spec)
        planned._attend = attend  # type: ignore[attr-defined]
        assert_right(one, planned)
        return int(compiled.frame_count)

    # The first lengths are compiled as they are, the second for any.
    for masked in (False, True):
        run("q150s200_q20", custom_mask=masked)
        before = run("q300s400_q20", custom_mask=masked)
        assert run("q160s333_q3s7", custom_mask=masked) == before
        assert run("q160s333_q3s7", custom_mask=masked, window=(6, 0)) == before
        assert run("q150s200_q20", custom_mask=masked, causal=False) == before


@pytest.mark.parametrize(
    ("backend", "batch", "layout", "copies"),
    [
        ("torch_sdpa:flash", "q5s40_q1s33", "ragged", []),
        ("torch_sdpa:flash", "q5s40_q1s33", "contiguous", []),
        ("torch_sdpa:flash", "2q1s40", "contiguous", []),
        ("torch_sdpa:flash", "q1s40_q1s33", "contiguous", ["KV padding zeroed"]),
        ("torch_sdpa:math", "q5s40_q1s33", "paged_hnd", ["paged KV gathered to dense"]),
        ("flex_attention:triton", "q5s40_q1s33", "ragged", []),
        ("flex_attention:triton", "2q3s21", "contiguous", []),
        ("flex_attention:triton", "q5s40_q1s33", "contiguous", ["contiguous KV gathered to dense"]),
        (
            "flex_attention:triton",
            "q1s40_q1s33",
            "paged_nhd",
            ["paged KV gathered to dense", "KV padded to the longest member"],
        ),
    ],
)
def test_a_plan_names_the_copies_that_a_layout_forces(backend: str, batch: str, layout: str, copies: list[str]) -> None:
    one = problem(batch, layout)
    assert create(backend).plan(one.batch, one.spec).forced_copies == copies


@pytest.mark.parametrize("backend", ["torch_sdpa:flash", "flex_attention:triton"])
def test_what_a_plan_cannot_do_it_refuses(backend: str) -> None:
    one = problem("q1s40", "ragged")
    with pytest.raises(UserError, match="no CUDA graph"):
        create(backend).plan(one.batch, one.spec, graph=True)
    capped = problem("q1s40", "ragged", softcap=2.0, sinks=True)
    with pytest.raises(UserError, match="torch_sdpa:flash: no softcap, sinks"):
        create("torch_sdpa:flash").plan(capped.batch, capped.spec)


def test_a_row_that_a_custom_mask_blinds_gives_nothing() -> None:
    one = problem("q5s40_q1s33", "ragged", custom_mask=True)
    assert one.batch.masks is not None
    one.batch.masks[0][3] = False
    for backend in ("torch_sdpa:flash", "torch_sdpa:math"):
        out, lse = create(backend).plan(one.batch, one.spec).run(one.q_THD, one.k, one.v)
        assert not out[3].any()
        assert torch.isfinite(out).all()
        assert lse is None or bool((lse[3] == -float("inf")).all())


def test_the_efficient_kernel_reads_groups_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the kernel is missing: what it would be called with is computed by the math operator."""
    one, seen = problem("q5s40_q3s33", "ragged", alibi=True), []
    aten = torch.ops.aten

    def efficient(q: Any, k: Any, v: Any, bias: Any, *rest: Any, scale: float) -> tuple[Any, ...]:
        seen.extend((k, v))
        assert q.shape[:2] == k.shape[:2] == v.shape[:2] == bias.shape[:2]
        assert all(stride % 8 == 0 for stride in bias.stride()[:-1])
        out, _ = aten._scaled_dot_product_attention_math(q, k, v, bias, scale=scale)
        padded = -(-q.shape[2] // 32) * 32
        lse = torch.logsumexp(q @ k.mT * scale + bias, -1)
        return out, torch.nn.functional.pad(lse, (0, padded - q.shape[2])), None, None

    monkeypatch.setattr(aten, "_scaled_dot_product_efficient_attention", efficient, raising=False)
    assert_right(one, create("torch_sdpa:efficient").plan(one.batch, one.spec))
    storages = {one.k.untyped_storage().data_ptr(), one.v.untyped_storage().data_ptr()}
    assert {tensor.untyped_storage().data_ptr() for tensor in seen} == storages
