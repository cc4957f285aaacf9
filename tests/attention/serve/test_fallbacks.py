"""What an instance says of fallbacks, mismatches and budgets: in events, in its health, and to whoever asks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attention.confirmations import Signature
from attention.dispatch import FallbackEvent
from attention.fallback import KEEPS_FALLING
from attention.policy import Budget, Policy
from attention.serve import engine as engine_module
from tests.attention.fake_runner import FakeRunner
from tests.attention.serve.fake_instance import Running, serving

FIRST, SECOND = "torch_sdpa:math", "torch_sdpa:flash"
BODY = {"prompt": "hello", "max_tokens": 2, "temperature": 0}


def policy(mode: str = "preferred-with-fallback", **budget: Any) -> Policy:
    whole = {"max_share": 1.0, "window_s": 60, "max_duration_s": 600, **budget}
    if mode == "pinned":
        return Policy(mode="pinned", preferred=(FIRST,))
    return Policy(
        preferred=(FIRST,), fallback=(SECOND,), allow_runtime_fallback=True, runtime_fallback_budget=Budget(**whole)
    )


def runner(one: Policy, *, falls: bool = False) -> FakeRunner:
    found = FakeRunner(num_pages=256)
    found.dispatcher.policy = one
    found.dispatcher.chain = [SECOND]
    if falls:
        found.dispatcher.retired = {FIRST: []}
    return found


@pytest.fixture
def events(capfd: pytest.CaptureFixture[str]) -> Iterator[Any]:
    seen: list[dict[str, Any]] = []

    def read(kind: str) -> list[dict[str, Any]]:
        lines = capfd.readouterr().err.splitlines()
        seen.extend(json.loads(line) for line in lines if line.startswith("{"))
        return [event for event in seen if event["event"] == kind]

    yield read


def ask(running: Running) -> int:
    return running.post("/v1/completions", BODY).status_code


def test_a_request_that_falls_back_is_answered_counted_and_told_once(tmp_path: Path, events: Any) -> None:
    with serving(tmp_path, runner(policy(), falls=True)) as running:
        assert [ask(running) for _ in range(3)] == [200] * 3
        told = events("request_fallback")
        assert {event["message"] for event in told} == {
            f"prefill: {FIRST} gave way to {SECOND}", f"decode: {FIRST} gave way to {SECOND}",
        }  # fmt: skip
        assert len(told) == 2, "the metric has the count"
        page = running.client.get("/metrics").text
        assert f'attention_backend_fallback_total{{from="{FIRST}",reason="UNCONFIRMED",to="{SECOND}"}} 6.0' in page


def test_beyond_the_budget_a_request_is_refused_with_the_figures(tmp_path: Path, events: Any) -> None:
    with serving(tmp_path, runner(policy(max_share=0.5), falls=True)) as running:
        assert ask(running) == 200
        refused = running.post("/v1/completions", BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "fallback_refused")
        assert "retry-after" in refused.headers
        message = "1 of 1 requests of the last 60 s fell back; the policy bears 50.00%"
        assert refused.json()["error"]["message"] == message
        assert [event["message"] for event in events("fallback_refused")] == [message]
        assert running.client.get("/health").json()["ready"], "who needs no fallback is served"
        rows = running.rows()
        assert [(row["status"], row["error"]) for row in rows] == [(200, None), (503, message)]
        assert [row["kind"] for row in running.rows("events")][-1] == "fallback_refused"


def test_a_policy_that_drains_takes_the_instance_out(tmp_path: Path) -> None:
    with serving(tmp_path, runner(policy(max_share=0.0, on_exceeded="drain"), falls=True)) as running:
        assert ask(running) == 503
        health = running.client.get("/health")
        assert health.status_code == 503
        assert health.json()["reasons"][0].startswith("fallback budget: drained, since 0 of 0 requests")
        running.runner.dispatcher.retired = {}
        assert ask(running) == 503, "it stays so"


def test_a_class_that_keeps_falling_back_is_named(tmp_path: Path, events: Any) -> None:
    with serving(tmp_path, runner(policy(), falls=True)) as running:
        for _ in range(KEEPS_FALLING):
            assert ask(running) == 200
        (told,) = events("fallback_class")
        assert told["message"] == (
            f"give decode its own pool: {KEEPS_FALLING} requests, 100% of all, wanted to fall back from {FIRST} to "
            f"{SECOND} (UNCONFIRMED); each adds 2 ms to a step"
        )


def test_a_mismatch_shows_in_health_and_takes_a_pinned_instance_out(tmp_path: Path) -> None:
    text = f"decode/kv<=64 ran {SECOND} where {FIRST} was resolved"
    for mode, status in (("preferred-with-fallback", 200), ("pinned", 503)):
        one = runner(policy(mode))
        with serving(tmp_path, one) as running:
            one.dispatcher.mismatches[Signature("decode", "decode/kv<=64", FIRST)] = SECOND
            health = running.client.get("/health")
            assert health.status_code == status
            assert text in health.json()["warnings"]
            assert health.json()["reasons"] == ([f"pinned: {text}"] if mode == "pinned" else [])


def test_a_phase_without_a_backend_is_a_reason_not_to_be_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = runner(policy())
    with serving(tmp_path, one) as running:
        monkeypatch.setattr(one.dispatcher, "unserved", lambda: {"decode": f"{FIRST}: LAUNCH_FAILED"})
        assert running.client.get("/health").json()["reasons"] == [
            f"backends: no backend is left for decode: {FIRST}: LAUNCH_FAILED"
        ]


def test_an_idle_engine_has_its_backends_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "IDLE_S", 0.01)
    one = runner(policy())
    with serving(tmp_path, one) as running:
        running.wait_until(lambda: one.num_idle >= 2)
        assert ask(running) == 200


def test_a_mismatch_is_critical(tmp_path: Path, events: Any) -> None:
    with serving(tmp_path, runner(policy())) as running:
        running.service.engine._notice(FallbackEvent("backend_mismatch", "decode", FIRST, SECOND, ()))
        (told,) = events("backend_mismatch")
        assert told["severity"] == "critical"
        assert [row["severity"] for row in running.rows("events")] == ["critical"]
