"""Prometheus metrics of an instance: the six of README.md, "Serve, and metrics", and what a service level needs beside.

Figures come from the execution layer: `selected_total` counts under the *confirmed* backend, kernel
seconds from the dispatcher's record of each step. Each instance has a registry of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from attention.basic_replay import REPLAY
from attention.dispatch import FallbackEvent, StepRecord
from attention.probe import ProbeResult
from attention.reasons import Code
from attention.scheduler import FinishReason, Generation

# A `_created` series beside each counter would be a seventh name.
disable_created_metrics()  # type: ignore[no-untyped-call]

# Written as decimals: 5 * 10**-6 would be the bound 4.9999999999999996e-06.
_KERNEL_BUCKETS = tuple(float(f"{base}e{power}") for power in range(-6, 1) for base in (1, 2.5, 5))
# Ten a decade, 1 ms to 100 s, so that a quantile is known to a quarter. With bounds of 20 and 50 ms a P99 that goes
# from 19.9 to 20.1 ms would look like 50, and an alert on half as much again would go off.
_TEN = (1, 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.3, 8)
_LATENCY_BUCKETS = (*(float(f"{base}e{power}") for power in range(-3, 2) for base in _TEN), 100.0)

# Backends that compile their kernels at first use.
_JIT_FAMILIES = frozenset({"triton", "flex_attention", "flashinfer"})

_PROBE_VALUE = {"pass": 1, "fail": 0, "known_bad": 0, "unknown": -1}
_WORST_FIRST = (0, -1, 1)


#: Gauges of what is so when the page is read.
_STATE = {
    "peak_memory_bytes": "Most memory that this process held: of the GPU, else its resident set.",
    "requests_running": "Requests in the present steps.",
    "requests_waiting": "Requests in the queue.",
    "fallback_budget_share": "Share of the window's requests that fell back.",
    "fallback_budget_exceeded": "1 while one more request that falls back would be refused.",
    "backend_mismatch": "Signatures (phase, shape bucket, backend) that ran another backend than was resolved.",
}


def _bounded(backend: str) -> str:
    """A label that kernels' names cannot multiply: what is unconfirmed is so without the name of a kernel."""
    return "unconfirmed" if backend.startswith("unconfirmed") else backend


class Metrics:
    """All metrics of one instance. Thread-safe, as prometheus-client is."""

    def __init__(self, *, node: str, gpu: str, model: str) -> None:
        self.registry = CollectorRegistry()
        self._node, self._gpu, self._model, self._dtype = node, gpu, model, ""
        self._selected = self._counter(
            "attention_backend_selected_total",
            "Requests per phase under the backend that the execution layer confirmed.",
            "model", "gpu", "dtype", "phase", "backend",
        )  # fmt: skip
        self._fallback = self._counter(
            "attention_backend_fallback_total", "A backend gave way to another.", "from", "to", "reason"
        )
        self._kernel = self._histogram(
            "attention_kernel_latency_seconds",
            "Seconds of attention per layer, mean over the layers of a step.",
            _KERNEL_BUCKETS,
            "backend", "phase", "shape_bucket",
        )  # fmt: skip
        self._numerical = self._counter(
            "attention_numerical_gate_fail_total",
            "Numerical probes, and phases of the basic replay, that failed.",
            "model", "backend", "test_case",
        )  # fmt: skip
        self._probe = Gauge(
            "attention_probe_status",
            "Worst probe of a feature: 1 pass, 0 fail, -1 unknown.",
            ("node", "model", "backend", "feature"),
            registry=self.registry,
        )
        self._jit = Gauge(
            "attention_jit_compile_seconds",
            "Seconds of the first call of a kernel that is compiled at first use.",
            ("backend", "kernel_signature"),
            registry=self.registry,
        )
        self._pages = Gauge(
            "attention_kv_pages",
            "Pages of the KV cache: free, and total. An idle instance with fewer free than total leaks.",
            ("state",),
            registry=self.registry,
        )
        self._requests = self._counter("attention_requests_total", "Requests ended.", "finish_reason", "traffic")
        # There from the start: the first value of a counter that was not there is no increase to Prometheus.
        for reason in get_args(FinishReason):
            for traffic in ("live", "shadow"):
                self._requests.labels(reason, traffic)
        self._nonfinite = self._counter("attention_nonfinite_logits_total", "Logits rows with NaN or Inf.")
        self._queue = self._histogram("attention_queue_seconds", "Arrival to admission.", _LATENCY_BUCKETS)
        self._ttft = self._histogram("attention_ttft_seconds", "Arrival to first token.", _LATENCY_BUCKETS)
        self._tpot = self._histogram("attention_tpot_seconds", "Mean between output tokens.", _LATENCY_BUCKETS)
        self._confirmation = self._histogram(
            "attention_confirmation_seconds",
            "What asking the execution layer added to a call.",
            _KERNEL_BUCKETS,
            "phase",
        )
        self._refused = self._counter(
            "attention_fallback_refused_total", "Requests that would have fallen back, beyond the policy's budget."
        )
        self._info = self._gauge(
            "attention_build_info", "1, with what serves.", "model", "gpu", "fingerprint", "policy_mode", "torch"
        )
        self._state = {name: self._gauge(f"attention_{name}", text) for name, text in _STATE.items()}

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=tuple(buckets), registry=self.registry)

    def observe_pages(self, pages: dict[str, int]) -> None:
        for state, number in pages.items():
            self._pages.labels(state).set(number)

    def observe_state(self, **now: float) -> None:
        """What is so when somebody reads the page: figures of `_STATE` by name."""
        for name, value in now.items():
            self._state[name].set(value)

    def observe_build(self, *, fingerprint: str, policy_mode: str, torch: str) -> None:
        """What serves; once, when it is ready."""
        self._info.labels(self._model, self._gpu, fingerprint, policy_mode, torch).set(1)

    def observe_confirmation(self, phase: str, seconds: float) -> None:
        self._confirmation.labels(phase).observe(seconds)

    def observe_refused(self) -> None:
        self._refused.inc()

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)

    def observe_startup(self, *, dtype: str, probes: Iterable[ProbeResult]) -> None:
        """What the start-up probes showed; a feature has the status of its worst probe."""
        self._dtype = dtype
        worst: dict[tuple[str, str], int] = {}
        for probe in probes:
            key = (probe.backend, probe.feature)
            worst[key] = min(worst.get(key, 1), _PROBE_VALUE[probe.status], key=_WORST_FIRST.index)
            if any(reason.code is Code.NUMERIC_DRIFT for reason in probe.reasons):
                self._numerical.labels(self._model, probe.backend, probe.probe).inc()
        for (backend, feature), value in worst.items():
            self._probe.labels(self._node, self._model, backend, feature).set(value)

    def observe_fallback(self, fallback: FallbackEvent) -> None:
        names = {"from": _bounded(fallback.from_backend), "to": _bounded(fallback.to_backend)}
        labels = {**names, "reason": fallback.reason}
        self._fallback.labels(**labels).inc()
        if fallback.kind == "startup_fallback" and any(reason.source == REPLAY for reason in fallback.reasons):
            self._numerical.labels(self._model, fallback.from_backend, f"replay_{fallback.phase}").inc()

    def observe_step(self, record: StepRecord) -> None:
        for run in record.phases:
            if run.kernel_seconds > 0:
                seconds = run.kernel_seconds / max(1, run.layers)
                self._kernel.labels(_bounded(run.confirmed), run.phase, run.bucket).observe(seconds)
            if run.first_call_seconds is not None and run.resolved.partition(":")[0] in _JIT_FAMILIES:
                self._jit.labels(run.resolved, run.bucket).set(run.first_call_seconds)

    def observe_finished(self, generation: Generation) -> None:
        """One request that has ended, whatever way."""
        traffic = "shadow" if generation.shadow else "live"
        self._requests.labels(generation.finish_reason or "error", traffic).inc()
        for phase, backend in generation.confirmed.items():
            self._selected.labels(self._model, self._gpu, self._dtype, phase, _bounded(backend)).inc()
        if generation.num_nonfinite:
            self._nonfinite.inc(generation.num_nonfinite)
        for histogram, seconds in (
            (self._queue, generation.queue_s),
            (self._ttft, generation.ttft_s),
            (self._tpot, generation.tpot_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)
