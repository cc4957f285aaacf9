"""What is said when a backend gives way to another: counted each time, told once a minute."""

from __future__ import annotations

import time
from dataclasses import asdict

from attention.fallback import FallbackEvent, PoolAdvice
from attention.serve.log import event
from attention.serve.metrics import Metrics
from attention.serve.request_log import RequestLog

# A fallback that lasts repeats with every step; the metric has the count.
REPEAT_S = 60.0
_SEVERITIES = {"backend_failed": "critical", "backend_mismatch": "critical"}


class FallbackNotice:
    """Called by the dispatcher, on the engine thread, with each fallback and each mismatch."""

    def __init__(self, metrics: Metrics, log: RequestLog, *, emit: bool) -> None:
        """`emit` is the policy's emit_fallback_event: without it a fallback is counted only."""
        self._metrics = metrics
        self._log = log
        self._emit = emit
        self._told: dict[tuple[str, ...], float] = {}

    def __call__(self, fallback: FallbackEvent) -> None:
        self._metrics.observe_fallback(fallback)
        key = (fallback.kind, fallback.phase, fallback.from_backend, fallback.to_backend, fallback.reason)
        if not self._emit or not self._is_due(key):
            return
        detail = {
            "phase": fallback.phase,
            "from": fallback.from_backend,
            "to": fallback.to_backend,
            "reasons": [reason.model_dump(mode="json") for reason in fallback.reasons],
        }
        message = f"{fallback.phase}: {fallback.from_backend} gave way to {fallback.to_backend}"
        severity = _SEVERITIES.get(fallback.kind, "warning")
        event(fallback.kind, severity=severity, message=message, **detail)
        self._log.add_event(fallback.kind, severity, fallback.from_backend, message, detail)

    def refused(self, why: str) -> None:
        """A request would have had to fall back, and the policy had no room for it."""
        self._metrics.observe_refused()
        if self._is_due(("fallback_refused",)):
            event("fallback_refused", severity="critical", message=why)
            self._log.add_event("fallback_refused", "critical", "fallback budget", why, {})

    def advise(self, advice: PoolAdvice) -> None:
        """A class of requests keeps falling back."""
        detail = {**asdict(advice.fallen), "num": advice.num, "share": advice.share, "added_s": advice.added_s}
        event("fallback_class", severity="warning", message=str(advice), **detail)
        self._log.add_event("fallback_class", "warning", advice.fallen.bucket, str(advice), detail)

    def _is_due(self, key: tuple[str, ...]) -> bool:
        now = time.monotonic()
        if now - self._told.get(key, float("-inf")) < REPEAT_S:
            return False
        self._told[key] = now
        return True
