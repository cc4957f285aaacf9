"""Public reports as cases: a sound backend passes, the reported defect is named by its reason code.

`python -m tests.reports` prints the table: one line a report, and how it runs here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attention.backends import create
from attention.backends.base import Backend, Planned
from attention.backends.oracle import OracleBackend
from attention.cases import AttentionCase
from attention.checks import CHECKS, NotApplicable, repeats, run_check
from attention.errors import UserError
from attention.reasons import Code, Reason
from attention.replay.problems import make
from tests.reports import mutants, real
from tests.reports.extra_checks import EXTRA_CHECKS
from tests.reports.reports import REPORTS, Report, case, half

torch.set_num_threads(1)  # tests share two cores with others

every_report = pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.id)
with_real_call = pytest.mark.parametrize("report", [r for r in REPORTS if r.real], ids=lambda report: report.id)
on_gpu = pytest.mark.parametrize(
    ("report", "name"),
    [pytest.param(report, name, id=f"{report.id}-{name}") for report in REPORTS for name in report.gpu],
)


def judge(report: Report, backend: Backend, device: str = "cpu") -> list[Reason]:
    if report.check in EXTRA_CHECKS:
        return EXTRA_CHECKS[report.check](backend, report.case, device)
    if report.check == "graph_replay" and device == "cpu":
        return repeats.replayed(backend, report.case, device, capture_eagerly)
    return run_check(report.check, backend, report.case, device)


def capture_eagerly(
    planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, Callable[[], None]]:
    """A graph of the CPU: a static output that each replay fills."""
    out = planned.run(q, k, v)[0].clone()

    def replay() -> None:
        out.copy_(planned.run(q, k, v)[0])

    return out, replay


@every_report
def test_a_sound_backend_passes(report: Report) -> None:
    found = judge(report, report.sound())
    assert found == []
    if isinstance(found, NotApplicable):  # nothing was tested: no pass, but for what offsets of 64 bits settle
        assert report.check == "index_range"
        assert "64-bit offsets" in found.why


@every_report
def test_the_reported_defect_is_named(report: Report) -> None:
    found = judge(report, report.mutant())
    assert report.code in {reason.code for reason in found}, found


@with_real_call
def test_the_installed_library_still_fails_or_does_not(report: Report) -> None:
    assert report.real is not None
    found = judge(report, report.real())
    assert not isinstance(found, NotApplicable)
    codes = {reason.code for reason in found}
    assert not codes if report.here == "fixed" else report.code in codes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@on_gpu
def test_on_a_gpu_the_backend_is_sound_or_has_the_reported_defect(report: Report, name: str) -> None:
    """Which of the two is printed (`-rP`): a later version may have fixed it. Anything else is news."""
    try:
        backend = create(name, "cuda")
    except UserError as error:
        pytest.skip(str(error))
    if refused := backend.check(report.case):
        pytest.skip("; ".join(map(str, refused)))
    found = judge(report, backend, "cuda")
    if isinstance(found, NotApplicable):
        pytest.skip(found.why)
    print(f"{report.id} on {name}: {', '.join(map(str, found)) or 'sound'}")
    assert {reason.code for reason in found} <= {report.code}, found


def test_ids_are_unique_and_at_least_thirty_reports_run() -> None:
    ids = [report.id for report in REPORTS]
    assert len(set(ids)) == len(ids) >= 30
    assert all(report.url.startswith("https://github.com/") for report in REPORTS)
    assert {report.check for report in REPORTS} <= {*CHECKS, *EXTRA_CHECKS}
    assert all(report.here is not None for report in REPORTS if report.real)


def test_every_mutant_stands_for_a_report() -> None:
    used = {report.mutant for report in REPORTS}
    kinds = {kind for kind in vars(mutants).values() if isinstance(kind, type) and issubclass(kind, mutants.Mutant)}
    assert kinds - used == {mutants.Mutant, mutants.AlibiIgnored}


@pytest.mark.parametrize(
    "problem_case",
    [
        case(),
        half("q5s21_q1s18_q20", softcap=5.0, window=(6, 0)),
        case(alibi=True, sinks=True, custom_mask=True, layout="ragged", page_size=None),
        case(layout="contiguous", page_size=None),
        half(layout="paged_hnd", kv_dtype="float8_e4m3fn"),
        case("q3s0_q5s2_q4"),
    ],
    ids=lambda problem_case: problem_case.case_id,
)
def test_the_sound_backend_is_the_rounded_truth(problem_case: AttentionCase) -> None:
    problem = make(problem_case, "normal", 1)
    out, lse = OracleBackend().plan(problem.batch, problem.spec).run(problem.q_THD, problem.k, problem.v)
    assert torch.equal(out, problem.truth.out_QHD.to(out.dtype))
    assert lse is not None
    assert torch.equal(lse, problem.truth.lse_QH.float())


def test_alibi_that_is_dropped_is_named() -> None:
    """No report of section 4 drops all slopes, but constructors that accept and never read them exist."""
    codes = {reason.code for reason in run_check("alibi", mutants.AlibiIgnored(), case(alibi=True), "cpu")}
    assert codes == {Code.ALIBI_IGNORED}


def test_pytorch_101967_literally() -> None:
    """q, k and v of 1 x 2 x 4; the second key is masked for both rows; NaN in it, in K or V, reaches the output."""
    q = torch.arange(8.0).reshape(1, 2, 4)
    mask = torch.tensor([[[True, False], [True, False]]])
    clean = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert clean.isfinite().all()
    for poisoned in ("key", "value"):
        tensors = {"query": q, "key": q.clone(), "value": q.clone()}
        tensors[poisoned][0, 1, 0] = float("nan")
        assert torch.nn.functional.scaled_dot_product_attention(**tensors, attn_mask=mask).isnan().any()


def test_pytorch_110144_literally() -> None:
    """2 queries over 6 keys with is_causal: row 0 sees key 0 alone, not keys 0 to 4."""
    q, k, v = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out[0, 0, 0], v[0, 0, 0])


def test_pytorch_163314_is_refused_by_the_installed_version() -> None:
    with pytest.raises(RuntimeError, match="sliced BlockMask"):
        real.sliced_flex_mask()


def test_flashinfer_4451_has_a_sound_answer_on_the_cpu() -> None:
    """One key of score -524288: torch gives its value, 1.0, as the report expects of FlashInfer."""
    q, k, v = torch.full((1, 1, 1, 64), -1024.0), torch.full((1, 1, 1, 64), 64.0), torch.ones(1, 1, 1, 64)
    assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, k, v), v)


def test_strides_that_are_ignored_harm_no_dense_tensor() -> None:
    problem = make(case(), "normal", 2)
    planned = mutants.StridesIgnored().plan(problem.batch, problem.spec)
    out, _ = planned.run(problem.q_THD, problem.k, problem.v)
    assert torch.equal(out, problem.truth.out_QHD.to(out.dtype))


def test_offsets_that_wrap_read_another_page() -> None:
    """The defect that `index_range` computes, shown on a smaller integer: 2^9 elements instead of 2^31."""
    mutant = mutants.PageOffsetInt32()
    assert run_check("needles", mutant, case(), "cpu") == []
    mutant.elements = 2**9
    assert {reason.code for reason in run_check("needles", mutant, case(), "cpu")} == {Code.NUMERIC_DRIFT}
