"""The service: one instance's parts together, whether it is ready, and what it says about itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attention.cases import Phase
from attention.faults import FAULTS
from attention.scheduler import FinishReason, Generation
from attention.serve.engine import FAILING_STEPS, Engine
from attention.serve.metrics import Metrics
from attention.serve.request_log import Instance, RequestLog, RequestRow, now, peak_memory_bytes
from attention.serve.tracing import Trace, no_trace

if TYPE_CHECKING:
    from attention.startup import Started
# A step that takes longer is worth a word before it counts as one that hangs.
SLOW_STEP_S = 10.0
# A client that is told to wait longer than this decides for itself: OpenAI's own takes no more.
MAX_RETRY_S = 60
# Weight of the newest request in the mean that Retry-After is estimated from.
_NEWEST = 0.1

SHOWN_PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class Call:
    """Who asks, from the request's headers. `arrived` is a `time.perf_counter` second."""

    request_id: str
    session_id: str | None
    role: str | None
    shadow: bool
    endpoint: str
    arrived: float
    traceparent: str | None = None


class Service:
    """What the handlers work on. Lives on the event loop's thread."""

    def __init__(
        self, instance: Instance, engine: Engine, metrics: Metrics, log: RequestLog, trace: Trace = no_trace
    ) -> None:
        self.instance = instance
        self.engine = engine
        self.metrics = metrics
        self.log = log
        self.trace = trace
        self.draining = False  # for good: the process ends
        self.paused = False  # by POST /admin/drain, until /admin/resume
        self.num_open = 0  # requests whose row is still to be written
        self._mean_s = 0.0  # seconds that a request runs, newest first

    def reasons_not_ready(self) -> list[str]:
        """Empty when the start-up probes passed, every phase is resolved, and steps do not fail."""
        if self.draining:
            return ["draining: the server is shutting down"]
        if self.engine.failure is not None:
            return [f"startup failed: {self.engine.failure}"]
        if self.engine.started is None:
            return ["probes: the startup probes have not passed yet", "backends: not resolved yet"]
        if not self.engine.alive:
            return ["engine: its thread has ended; restart the instance"]
        if self.engine.num_failed_steps >= FAILING_STEPS:
            return [f"model: the last {self.engine.num_failed_steps} steps failed"]
        if self.paused:
            return ["draining: asked for by POST /admin/drain; POST /admin/resume ends it"]
        return self._reasons_of_policy(self.engine.started)

    def _reasons_of_policy(self, started: Started) -> list[str]:
        """What the policy says no to while the model runs."""
        unserved = started.dispatcher.unserved()
        reasons = [f"backends: no backend is left for {phase}: {why}" for phase, why in unserved.items()]
        if self.engine.over_budget is not None:
            reasons.append(f"fallback budget: drained, since {self.engine.over_budget}; restart the instance")
        if started.dispatcher.policy.mode == "pinned":
            reasons += [f"pinned: {text}" for text in self.mismatches()]
        return reasons

    def mismatches(self) -> list[str]:
        """Where the execution layer names another backend than was resolved."""
        if self.engine.started is None:
            return []
        found = self.engine.started.dispatcher.mismatches
        return [f"{one.bucket} ran {ran} where {one.backend} was resolved" for one, ran in found.items()]

    def reasons_not_live(self) -> list[str]:
        """Empty unless only a restart helps: the engine's thread has ended without being told to."""
        return [] if self.draining or self.engine.alive else ["engine: its thread has ended; restart the instance"]

    @property
    def timeout_text(self) -> str:
        return f"not finished within {self.engine.limits.request_timeout_s:g} s, this server's bound"

    def observe_seconds(self, generation: Generation) -> None:
        """Learn from a request that has ended how long one runs."""
        if generation.admitted is not None and generation.finished is not None:
            seconds = generation.finished - generation.admitted
            self._mean_s += (seconds - self._mean_s) * (_NEWEST if self._mean_s else 1.0)

    def retry_after_s(self) -> int:
        """Seconds until what waits now has been admitted, by the mean that a request runs; 1 to MAX_RETRY_S."""
        seconds = self.engine.num_waiting * self._mean_s / self.engine.limits.max_running
        return min(MAX_RETRY_S, max(1, math.ceil(seconds)))

    @property
    def fingerprint_id(self) -> str:
        """Empty until the start is complete."""
        return self.engine.started.fingerprint.id if self.engine.started else ""

    def backends(self) -> dict[str, dict[Phase, str]]:
        """requested, resolved and confirmed, by phase."""
        if self.engine.started is None:
            return {"requested": {}, "resolved": {}, "confirmed": {}}
        dispatcher = self.engine.started.dispatcher
        return {
            "requested": dict(dispatcher.requested),
            "resolved": dict(dispatcher.resolved),
            "confirmed": dict(dispatcher.confirmed),
        }

    def headers(self) -> dict[str, str]:
        """Response headers: who served."""
        confirmed = self.backends()["confirmed"]
        return {
            "x-attention-release": self.instance.release_id,
            "x-attention-fingerprint": self.fingerprint_id,
            "x-attention-instance": self.instance.name,
            "x-attention-backend": ",".join(f"{phase}={confirmed.get(phase, '')}" for phase in SHOWN_PHASES),
        }

    def about(self) -> dict[str, Any]:
        """What /health, /fingerprint and the start-up log line have in common."""
        fallbacks = self.engine.started.dispatcher.fallbacks if self.engine.started else []
        return {
            "release": self.instance.release_id,
            "side": self.instance.side,
            "instance": self.instance.name,
            "model": self.instance.model,
            "fingerprint": self.fingerprint_id,
            **self.backends(),
            "fallbacks": [
                {
                    "phase": f.phase,
                    "from": f.from_backend,
                    "to": f.to_backend,
                    "reasons": [str(reason) for reason in f.reasons],
                }
                for f in fallbacks
            ],
            "replay": self._replay(),
            "fault": self.instance.fault,
            "fault_effect": FAULTS[self.instance.fault] if self.instance.fault else None,
        }

    def _replay(self) -> dict[str, Any] | None:
        """Relative errors of the basic replay; None where it was not asked for."""
        replayed = self.engine.started.replayed if self.engine.started else None
        return None if replayed is None else {"served": replayed.served, "math": replayed.math, "ratio": replayed.ratio}

    def health(self) -> dict[str, Any]:
        reasons = self.reasons_not_ready()
        warnings = [self.log.failure] if self.log.failure else []
        warnings += self.mismatches()
        if (seconds := self.engine.step_seconds()) > SLOW_STEP_S:
            warnings.append(f"the present step has been running for {seconds:.0f} s")
        if self.log.num_dropped:
            warnings.append(f"{self.log.num_dropped} request rows were dropped")
        return {
            "live": not self.reasons_not_live(),
            "ready": not reasons,
            "failed": self.engine.failure is not None,  # it will not become ready
            "reasons": reasons,
            "warnings": warnings,
            "running": self.engine.num_running,
            "waiting": self.engine.num_waiting,
            "kv_pages": self.engine.kv_pages,
            **self.about(),
        }

    def observe_state(self) -> None:
        """Bring the gauges up to date."""
        engine = self.engine
        budget = engine.fallback.budget if engine.fallback else None
        device = engine.started.runner.device if engine.started else "cpu"
        self.metrics.observe_pages(engine.kv_pages)
        self.metrics.observe_state(
            peak_memory_bytes=peak_memory_bytes(device),
            requests_running=engine.num_running,
            requests_waiting=engine.num_waiting,
            fallback_budget_share=budget.share if budget else 0.0,
            fallback_budget_exceeded=float(budget.is_exceeded) if budget else 0.0,
            backend_mismatch=len(self.mismatches()),
        )

    def policy(self) -> dict[str, Any]:
        """The policy in force and what it came to: per phase the chain, and why every other backend was left out."""
        assert self.engine.started is not None
        dispatcher = self.engine.started.dispatcher
        phases = {
            phase: {
                "requested": found.requested,
                "resolved": dispatcher.resolved[phase],
                "confirmed": dispatcher.confirmed[phase],
                "chain": list(found.chain),
                "left_out": {
                    name: [reason.model_dump(mode="json") for reason in reasons]
                    for name, reasons in found.excluded.items()
                },
            }
            for phase, found in dispatcher.resolutions.items()
        }
        return {"policy": dispatcher.policy.model_dump(mode="json"), "phases": phases}

    def row(
        self,
        call: Call,
        generation: Generation,
        *,
        finish_reason: FinishReason,
        error: str | None,
        status: int,
        stream: bool,
        seconds: float,
        prompt_text: str,
        output_text: str,
    ) -> RequestRow:
        """The lake's row of one request that was taken on, or refused for lack of room."""
        requested = self.backends()["requested"]
        prefill, decode = (requested.get(phase) for phase in SHOWN_PHASES)
        return RequestRow(
            fingerprint_id=self.fingerprint_id,
            time=now(),
            request_id=call.request_id,
            session_id=call.session_id,
            role=call.role,
            shadow=call.shadow,
            endpoint=call.endpoint,
            stream=stream,
            status=status,
            finish_reason=finish_reason,
            prompt_tokens=len(generation.prompt_ids),
            output_tokens=len(generation.output_ids),
            queue_s=generation.queue_s,
            ttft_s=generation.ttft_s,
            tpot_s=generation.tpot_s,
            e2e_s=seconds,
            requested_backend=prefill if prefill == decode else f"prefill={prefill},decode={decode}",
            # Null where the phase did not run: one output token needs no decode.
            resolved_prefill=_of_prompt(generation.resolved),
            resolved_decode=generation.resolved.get("decode"),
            confirmed_prefill=_of_prompt(generation.confirmed),
            confirmed_decode=generation.confirmed.get("decode"),
            fallback=bool(generation.fallback_reasons),
            fallback_reason=", ".join(generation.fallback_reasons) or None,
            num_nonfinite=generation.num_nonfinite,
            batch_size_mean=generation.batch_size_mean,
            peak_memory_bytes=peak_memory_bytes(self.engine.started.runner.device if self.engine.started else "cpu"),
            prompt_text=prompt_text,
            output_text=output_text,
            token_ids=list(generation.output_ids),
            error=error,
        )


def _of_prompt(by_phase: Mapping[Phase, str]) -> str | None:
    """The backend that computed the prompt. Where its beginning was reused only the rest of it ran, which is an extend,
    or, of one token, what a decode is."""
    return by_phase.get("prefill") or by_phase.get("extend") or by_phase.get("decode")
