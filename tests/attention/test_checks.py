"""Checks find each defect and name it, and a sound backend passes them all: mutants of the oracle and of SDPA."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention.backends import create
from attention.backends.base import AttentionSpec, Batch, Planned
from attention.backends.oracle import OracleBackend
from attention.cases import AttentionCase
from attention.checks import CHECKS, NotApplicable, fails, run_check
from attention.checks.common import Measured, raised
from attention.checks.memory import index_reasons, restrided
from attention.checks.repeats import replayed
from attention.errors import UserError
from attention.reasons import Code, Reason

Result = tuple[torch.Tensor, torch.Tensor | None]

FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 20.0},
    "kv_scales": {"kv_dtype": "float8_e4m3fn"},
    "window_edge": {"window": (20, 0)},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
}
#: Every feature at once, with scores that the cap does not flatten.
ALL_FEATURES = {name: value for changes in FEATURES.values() for name, value in changes.items()}


def case(**changes: Any) -> AttentionCase:
    fields: dict[str, Any] = {
        "phase": "extend",
        "batch": "q5s70_q1s33_q20",
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim_qk": 16,
        "head_dim_vo": 16,
        "dtype": "bfloat16",
    }
    return AttentionCase(**{**fields, **changes})


class Mutant:
    """The oracle with a defect: `spec` misreads the spec, `batch` the batch, `inputs` and `result` spoil a run."""

    name = "oracle:mutant"

    def __init__(
        self,
        *,
        spec: Callable[[AttentionSpec], AttentionSpec] = lambda spec: spec,
        batch: Callable[[Batch], Batch] = lambda batch: batch,
        inputs: Callable[[Planned, torch.Tensor, torch.Tensor, torch.Tensor], Any] = lambda planned, q, k, v: (q, k, v),
        result: Callable[[Planned, Result], Result] = lambda planned, result: result,
    ) -> None:
        self.spec, self.batch, self.inputs, self.result = spec, batch, inputs, result

    def check(self, case: AttentionCase) -> list[Reason]:
        return []

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        return _PlannedMutant(self, batch, spec)


class _PlannedMutant(Planned):
    def __init__(self, mutant: Mutant, batch: Batch, spec: AttentionSpec) -> None:
        super().__init__("oracle:mutant", batch, spec)
        self.mutant = mutant

    def run(self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor) -> Result:
        sound = OracleBackend().plan(self.mutant.batch(self.batch), self.mutant.spec(self.spec))
        return self.mutant.result(self, sound.run(*self.mutant.inputs(self, q_THD, k_NPGD, v_NPGD)))

    def replan(self, batch: Batch) -> None:
        self._check_fits(batch)
        self.batch = batch


def codes(name: str, backend: Any, one: AttentionCase) -> list[Code]:
    return [reason.code for reason in run_check(name, backend, one)]


def ignoring(**changes: Any) -> Mutant:
    return Mutant(spec=lambda spec: replace(spec, **changes))


# Sound backends.


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float32"},
        {"layout": "ragged", "page_size": None},
        {"layout": "contiguous", "page_size": None},
        {"layout": "paged_hnd", "page_size": 8},
        {"causal": False, "window": (9, 5)},
        {"custom_mask": True},
        ALL_FEATURES,
        *FEATURES.values(),
    ],
    ids=str,
)
def test_the_oracle_passes_every_check_in_every_layout_and_with_every_feature(changes: dict[str, Any]) -> None:
    for name in CHECKS:
        assert run_check(name, OracleBackend(), case(**changes)) == [], name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize("batch", ["q31s160", "q1s65_q1s17", "q20"])
def test_sound_kernels_fail_no_check(kernel: str, batch: str, dtype: str) -> None:
    one = case(batch=batch, dtype=dtype, window=(40, 0))
    backend = create(f"torch_sdpa:{kernel}")
    for name in CHECKS:
        assert not fails(run_check(name, backend, one)), name


@pytest.mark.parametrize("name", FEATURES)
def test_a_check_of_a_feature_that_the_case_lacks_is_no_pass(name: str) -> None:
    found = run_check(name, OracleBackend(), case())
    assert isinstance(found, NotApplicable)
    assert found.why
    assert not isinstance(run_check(name, OracleBackend(), case(**FEATURES[name])), NotApplicable)


def test_what_a_backend_declares_to_refuse_is_not_applicable_unless_it_is_tried() -> None:
    capped = case(softcap=20.0)
    found = run_check("softcap", create("torch_sdpa:math"), capped)
    assert isinstance(found, NotApplicable)
    assert "no softcap" in found.why
    tried = run_check("softcap", create("torch_sdpa:math"), capped, try_declared=True)
    assert [r.code for r in tried] == [Code.SOFTCAP_UNSUPPORTED]


def test_an_unknown_check_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(UserError, match=r"check 'soft_cap' is unknown; did you mean softcap"):
        run_check("soft_cap", OracleBackend(), case())


def test_a_first_call_is_measured() -> None:
    found = run_check("first_call", OracleBackend(), case())
    assert isinstance(found, Measured)
    assert found.seconds > 0


# Features that are ignored.


@pytest.mark.parametrize("extra", [{}, ALL_FEATURES], ids=["alone", "among all features"])
@pytest.mark.parametrize(
    ("name", "broken", "code"),
    [
        ("softcap", ignoring(softcap=None), Code.SOFTCAP_IGNORED),
        ("kv_scales", ignoring(k_scale=1.0), Code.KV_SCALE_IGNORED),
        ("kv_scales", ignoring(v_scale=1.0), Code.KV_SCALE_IGNORED),
        ("window_edge", ignoring(window=(None, None)), Code.SWA_IGNORED),
        ("sinks", ignoring(sinks=None), Code.SINK_IGNORED),
        ("alibi", ignoring(alibi_slopes=None), Code.ALIBI_IGNORED),
    ],
)
def test_an_ignored_feature_is_named_by_its_own_check_and_by_no_other(
    name: str, broken: Mutant, code: Code, extra: dict[str, Any]
) -> None:
    one = case(**{**FEATURES[name], **extra})
    assert codes(name, broken, one) == [code]
    for other in FEATURES:
        if other != name:
            assert codes(other, broken, one) == [], other


def test_both_scales_that_are_ignored_are_both_named() -> None:
    found = run_check("kv_scales", ignoring(k_scale=1.0, v_scale=1.0), case(kv_dtype="float8_e4m3fn"))
    assert [r.dimension for r in found] == ["k_scale", "v_scale"]


def test_two_ignored_features_are_each_named_by_their_check() -> None:
    broken = ignoring(softcap=None, sinks=None)
    one = case(softcap=20.0, sinks=True)
    assert codes("softcap", broken, one) == [Code.SOFTCAP_IGNORED]
    assert codes("sinks", broken, one) == [Code.SINK_IGNORED]


@pytest.mark.parametrize("batch", ["q5s70", "q1s70", "q40"])
@pytest.mark.parametrize(("left", "text"), [(21, "off by one: the key at distance 21"), (19, "off by one: the key at")])
def test_a_window_off_by_one_is_named(batch: str, left: int, text: str) -> None:
    (found,) = run_check("window_edge", ignoring(window=(left, 0)), case(batch=batch, window=(20, 0)))
    assert (found.code, found.dimension) == (Code.SWA_IGNORED, "window")
    assert found.message.startswith(text)


def test_both_sides_of_a_window_are_checked() -> None:
    one = case(causal=False, window=(9, 5))
    found = run_check("window_edge", ignoring(window=(9, None)), one)
    assert [(r.code, r.allowed) for r in found] == [(Code.SWA_IGNORED, "right 5")]


def top_left(batch: str = "q5s70") -> Mutant:
    """Causal relative to the first key: the keys after row i are masked away, the diagonal's are not seen."""

    def masked(batch: Batch) -> Batch:
        masks = tuple(torch.ones(q, kv).tril().bool() for q, kv in zip(batch.q_lens, batch.kv_lens, strict=True))
        return replace(batch, masks=masks)

    return Mutant(batch=masked, spec=lambda spec: replace(spec, causal=False))


@pytest.mark.parametrize("batch", ["q5s70", "q1s70", "q5s70_q20"])
def test_a_causal_mask_from_the_top_left_is_named(batch: str) -> None:
    assert codes("causal_alignment", top_left(), case(batch=batch)) == [Code.CAUSAL_ALIGNMENT]


def test_a_square_problem_cannot_tell_how_a_mask_is_aligned() -> None:
    assert isinstance(run_check("causal_alignment", top_left(), case(batch="q20")), NotApplicable)


# Numbers.


def test_a_scale_that_is_five_percent_off_is_drift() -> None:
    broken = Mutant(spec=lambda spec: replace(spec, scale=spec.scale * 1.05))
    found = run_check("numeric", broken, case(dtype="float32"))
    assert {r.code for r in found} == {Code.NUMERIC_DRIFT}
    assert {r.dimension for r in found} == {"R_rms"}


def test_an_output_of_another_shape_is_drift_of_the_shape() -> None:
    broken = Mutant(result=lambda planned, result: (result[0][:-1], None))
    assert {r.dimension for r in run_check("numeric", broken, case())} == {"shape"}


@pytest.mark.parametrize(
    ("place", "name"),
    [(0, "first key"), (32, "last key"), (15, "last key of the first page"), (16, "first key of the second page")],
)
def test_a_lost_key_is_named_by_its_place(place: int, name: str) -> None:
    def without(batch: Batch) -> Batch:
        seen = torch.ones(1, batch.kv_lens[0], dtype=torch.bool)
        seen[:, place] = False
        return replace(batch, masks=(seen,))

    one = case(batch="q1s33")
    found = run_check("needles", Mutant(batch=without), one)
    assert (Code.NUMERIC_DRIFT, f"needle at the {name}") in [(r.code, r.dimension) for r in found]
    assert run_check("needles", OracleBackend(), one) == []


def test_a_lost_window_edge_is_a_lost_needle() -> None:
    found = run_check("needles", ignoring(window=(19, 0)), case(batch="q1s70", window=(20, 0)))
    assert "needle at the window edge" in [r.dimension for r in found]


def with_lse(change: Callable[[torch.Tensor], torch.Tensor]) -> Mutant:
    return Mutant(result=lambda planned, result: (result[0], change(result[1])))


def test_a_base_two_lse_is_named() -> None:
    assert codes("lse", with_lse(lambda lse: lse / math.log(2)), case()) == [Code.LSE_BASE]


def test_another_lse_is_drift_of_the_lse() -> None:
    (found,) = run_check("lse", with_lse(lambda lse: lse + 1), case())
    assert (found.code, found.dimension) == (Code.NUMERIC_DRIFT, "lse")


def test_a_sink_that_is_not_in_the_lse_is_named() -> None:
    (found,) = run_check("lse", ignoring(sinks=None), case(sinks=True))
    assert found.message == "the sink is missing in the LSE"


def test_a_finite_lse_where_a_row_sees_nothing_is_named() -> None:
    broken = with_lse(lambda lse: lse.nan_to_num(neginf=0.0))
    assert codes("lse", broken, case(batch="q5s3_q1s33")) == [Code.EMPTY_ROW_SEMANTICS]


# Memory.


def whole_pages(batch: Batch) -> Batch:
    """Every slot of a member's pages counts as a key."""
    page = batch.page_size or 1
    return replace(batch, kv_lens=tuple(len(table) * page for table in batch.block_tables))


def test_a_kernel_that_reads_whole_pages_is_poisoned() -> None:
    broken = Mutant(batch=whole_pages, spec=lambda spec: replace(spec, causal=False))
    one = case(batch="q1s33", causal=False)
    # Zero keys weigh too: without poison it is wrong already, which other checks say.
    assert isinstance(run_check("pad_poison", broken, one), NotApplicable)
    assert codes("numeric", broken, one) == [Code.PAD_POISON]


def poisoned_by(leak: Callable[[Planned, torch.Tensor, torch.Tensor], torch.Tensor]) -> Mutant:
    """Adds 0 times what the last page's unused slots hold, as a kernel does that masks scores and not values."""
    state: dict[str, torch.Tensor] = {}

    def inputs(planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        state["leak"] = leak(planned, k, v)
        return q, k, v

    return Mutant(inputs=inputs, result=lambda planned, result: (result[0] + 0 * state["leak"], result[1]))


def test_values_that_are_multiplied_by_zero_are_poison() -> None:
    def last_value(planned: Planned, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return v[planned.batch.block_tables[0][-1], -1].sum()

    found = run_check("pad_poison", poisoned_by(last_value), case(batch="q1s33"))
    assert [(r.code, r.dimension) for r in found] == [
        (Code.PAD_POISON, "unowned slots: K and V"),
        (Code.PAD_POISON, "unowned slots: V alone"),
    ]


def test_finite_garbage_that_is_read_is_found_where_nan_is_cleaned_away() -> None:
    def cleaned(planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return q, k, v.nan_to_num(0.0)

    def leaks(planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        v = v.nan_to_num(0.0)
        garbage = v[planned.batch.block_tables[0][-1], -1]
        return q, k, v + garbage

    one = case(batch="q1s33")
    assert run_check("pad_poison", Mutant(inputs=cleaned), one) == []
    found = run_check("pad_poison", Mutant(inputs=leaks), one)
    assert [r.dimension for r in found] == ["unowned slots: K and V, finite"]


def test_the_strides_of_v_used_for_k_are_found() -> None:
    def borrowed(planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return q, torch.as_strided(k, k.shape, v.stride(), k.storage_offset()), v

    found = run_check("strides", Mutant(inputs=borrowed), case(batch="q5s70"))
    assert {r.code for r in found} == {Code.STRIDE_UNSUPPORTED}
    assert {r.dimension for r in found} == {
        f"strides of {name} ({kind})" for name in ("k", "v") for kind in ("transposed", "sliced")
    }


def test_a_refusal_of_strides_is_a_reason_with_its_text() -> None:
    def strict(planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        if not k.is_contiguous():
            raise RuntimeError("k must be contiguous")
        return q, k, v

    found = run_check("strides", Mutant(inputs=strict), case())
    assert {(r.code, r.message) for r in found} == {(Code.STRIDE_UNSUPPORTED, "k must be contiguous")}
    assert codes("expand", Mutant(inputs=strict), case()) == [Code.STRIDE_UNSUPPORTED]


def test_expanded_heads_that_are_read_as_if_they_were_stored_are_found() -> None:
    def stored(planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        if 0 in k.stride() and planned.batch.kv_lens[0] % 32 == 1:
            k = k.roll(1, 0)
        return q, k, v

    assert codes("expand", Mutant(inputs=stored), case(batch="q1s70")) == [Code.STRIDE_UNSUPPORTED]


@pytest.mark.parametrize("kind", ["transposed", "sliced"])
def test_restrided_views_hold_the_same_values(kind: str) -> None:
    for shape in ((5, 4, 16), (3, 8, 2, 16)):
        tensor = torch.randn(shape)
        view = restrided(tensor, kind)
        assert torch.equal(view, tensor)
        assert view.stride() != tensor.stride()
        assert view.stride(-1) == 1


def test_a_row_without_keys_must_give_zero() -> None:
    def mean_of_nothing(planned: Planned, result: Result) -> Result:
        out, lse = result
        return out.masked_fill(torch.isinf(lse)[..., None], 0.5), lse

    found = run_check("empty_members", Mutant(result=mean_of_nothing), case())
    assert {r.code for r in found} == {Code.EMPTY_ROW_SEMANTICS}
    assert {r.dimension for r in found} == {"member without keys", "more queries than keys"}


def test_a_crash_on_an_empty_member_is_named_as_that() -> None:
    def refuse(batch: Batch) -> Batch:
        if 0 in batch.kv_lens:
            raise RuntimeError("CUDA error: invalid configuration argument")
        return batch

    found = run_check("empty_members", Mutant(batch=refuse), case())
    assert {(r.code, r.dimension) for r in found} == {
        (Code.EMPTY_KV_UNSUPPORTED, "zero-length member"),
        (Code.EMPTY_KV_UNSUPPORTED, "member without keys"),
    }


def test_an_index_that_wraps_is_computed_and_not_run() -> None:
    stride = 16 * 8 * 128
    one = case(heads_q=8, heads_kv=8, head_dim_qk=128, head_dim_vo=128)
    assert index_reasons(2**31 // stride, one) == []
    (found,) = index_reasons(2**31 // stride + 1, one)
    assert (found.code, found.allowed) == (Code.INDEX_RANGE, "<= 2147483647 elements")
    huge = one.model_copy(update={"batch": f"q1s{2**31 // (8 * 128) + 16}"})
    assert codes("index_range", OracleBackend(), huge) == [Code.INDEX_RANGE]
    assert run_check("index_range", create("torch_sdpa:math"), huge) == [], "it is declared to index with 64 bits"


# Repeats.


def every_other(change: Callable[[torch.Tensor], torch.Tensor]) -> Mutant:
    calls = [0]

    def spoil(planned: Planned, result: Result) -> Result:
        calls[0] += 1
        return (change(result[0]), result[1]) if calls[0] % 2 else result

    return Mutant(result=spoil)


def test_bits_that_change_from_call_to_call_are_named() -> None:
    found = run_check("repeatability", every_other(lambda out: out * 1.01), case())
    assert {r.code for r in found} == {Code.NONDETERMINISTIC}


def remembering(key: Callable[[Planned, torch.Tensor], Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Mutant:
    """A cache of plans: another call in between changes what the first gives."""
    seen: list[Any] = []

    def inputs(planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        seen.append(key(planned, k))
        return q, k, v

    def result(planned: Planned, result: Result) -> Result:
        return (change(result[0]), result[1]) if len(set(seen)) > 1 else result

    return Mutant(inputs=inputs, result=result)


def test_a_call_that_another_call_changes_is_named() -> None:
    rounding = remembering(lambda planned, k: planned.batch.kv_lens, lambda out: out * (1 + 2**-8))
    assert codes("call_order", rounding, case()) == [Code.SUBKERNEL_CHANGED]
    stale = remembering(lambda planned, k: k.stride(), lambda out: out * 3)
    found = run_check("call_order", stale, case())
    assert {r.code for r in found} == {Code.NUMERIC_DRIFT}
    assert "call order: other strides" in [r.dimension for r in found]


def test_a_member_whose_rounding_depends_on_its_company_is_recorded_with_its_size() -> None:
    def split(planned: Planned, result: Result) -> Result:
        return (result[0] * (1 + 2**-8), result[1]) if len(planned.batch.q_lens) > 1 else result

    (found,) = run_check("batch_invariance", Mutant(result=split), case())
    assert found.code == Code.BATCH_VARIANT
    assert found.observed.startswith("max abs ")
    assert not fails([found])


def test_a_member_that_is_wrong_in_company_is_drift() -> None:
    def neighbours(planned: Planned, result: Result) -> Result:
        return (result[0].flip(0), result[1]) if len(planned.batch.q_lens) > 1 else result

    assert {*codes("batch_invariance", Mutant(result=neighbours), case())} == {Code.NUMERIC_DRIFT}


def test_a_member_alone_gets_a_cache_of_its_own_length() -> None:
    """FlashInfer plans for a contiguous cache as long as its longest member, and takes no longer one."""

    def strict(planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        assert k.shape[1] == v.shape[1] == max(planned.batch.kv_lens)
        return q, k, v

    contiguous = case(batch="q5s37_q20", layout="contiguous", page_size=None)
    assert run_check("batch_invariance", Mutant(inputs=strict), contiguous) == []


def emulated(planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """A captured graph, as far as the CPU has one: static output, made in inference mode, that each replay fills."""
    with torch.inference_mode():
        out = planned.run(q, k, v)[0].clone()
    return out, lambda: out.copy_(planned.run(q, k, v)[0])


class Stale(Mutant):
    """Replans without effect on what was captured."""

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        planned = super().plan(batch, spec, graph=graph)
        planned.replan = lambda batch: None  # type: ignore[method-assign]
        return planned


def test_a_replay_after_replan_must_serve_the_new_lengths() -> None:
    for one in (case(batch="q1s70_q1s33"), case(batch="q5s70", window=(20, 0))):
        assert replayed(OracleBackend(), one, "cpu", emulated) == []
        (found,) = replayed(Stale(), one, "cpu", emulated)
        assert (found.code, found.observed) == (Code.GRAPH_REPLAY_STALE, "the captured lengths and pages")


def test_a_capture_that_fails_is_named_as_that() -> None:
    def fail(planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    (found,) = replayed(OracleBackend(), case(), "cpu", fail)
    assert found.code == Code.GRAPH_CAPTURE_FAILED
    (refused,) = replayed(_NoReplan(), case(), "cpu", emulated)
    assert (refused.code, refused.dimension) == (Code.GRAPH_CAPTURE_FAILED, "replan")


class _NoReplan(Mutant):
    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        planned = super().plan(batch, spec, graph=graph)
        planned.replan = lambda batch: Planned.replan(planned, batch)  # type: ignore[method-assign]
        return planned


def test_graphs_need_a_gpu() -> None:
    assert isinstance(run_check("graph_replay", OracleBackend(), case()), NotApplicable)


# Equivalences.


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (Mutant(result=lambda planned, result: (result[0] * 1.2, result[1])), "V = 1 gives 1"),
        (with_lse(lambda lse: lse / math.log(2)), "halves merged through the LSE"),
        (
            Mutant(inputs=lambda planned, q, k, v: (q, k.roll(1, 0) if planned.batch.paged else k, v)),
            "paged = contiguous",
        ),
        (
            Mutant(inputs=lambda planned, q, k, v: (q, k if planned.spec.heads_kv == 4 else k.flip(-2), v)),
            "GQA = repeated MHA",
        ),
        (
            Mutant(spec=lambda spec: spec if spec.causal else replace(spec, causal=True)),
            "permuted keys",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_two_ways_to_ask_disagree_without_an_oracle(broken: Mutant, what: str) -> None:
    found = run_check("equivalences", broken, case())
    assert {r.code for r in found} == {Code.NUMERIC_DRIFT}
    assert what in [r.dimension for r in found]


# Exceptions.


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ImportError("lib.so: undefined symbol: _ZN2at"), Code.ABI_MISMATCH),
        (ModuleNotFoundError("No module named 'flashinfer'"), Code.IMPORT_FAILED),
        (RuntimeError("Ninja build failed. nvcc fatal"), Code.JIT_COMPILE_FAILED),
        (RuntimeError("FlashAttention only supports Ampere GPUs or newer"), Code.ARCH_UNSUPPORTED),
        (RuntimeError("head dimension at most 256"), Code.HEAD_DIM_UNSUPPORTED),
        (RuntimeError("Unsupported group_size: 7"), Code.GQA_RATIO_UNSUPPORTED),
        (RuntimeError("Paged KV cache block size must be divisible by 256"), Code.PAGE_SIZE_UNSUPPORTED),
        (TypeError("unsupported dtype float32"), Code.DTYPE_UNSUPPORTED),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Code.LAUNCH_FAILED),
    ],
)
def test_an_exception_is_a_reason_that_names_the_dimension_of_its_text(error: Exception, code: Code) -> None:
    found = raised("launch", error)
    assert (found.code, found.dimension) == (code, "launch")


def test_a_backend_that_raises_is_a_reason_and_no_exception() -> None:
    def fail(batch: Batch) -> Batch:
        raise RuntimeError("out of\n shared memory")

    for name in ("numeric", "needles", "lse", "repeatability"):
        (found,) = run_check(name, Mutant(batch=fail), case())
        assert (found.code, found.message) == (Code.LAUNCH_FAILED, "out of shared memory")
