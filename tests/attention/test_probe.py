"""Startup probes: nine of them, on three levels, and a worker that dies costs one row."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attention import probe as probing
from attention import probe_workers, sdpa_says
from attention.backends import create
from attention.backends.base import AttentionSpec, Backend, Batch, Planned
from attention.cases import AttentionCase
from attention.checks import CHECKS
from attention.probe import Probe, ProbeResult, failed_reasons, probes_of, run_probe, was_not_reached
from attention.probe_workers import probe_all
from attention.reasons import Code, Reason
from attention.schemas import SCHEMAS

FLASH, MATH = "torch_sdpa:flash", "torch_sdpa:math"
SPEC = AttentionSpec(9, 3, 64, 64, torch.float32, 1 / 8)
NINE = [
    "short_prefill",
    "long_prefill",
    "single_decode",
    "multi_decode",
    "max_head_dim",
    "gqa_mqa",
    "model_mask",
    "paged_kv",
    "graph_or_compile",
]


def probes() -> dict[str, Probe]:
    return {p.name: p for p in probes_of(SPEC, "float32", 16)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", [FLASH, MATH])
def test_sound_backends_pass_all_probes_but_the_one_that_they_never_claimed(backend: str, dtype: str) -> None:
    found = probes_of(SPEC, dtype, 16)
    assert [p.name for p in found] == [*NINE, "causal_alignment"]
    for one in found:
        results = list(run_probe(backend, one, "cpu"))
        if one.check is not None:
            assert [(r.level, r.status) for r in results] == [("static", "pass"), ("execute", "pass")]
            assert results[-1].confirmed_backend == backend
            continue
        if one.name == "graph_or_compile":
            assert [(r.level, r.status) for r in results] == [("static", "fail")]
            assert results[0].reasons[0].code == Code.GRAPH_CAPTURE_FAILED
            continue
        assert [r.level for r in results] == ["static", "construct", "execute"]
        assert {r.status for r in results} == {"pass"}, results
        assert results[-1].confirmed_backend == backend
        assert results[-1].max_abs_error is not None


def test_probes_are_of_the_shape_of_the_model() -> None:
    found = {
        p.name: p for p in probes_of(AttentionSpec(8, 2, 128, 128, torch.bfloat16, 0.1, window=(7, 0)), "bfloat16", 32)
    }
    paged = found["paged_kv"].case
    assert (paged.heads_q, paged.heads_kv, paged.head_dim_qk, paged.window) == (8, 2, 128, (7, 0))
    assert (paged.batch, paged.page_size) == ("q1s32_q1s161", 32)
    assert found["model_mask"].feature == "sliding_window"
    assert (found["gqa_mqa"].case.heads_kv, found["max_head_dim"].case.head_dim_qk) == (1, 256)
    assert [n for n, p in found.items() if not p.required] == ["max_head_dim", "gqa_mqa", "graph_or_compile"]


def test_a_scale_five_percent_off_fails_with_the_figure() -> None:
    for name in ("short_prefill", "single_decode", "multi_decode", "model_mask"):
        *_, last = run_probe(FLASH, probes()[name], "cpu", scale_factor=1.05)
        assert (last.level, last.status) == ("execute", "fail")
        assert last.reasons[0].code == Code.NUMERIC_DRIFT
        assert last.reasons[0].dimension == "R_rms"


class Leaking:
    """Reads whole pages, so the unused slots of the last one too."""

    name = FLASH

    def check(self, case: AttentionCase) -> list[Reason]:
        return []

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        whole = tuple(len(table) * batch.page_size for table in batch.block_tables)
        return create(FLASH).plan(Batch(batch.q_lens, whole, batch.block_tables, batch.page_size), spec)


class Lying(Leaking):
    """Runs another kernel than it says."""

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        return create(MATH).plan(batch, spec)


class Unlaunchable(Leaking):
    """Plans well and raises at launch, with a message of several lines."""

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        return Planned("none", batch, spec)


class Unplannable(Leaking):
    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        raise ImportError("libfoo.so:\n undefined symbol")


def last_of(monkeypatch: pytest.MonkeyPatch, backend: Backend, name: str = "single_decode") -> ProbeResult:
    monkeypatch.setattr(probing, "create", lambda name, device: backend)
    *_, last = run_probe(FLASH, probes()[name], "cpu")
    return last


def test_a_backend_that_reads_unused_slots_fails_as_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    last = last_of(monkeypatch, Leaking())
    assert (last.status, [r.code for r in last.reasons]) == ("fail", [Code.PAD_POISON])
    assert last.max_abs_error is None


def test_a_backend_that_runs_another_kernel_fails_as_unconfirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    last = last_of(monkeypatch, Lying())
    assert (last.status, [r.code for r in last.reasons]) == ("fail", [Code.UNCONFIRMED])
    assert last.confirmed_backend == MATH


def test_an_exception_is_a_row_of_its_level_with_its_message_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = last_of(monkeypatch, Unlaunchable())
    assert (launch.level, launch.status, launch.reasons[0].code) == ("execute", "fail", Code.LAUNCH_FAILED)
    assert launch.reasons[0].observed == "NotImplementedError"
    construct = last_of(monkeypatch, Unplannable())
    assert (construct.level, construct.status) == ("construct", "fail")
    assert construct.reasons[0].message == "libfoo.so: undefined symbol"


def test_a_row_has_columns_of_the_lake_only() -> None:
    for result in run_probe(MATH, probes()["short_prefill"], "cpu"):
        assert set(result.row()) <= set(SCHEMAS["probes"].names)


CHOSEN = [probes()[name] for name in ("short_prefill", "long_prefill", "single_decode", "paged_kv")]


@pytest.fixture(scope="module")
def accidents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[ProbeResult]]:
    """Real workers, one backend of which touches address 0 in one probe and exits in the next.

    Python imports `sitecustomize` from PYTHONPATH at start: there the kernel is made to fail, so that
    the product needs no switch for it.
    """
    folder = tmp_path_factory.mktemp("accidents")
    (folder / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import ctypes, os, sys
            from attention.backends.torch_sdpa import TorchSdpa

            plan = TorchSdpa.plan

            def accident(self, batch, spec):
                if batch.q_lens == (512,):
                    print("about to touch address 0", file=sys.stderr, flush=True)
                    ctypes.string_at(0)
                if batch.kv_lens == (257,):
                    os._exit(3)
                return plan(self, batch, spec)

            TorchSdpa.plan = accident
            """
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        repo = str(Path(__file__).parents[2])
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), repo, os.environ.get("PYTHONPATH", "")]))
        results = probe_all((FLASH, "flashinfer:fa2"), CHOSEN, device="cpu")
    return {name: [r for r in results if r.backend == name] for name in (FLASH, "flashinfer:fa2")}


def outcome(results: list[ProbeResult], name: str) -> ProbeResult:
    return [r for r in results if r.probe == name][-1]


def test_a_crash_is_a_row_with_its_signal_and_later_probes_still_run(accidents: dict[str, list[ProbeResult]]) -> None:
    crashed = outcome(accidents[FLASH], "long_prefill")
    assert (crashed.level, crashed.status, crashed.reasons[0].code) == ("execute", "fail", Code.LAUNCH_FAILED)
    assert "signal 11" in crashed.reasons[0].message
    assert "about to touch address 0" in crashed.reasons[0].message
    assert outcome(accidents[FLASH], "short_prefill").status == "pass"
    assert outcome(accidents[FLASH], "paged_kv").status == "pass"


def test_a_worker_that_exits_is_a_row_with_its_status(accidents: dict[str, list[ProbeResult]]) -> None:
    exited = outcome(accidents[FLASH], "single_decode")
    assert (exited.status, exited.reasons[0].code) == ("fail", Code.LAUNCH_FAILED)
    assert "exit 3" in exited.reasons[0].message


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, chosen: list[Probe], *, at: int, accident: str) -> None:
    """A process that answers as a worker does, without its imports, but for probe `at`."""
    lines = {p.case.case_id: [r.model_dump_json() for r in run_probe(MATH, p, "cpu")] for p in chosen}
    task = [[json.loads(p.case.model_dump_json()), lines[p.case.case_id]] for p in chosen]
    worker = folder / "worker"
    worker.write_text(
        f"#!{sys.executable} -I\n"
        "import json, os, sys, time\n"
        f"lines = json.loads({json.dumps(task)!r})\n"
        "for probe in json.load(sys.stdin)['probes']:\n"
        f"    if probe['case'] == lines[{at}][0]:\n"
        f"        {accident}\n"
        "    print(*next(rows for case, rows in lines if case == probe['case']), sep='\\n', flush=True)\n"
    )
    worker.chmod(0o755)
    monkeypatch.setattr(probe_workers, "sys", SimpleNamespace(executable=str(worker)))


def test_a_hang_is_a_timeout_and_later_probes_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, CHOSEN, at=1, accident="time.sleep(300)")
    results = probe_all((MATH,), CHOSEN, device="cpu", timeout_s=4.0)
    hung = outcome(results, "long_prefill")
    assert (hung.status, hung.reasons[0].code) == ("fail", Code.TIMEOUT)
    assert hung.reasons[0].message == "no answer within 4 s"
    assert [outcome(results, n).status for n in ("short_prefill", "single_decode", "paged_kv")] == ["pass"] * 3


def test_a_crash_on_one_kind_of_layer_is_not_hidden_by_the_other_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windowed = {p.name: p for p in probes_of(replace(SPEC, window=(7, 0)), "float32", 16)}
    names = ("short_prefill", "single_decode")
    both = [probes()[n] for n in names] + [windowed[n] for n in names]
    stand_in(tmp_path, monkeypatch, both, at=2, accident="os.abort()")
    results = probe_all((MATH,), both, device="cpu", timeout_s=30.0)
    executed = {(r.probe, r.case.window): r for r in results if r.level == "execute"}
    assert len(executed) == 4
    crashed = executed.pop(("short_prefill", (7, 0)))
    assert (crashed.status, crashed.reasons[0].code) == ("fail", Code.LAUNCH_FAILED)
    assert "signal 6" in crashed.reasons[0].message
    assert {r.status for r in executed.values()} == {"pass"}
    assert [r.code for r in failed_reasons(results)[MATH]] == [Code.LAUNCH_FAILED]


def test_a_kind_of_layer_that_no_rule_allows_does_not_keep_the_other_from_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capped = {p.name: p for p in probes_of(replace(SPEC, softcap=30.0), "float32", 16)}
    both = [probes()["single_decode"], capped["single_decode"]]
    stand_in(tmp_path, monkeypatch, both, at=0, accident="pass")
    results = probe_all((MATH,), both, device="cpu", timeout_s=30.0)
    assert [(r.level, r.status) for r in results] == [
        ("static", "pass"),
        ("construct", "pass"),
        ("execute", "pass"),
        ("static", "fail"),
    ]


def test_no_level_of_a_probe_is_told_twice(accidents: dict[str, list[ProbeResult]]) -> None:
    for results in accidents.values():
        seen = [(r.probe, r.level) for r in results]
        assert len(seen) == len(set(seen))


def test_a_backend_that_no_rule_allows_gets_static_rows_without_a_worker(
    accidents: dict[str, list[ProbeResult]],
) -> None:
    rows = accidents["flashinfer:fa2"]
    assert [(r.level, r.status) for r in rows] == [("static", "fail")] * 4
    assert {reason.code for r in rows for reason in r.reasons} >= {Code.ARCH_UNSUPPORTED}


def test_what_failed_and_is_required_excludes_the_backend(accidents: dict[str, list[ProbeResult]]) -> None:
    results = [r for rows in accidents.values() for r in rows]
    failed = failed_reasons(results)
    assert set(failed) == {FLASH}
    assert [r.code for r in failed[FLASH]] == [Code.LAUNCH_FAILED, Code.LAUNCH_FAILED]
    optional = [r.model_copy(update={"required": False}) for r in results]
    assert failed_reasons(optional) == {}


# Checks as probes, and the two sets.


def test_start_up_asks_for_the_features_of_the_layer_and_for_nothing_else() -> None:
    spec = replace(SPEC, softcap=30.0, window=(7, 0), sinks=(1.0,) * 9)
    found = {p.check: p for p in probes_of(spec, "float32", 16, num_pages=1024) if p.check}
    assert set(found) == {"softcap", "window_edge", "sinks", "causal_alignment", "index_range"}
    assert [name for name, p in found.items() if not p.required] == ["index_range"]
    assert found["softcap"].case.features == ("causal", "sliding_window", "softcap", "sinks")


def test_the_full_set_adds_every_check_and_the_features_that_the_layer_lacks() -> None:
    startup = probes_of(SPEC, "float32", 16, num_pages=64)
    full = probes_of(SPEC, "float32", 16, num_pages=64, level="full")
    assert [p for p in full if p in startup] == startup
    assert {p.check for p in full} == {None, *CHECKS}
    assert full[0].check == "first_call", "nothing may have run before it"
    assert not any(p.required for p in full if p not in startup)
    assert len({(p.name, p.case) for p in full}) == len(full)


def test_a_check_that_does_not_apply_is_unknown_with_the_reason() -> None:
    one = Probe(name="lse", feature="lse", case=probes()["model_mask"].case, required=False, check="lse")
    static, executed = run_probe(MATH, one, "cpu")
    assert (static.status, executed.level, executed.status) == ("pass", "execute", "unknown")
    assert [(r.code, r.message) for r in executed.reasons] == [(Code.NOT_PROBED, "torch_sdpa:math gives no LSE")]
    assert {r.status for r in run_probe(FLASH, one, "cpu")} == {"pass"}


def test_what_is_recorded_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = Reason(
        code=Code.BATCH_VARIANT, dimension="d", observed="1e-7", allowed="0", source="probe", message="rounding"
    )
    monkeypatch.setattr(probing, "run_check", lambda *args, **kwargs: [variant])
    one = Probe(name="b", feature="b", case=probes()["model_mask"].case, required=False, check="batch_invariance")
    *_, last = run_probe(MATH, one, "cpu")
    assert (last.status, last.reasons) == ("pass", (variant,))


def test_a_known_bad_cell_is_told_from_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Reason(
        code=Code.NUMERIC_DRIFT, dimension="d", observed="o", allowed="a", source="known_bad: x#1", message="m"
    )
    monkeypatch.setattr(probing, "declared_reasons", lambda *args, **kwargs: [report])
    (static,) = run_probe(MATH, probes()["single_decode"], "cpu")
    assert (static.level, static.status) == ("static", "known_bad")


def test_what_rules_refuse_can_be_tried_to_see_who_is_right() -> None:
    capped = Probe(
        name="c", feature="c", case=AttentionCase(**{**probes()["model_mask"].case.model_dump(), "softcap": 5.0})
    )
    statuses = [(r.level, r.status) for r in run_probe(MATH, capped, "cpu", try_declared=True)]
    assert statuses == [("static", "fail"), ("construct", "fail")]  # the plan refuses what the rule refuses


def test_a_worker_whose_device_is_lost_gets_a_successor_and_no_probe_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It exits before probe 2 of each task: the second worker starts there.
    stand_in(tmp_path, monkeypatch, CHOSEN, at=2, accident="os._exit(75) if len(tasks) == 4 else None")
    worker = tmp_path / "worker"
    text = worker.read_text().replace(
        "for probe in json.load(sys.stdin)['probes']:", "tasks = json.load(sys.stdin)['probes']\nfor probe in tasks:"
    )
    worker.write_text(text)
    results = probe_all((MATH,), CHOSEN, device="cpu", timeout_s=30.0)
    assert [r.status for r in results if r.level == "execute"] == ["pass"] * 4


def test_what_a_library_remembers_of_one_probe_is_not_held_against_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FlashInfer remembers cuDNN's graphs: only the first batch of a process can be planned."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            from attention.backends.torch_sdpa import TorchSdpa
            from attention.errors import UserError

            plan, first = TorchSdpa.plan, []

            def forgetful(self, batch, spec):
                first.append(batch.kv_lens)
                if batch.kv_lens != first[0]:
                    raise UserError("another batch was here; use another process")
                return plan(self, batch, spec)

            TorchSdpa.plan = forgetful
            """
        )
    )
    repo = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), repo, os.environ.get("PYTHONPATH", "")]))
    results = probe_all((MATH,), CHOSEN[:2], device="cpu")
    assert [(r.level, r.status) for r in results] == [
        ("static", "pass"),
        ("construct", "pass"),
        ("execute", "pass"),
    ] * 2


def test_what_the_budget_leaves_is_unknown_and_not_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, CHOSEN, at=1, accident="time.sleep(300)")
    results = probe_all((MATH,), CHOSEN, device="cpu", timeout_s=30.0, budget_s=4.0)
    left = [outcome(results, n) for n in ("long_prefill", "single_decode", "paged_kv")]
    assert outcome(results, "short_prefill").status == "pass"
    assert {(r.status, r.reasons[0].code) for r in left} == {("unknown", Code.NOT_PROBED)}
    assert {r.reasons[0].message for r in left} == {"the time was spent before it"}
    assert all(map(was_not_reached, left))
    assert outcome(probe_all((MATH,), CHOSEN, device="cpu", budget_s=0.0), "short_prefill").status == "unknown"


def test_no_worker_runs_past_the_budget_and_rows_are_heard_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, CHOSEN, at=1, accident="os.system('sleep 60')")  # holds our pipe
    heard: list[tuple[float, str]] = []
    started = time.monotonic()
    probe_all(
        (MATH,),
        CHOSEN,
        device="cpu",
        budget_s=4.0,
        heard=lambda rows: heard.append((time.monotonic() - started, rows[-1].probe)),
    )
    assert time.monotonic() - started < 7
    assert heard[0][1] == "short_prefill"
    assert heard[0][0] < 3, "before the end"
    assert len(heard) == 4


def test_a_backend_that_hangs_leaves_the_others_their_turn_and_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, CHOSEN, at=1, accident="time.sleep(60) if task['backend'] == slow else None")
    worker = tmp_path / "worker"
    text = (
        worker.read_text()
        .replace(
            "for probe in json.load(sys.stdin)['probes']:",
            f"task, slow = json.load(sys.stdin), {MATH!r}\nfor probe in task['probes']:",
        )
        .replace("print(*next(rows ", "print(*next([row.replace(slow, task['backend']) for row in rows] ")
    )
    worker.write_text(text)
    monkeypatch.setattr(probe_workers, "_SHORTEST_TURN_S", 1.0)
    found = probe_all((MATH, FLASH), CHOSEN, device="cpu", jobs=1, timeout_s=30.0, budget_s=8.0)
    by = {(r.backend, r.probe): r.status for r in found}
    assert {by[FLASH, p.name] for p in CHOSEN} == {"pass"}
    assert by[MATH, "short_prefill"] == "pass"
    assert by[MATH, "long_prefill"] == "unknown", "not blamed"


def test_what_would_compile_first_comes_last_in_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, CHOSEN, at=0, accident="pass")
    order: list[str] = []
    probe_all(
        (MATH, FLASH),
        CHOSEN,
        device="cpu",
        jobs=1,
        by_head_dim=True,
        is_pending=lambda backend, case: backend == MATH,
        heard=lambda rows: order.append(rows[-1].probe),
        known={(FLASH, CHOSEN[0].name, CHOSEN[0].case)},
    )
    names = [p.name for p in CHOSEN]
    assert order == [*names[1:], *names], "and what is known is not probed again"


def test_warnings_of_pytorch_become_one_line() -> None:
    text = (
        "[W1129 10:00:00.0 sdp_utils.cpp:200] Warning: Flash attention requires head dim <= 256. Got 320. "
        "(function check_flash_attention_head_dim_size)\n"
    )
    assert sdpa_says.tidy(text) == "Flash attention requires head dim <= 256. Got 320."


def test_pytorch_is_not_asked_about_a_cpu_or_another_library() -> None:
    one = probes()["single_decode"].case
    assert sdpa_says.refusal(FLASH, one, "cpu") is None
    assert sdpa_says.refusal("flashinfer:fa2", one, "cuda") is None
