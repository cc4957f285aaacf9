"""Faults in the process that serves: does the fallback answer the next request, is it told, and does the budget hold?

Each fault (attention/faults.py) goes into an instance of its own, the real process with the real model, under a policy
whose budget lets one request in two fall back. What it must show is a list of observations; the kind counts as caught
when all of them are there. A sound instance must show none, and answer.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attention.faults import BACKEND_HANGS, BACKEND_NAN, BACKEND_RAISES, PROBE_CRASH
from attention.lifetime import end_session
from data.paths import model_path, repo_dir
from gates import drill as gate

CHECK, SOUND_CHECK = "serving.fallback", "serving.answers"
FIRST, SECOND = "torch_sdpa:flash", "torch_sdpa:math"
READY_S, ANSWER_S, STEP_S = 180.0, 60.0, 3.0
_BODY = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}

#: What an instance with a fault must show, by kind: the statuses of its first two answers (one that begins anew is
#: asked for the second when it is ready again), events of its log, and the reason under which the counter counts.
Wanted = tuple[tuple[int, int], tuple[str, ...], str]
WANTED: dict[str, Wanted] = {
    BACKEND_RAISES: ((200, 503), ("backend_raised", "backend_failed", "fallback_refused"), "LAUNCH_FAILED"),
    BACKEND_NAN: ((200, 503), ("backend_failed", "fallback_refused"), "NUMERIC_DRIFT"),
    BACKEND_HANGS: ((500, 200), ("engine_hung", "startup_fallback"), "TIMEOUT"),
    PROBE_CRASH: ((200, 200), ("startup_fallback",), "LAUNCH_FAILED"),
}


@dataclass(frozen=True)
class Seen:
    """What one instance did: status and backend of its answers, events, and fallbacks counted by reason."""

    answers: tuple[tuple[int, str], ...]
    events: frozenset[str]
    counted: Mapping[str, float] = field(default_factory=dict)

    def missing(self, wanted: Wanted) -> list[str]:
        """What is not there of what a fault must show."""
        statuses, events, reason = wanted
        given = tuple(status for status, _ in self.answers)
        found = [] if given == statuses else [f"answers {statuses}"]
        found += [f"an answer by {SECOND}" for status, backend in self.answers if status == 200 and backend != SECOND]
        found += [f"event {name}" for name in events if name not in self.events]
        return found if self.counted.get(reason) else [*found, f"a count of {reason}"]


def expected() -> tuple[gate.Expected, ...]:
    """Every kind of a serving process, with the check that must catch it."""
    return tuple(gate.Expected(kind, CHECK) for kind in WANTED)


def runs(model: str, without: str | None, say: Callable[[str], None]) -> Iterator[gate.Run]:
    """A run a fault, and a sound one."""
    for kind in (*WANTED, None):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            seen = observe(model, kind, Path(folder))
        tripped = judged(kind, seen)
        say(f"serving: {kind or 'sound'}: {', '.join(tripped) or 'nothing'}, {time.monotonic() - began:.0f} s")
        left = tuple(name for name in tripped if name != without)
        yield gate.Run(kind, model, "one instance", False, left, published=None)


def judged(kind: str | None, seen: Seen) -> tuple[str, ...]:
    """The check that an instance trips: it shows all that its fault must; a sound one did not answer as it should."""
    if kind is not None:
        return () if seen.missing(WANTED[kind]) else (CHECK,)
    is_sound = seen.answers == ((200, FIRST),) * 2 and not seen.counted
    return () if is_sound else (SOUND_CHECK,)


def observe(model: str, fault: str | None, folder: Path) -> Seen:
    """Start an instance with a fault, ask it twice, end it."""
    budget = {"max_share": 0.5, "window_s": 600, "max_duration_s": 3600}
    policy = {"preferred": [FIRST], "fallback": [SECOND], "allow_runtime_fallback": True}
    document = {"attention_policy": {**policy, "runtime_fallback_budget": budget}}
    (folder / "policy.yaml").write_text(json.dumps(document))  # JSON is YAML
    command = [sys.executable, "-m", "attention", "serve", "--model", str(model_path(model)), "--port", "0"]
    command += [
        "--policy",
        str(folder / "policy.yaml"),
        "--lake",
        str(folder / "lake"),
        "--step-timeout-s",
        f"{STEP_S:g}",
    ]
    command += ["--release-id", "drill", "--side", "candidate", "--instance", "drill"]
    command += ["--fault", fault] if fault is not None else []
    log = folder / "log"
    with log.open("w") as sink:
        process = subprocess.Popen(command, cwd=repo_dir(), stderr=sink, start_new_session=True)
    try:
        answers = []
        for nth in range(2):
            times = 2 if fault == BACKEND_HANGS and nth else 1
            port = _port_of_ready(process, log, times)
            if port is None:
                break
            answers.append(_ask(port))
        counted = {} if port is None else _counted(_get(port, "/metrics"))
        return Seen(tuple(answers), frozenset(one["event"] for one in _events(log)), counted)
    finally:
        end_session(process)


def _port_of_ready(process: subprocess.Popen[Any], log: Path, times: int) -> int | None:
    """Its port, once it has said so often that it is ready; None for one that ended or took too long."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        events = _events(log)
        if sum(one["event"] == "ready" for one in events) >= times:
            return int([one for one in events if one["event"] == "listening"][-1]["port"])
        time.sleep(0.1)
    return None


def _events(log: Path) -> list[dict[str, Any]]:
    lines = [line for line in log.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
    return [json.loads(line) for line in lines]


def _ask(port: int) -> tuple[int, str]:
    """Status of an answer, and the backend of its decodes: what the instance says was confirmed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(_BODY), {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()
    confirmed = json.loads(_get(port, "/health") or "{}").get("confirmed", {})
    return response.status, str(confirmed.get("decode", ""))


def _get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()


def _counted(text: str) -> dict[str, float]:
    """Fallbacks from the first to the second backend, by reason, of a page of metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        sample.labels["reason"]: sample.value
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
        if sample.name == "attention_backend_fallback_total"
        and (sample.labels["from"], sample.labels["to"]) == (FIRST, SECOND)
    }
