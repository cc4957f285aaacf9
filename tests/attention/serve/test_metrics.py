"""Metrics: the six names of the design with their labels, counted from what the execution layer confirmed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from attention.basic_replay import REPLAY
from attention.cases import AttentionCase, shape_bucket
from attention.dispatch import FallbackEvent, PhaseRun, StepRecord
from attention.probe import ProbeResult, Status
from attention.reasons import Code, Reason
from attention.sampling import SamplingParams
from attention.scheduler import Generation
from attention.serve.fallbacks import FallbackNotice
from attention.serve.metrics import Metrics
from attention.serve.request_log import RequestLog
from tests.attention.fake_runner import FakeRunner
from tests.attention.serve.fake_instance import INSTANCE, read_rows, serving

SIX = {
    "attention_backend_selected_total": {"model", "gpu", "dtype", "phase", "backend"},
    "attention_backend_fallback_total": {"from", "to", "reason"},
    "attention_kernel_latency_seconds": {"backend", "phase", "shape_bucket"},
    "attention_numerical_gate_fail_total": {"model", "backend", "test_case"},
    "attention_probe_status": {"node", "model", "backend", "feature"},
    "attention_jit_compile_seconds": {"backend", "kernel_signature"},
}

CASE = AttentionCase(
    phase="decode", batch="q1s64", heads_q=2, heads_kv=1, head_dim_qk=64, head_dim_vo=64, dtype="float32", page_size=16
)
DRIFT = Reason(
    code=Code.NUMERIC_DRIFT, dimension="error", observed="2", allowed="1", source="probe", message="too far off"
)


def metrics() -> Metrics:
    return Metrics(node="here", gpu="cpu", model="m")


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def probe(feature: str, status: Status, *, drift: bool = False) -> ProbeResult:
    return ProbeResult(
        backend="a:x",
        probe=f"probe_{feature}",
        level="execute",
        feature=feature,
        required=True,
        case=CASE,
        status=status,
        reasons=(DRIFT,) if drift else (),
    )


FALLBACK = FallbackEvent("request_fallback", "decode", "a:x", "b:y", (DRIFT,))


def test_the_six_metrics_have_the_names_and_labels_of_the_design() -> None:
    one = metrics()
    one.observe_startup(dtype="float32", probes=[probe("decode", "fail", drift=True)])
    one.observe_fallback(FALLBACK)
    run = PhaseRun("decode", "decode/kv<=64", "triton:paged", "triton:paged", "triton:paged", 1)
    run.kernel_seconds, run.layers, run.first_call_seconds = 0.3, 30, 1.5
    one.observe_step(StepRecord([run]))
    one._selected.labels("m", "cpu", "float32", "decode", "a:x").inc()
    found = samples(one.text().decode())
    for name, labels in SIX.items():
        series = found.get(name) or found[f"{name}_count"]
        assert set(series[0][0]) == labels, name
    assert found["attention_jit_compile_seconds"][0][1] == 1.5
    assert found["attention_kernel_latency_seconds_sum"][0][1] == pytest.approx(0.01)
    assert not [name for name in found if name.endswith("_created")]


def test_a_feature_has_the_status_of_its_worst_probe() -> None:
    one = metrics()
    probes = [probe("good", "pass"), probe("good", "pass"), probe("mixed", "pass"), probe("mixed", "unknown")]
    probes += [probe("bad", "unknown"), probe("bad", "fail"), probe("bad", "pass"), probe("known", "known_bad")]
    one.observe_startup(dtype="float32", probes=probes)
    status = {labels["feature"]: value for labels, value in samples(one.text().decode())["attention_probe_status"]}
    assert status == {"good": 1, "mixed": -1, "bad": 0, "known": 0}


def test_only_a_numerical_failure_counts_as_one() -> None:
    one = metrics()
    one.observe_startup(dtype="float32", probes=[probe("a", "fail"), probe("b", "fail", drift=True)])
    (series,) = samples(one.text().decode())["attention_numerical_gate_fail_total"]
    assert series == ({"model": "m", "backend": "a:x", "test_case": "probe_b"}, 1.0)


def test_a_backend_that_is_not_compiled_at_first_use_has_no_compile_time() -> None:
    one = metrics()
    run = PhaseRun("decode", "decode/kv<=64", "torch_sdpa:math", "torch_sdpa:math", "torch_sdpa:math", 1)
    run.first_call_seconds = 0.1
    one.observe_step(StepRecord([run]))
    assert "attention_jit_compile_seconds" not in samples(one.text().decode())


def test_a_request_counts_once_a_phase_under_the_confirmed_backend(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        for max_tokens in (1, 5):
            running.post("/v1/completions", {"prompt": "hello", "max_tokens": max_tokens, "temperature": 0})
        found = samples(running.client.get("/metrics").text)
        selected = {labels["phase"]: value for labels, value in found["attention_backend_selected_total"]}
        assert selected == {"prefill": 2, "decode": 1}
        assert {labels["backend"] for labels, _ in found["attention_backend_selected_total"]} == {"torch_sdpa:math"}
        assert found["attention_ttft_seconds_count"] == [({}, 2.0)]
        assert found["attention_tpot_seconds_count"] == [({}, 1.0)]
        assert found["attention_queue_seconds_count"] == [({}, 2.0)]


def test_a_fallback_is_counted_each_time_and_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, log = metrics(), RequestLog(tmp_path, INSTANCE)
    notice = FallbackNotice(one, log, emit=True)
    for _ in range(3):
        notice(FALLBACK)
    log.close()
    (series,) = samples(one.text().decode())["attention_backend_fallback_total"]
    assert series == ({"from": "a:x", "to": "b:y", "reason": "NUMERIC_DRIFT"}, 3.0)
    assert capsys.readouterr().err.count("request_fallback") == 1
    (got,) = read_rows(tmp_path, "events")
    assert got["message"] == "decode: a:x gave way to b:y"
    assert "too far off" in got["detail_json"]


def test_a_policy_that_emits_no_event_still_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, log = metrics(), RequestLog(tmp_path, INSTANCE)
    FallbackNotice(one, log, emit=False)(FALLBACK)
    log.close()
    assert len(samples(one.text().decode())["attention_backend_fallback_total"]) == 1
    assert read_rows(tmp_path, "events") == []
    assert capsys.readouterr().err == ""


def test_what_is_so_when_the_page_is_read(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        running.service.metrics.observe_build(fingerprint="f1", policy_mode="auto", torch="2")
        running.service.metrics.observe_confirmation("decode", 0.002)
        found = samples(running.client.get("/metrics").text)
        assert found["attention_requests_running"] == found["attention_requests_waiting"] == [({}, 0.0)]
        assert found["attention_peak_memory_bytes"][0][1] > 1e7
        assert found["attention_backend_mismatch"] == found["attention_fallback_budget_exceeded"] == [({}, 0.0)]
        assert found["attention_fallback_budget_share"] == found["attention_fallback_refused_total"] == [({}, 0.0)]
        labels = {"model": "fake-1m", "gpu": "cpu", "fingerprint": "f1", "policy_mode": "auto", "torch": "2"}
        assert found["attention_build_info"] == [(labels, 1.0)]
        assert found["attention_confirmation_seconds_sum"] == [({"phase": "decode"}, 0.002)]


def test_what_clients_send_makes_no_series(tmp_path: Path) -> None:
    with serving(tmp_path, FakeRunner(num_pages=256, max_context=512)) as running:

        def series() -> int:
            return sum(len(found) for found in samples(running.client.get("/metrics").text).values())

        def ask(i: int, length: int) -> None:
            body = {"prompt": "x" * length, "max_tokens": 2, "seed": i, "stop": [f"{i}"], "user": f"u{i}"}
            own = {"x_request_id": f"r{i}", "x_session_id": f"s{i}", "x_attention_role": f"role{i}"}
            running.post("/v1/completions", body, host=f"h{i}", user_agent=f"a{i}", traceparent=f"00-{i}", **own)
            running.post("/v1/completions", {**body, "model": f"m{i}"})
            running.post(f"/v1/{i}", body)

        for i, length in enumerate((1, 30, 60, 120, 240)):
            ask(i, length)
        before = series()
        for i in range(15):
            ask(100 + i, 1 + 16 * i)
        assert series() == before


def test_lengths_are_powers_of_two() -> None:
    one = metrics()
    for kv_len in range(1, 1 << 17, 15):
        run = PhaseRun("decode", shape_bucket("decode", kv_len), "triton:paged", "triton:paged", "triton:paged", 1)
        run.kernel_seconds, run.layers, run.first_call_seconds = 0.1, 1, 0.1
        one.observe_step(StepRecord([run]))
    found = samples(one.text().decode())
    assert len(found["attention_kernel_latency_seconds_count"]) == len(found["attention_jit_compile_seconds"]) == 14


def test_how_requests_end_is_there_from_the_start() -> None:
    found = samples(metrics().text().decode())["attention_requests_total"]
    assert {value for _, value in found} == {0.0}
    assert {(labels["finish_reason"], labels["traffic"]) for labels, _ in found} == {
        (reason, traffic) for reason in ("stop", "length", "error", "cancelled") for traffic in ("live", "shadow")
    }


def test_a_backend_that_the_basic_replay_rejects_failed_a_numerical_gate() -> None:
    one = metrics()
    reason = DRIFT.model_copy(update={"source": REPLAY})
    one.observe_fallback(FallbackEvent("startup_fallback", "decode", "a:x", "b:y", (reason,)))
    one.observe_fallback(FallbackEvent("startup_fallback", "prefill", "a:x", "b:y", (DRIFT,)))  # its probe is counted
    (series,) = samples(one.text().decode())["attention_numerical_gate_fail_total"]
    assert series == ({"model": "m", "backend": "a:x", "test_case": "replay_decode"}, 1.0)


def test_bounds_of_histograms_are_written_as_they_are_meant() -> None:
    found = samples(metrics().text().decode())["attention_tpot_seconds_bucket"]
    bounds = [float(labels["le"]) for labels, _ in found][:-1]
    assert all(len(labels["le"]) <= 7 for labels, _ in found)
    assert {0.001, 0.2, 2.0, 5.0, 100.0} <= set(bounds)
    assert all(upper / lower < 1.3 for lower, upper in pairwise(bounds))


def test_kernels_without_a_name_are_one_series(tmp_path: Path) -> None:
    one = metrics()
    for i in range(100):
        name = f"unconfirmed(kernel_{i})"
        run = PhaseRun("decode", "decode/kv<=64", "a:x", "a:x", name, 1)
        run.kernel_seconds, run.layers = 0.1, 1
        one.observe_step(StepRecord([run]))
        one.observe_fallback(FallbackEvent("backend_mismatch", "decode", "a:x", name, ()))
        finished = Generation(str(i), (1,), SamplingParams(max_tokens=1))
        finished.confirmed["decode"] = name
        one.observe_finished(finished)
    found = samples(one.text().decode())
    for name in ("attention_kernel_latency_seconds_count", "attention_backend_selected_total"):
        assert [labels["backend"] for labels, _ in found[name]] == ["unconfirmed"]
    assert found["attention_backend_fallback_total"] == [
        ({"from": "a:x", "to": "unconfirmed", "reason": "UNCONFIRMED"}, 100.0)
    ]
