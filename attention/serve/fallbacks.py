"""What is said when a backend gives way to another: counted each time, told once a minute."""

from __future__ import annotations

import time

from attention.dispatch import FallbackEvent
from attention.serve.log import event
from attention.serve.metrics import Metrics
from attention.serve.request_log import RequestLog

# A fallback that lasts repeats with every step; the metric has the count.
REPEAT_S = 60.0


class FallbackNotice:
    """Called by the dispatcher, on the engine thread, with each fallback and each mismatch."""

    def __init__(self, metrics: Metrics, log: RequestLog, *, emit: bool) -> None:
        """`emit` is the policy's emit_fallback_event: without it a fallback is counted only."""
        self._metrics = metrics
        self._log = log
        self._emit = emit
        self._told: dict[tuple[str, str, str, str, str], float] = {}

    def __call__(self, fallback: FallbackEvent) -> None:
        self._metrics.observe_fallback(fallback)
        key = (fallback.kind, fallback.phase, fallback.from_backend, fallback.to_backend, fallback.reason)
        now = time.monotonic()
        if not self._emit or now - self._told.get(key, float("-inf")) < REPEAT_S:
            return
        self._told[key] = now
        detail = {
            "phase": fallback.phase,
            "from": fallback.from_backend,
            "to": fallback.to_backend,
            "reasons": [reason.model_dump(mode="json") for reason in fallback.reasons],
        }
        message = f"{fallback.phase}: {fallback.from_backend} gave way to {fallback.to_backend}"
        event(fallback.kind, severity="warning", message=message, **detail)
        self._log.add_event(fallback.kind, "warning", fallback.from_backend, message, detail)
