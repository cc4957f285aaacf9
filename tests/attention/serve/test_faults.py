"""Faults in the process that serves: the next request is answered by the fallback, events and counters say so, and the
budget holds. Real processes, a real model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from data.paths import models_dir
from tests.attention.serve.fake_instance import read_rows, wait_until

MODEL = models_dir() / "smollm2-135m-instruct"
FLASH, MATH = "torch_sdpa:flash", "torch_sdpa:math"
BODY = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}


class Served:
    """A process of `python -m attention serve` with a fault."""

    def __init__(self, folder: Path, fault: str, budget: dict[str, Any], *flags: str) -> None:
        policy = {
            "preferred": [FLASH], "fallback": [MATH], "allow_runtime_fallback": True, "runtime_fallback_budget": budget,
        }  # fmt: skip
        (folder / "policy.yaml").write_text(json.dumps({"attention_policy": policy}))
        command = [sys.executable, "-m", "attention", "serve", "--model", str(MODEL)]
        command += ["--policy", str(folder / "policy.yaml"), "--port", "0", "--release-id", "r-1"]
        command += [
            "--side",
            "candidate",
            "--instance",
            "i-1",
            "--lake",
            str(folder / "lake"),
            "--fault",
            fault,
            *flags,
        ]
        self.lake = folder / "lake"
        self._log = folder / "log"
        self.child = subprocess.Popen(command, stderr=self._log.open("w"))

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = [line for line in self._log.read_text().splitlines() if line.endswith("}")]
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def wait_ready(self, times: int = 1) -> None:
        wait_until(lambda: len(self.events("ready")) >= times or self.child.poll() is not None, timeout_s=120)
        assert self.child.poll() is None, self._log.read_text()[-2000:]
        self.url = f"http://127.0.0.1:{self.events('listening')[-1]['port']}"

    def ask(self) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=BODY, timeout=60)

    def metric(self, name: str) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics").text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(name)]
        return {labels: float(value) for labels, value in lines}

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.lake, "requests")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(fault: str, *flags: str, share: float = 1.0, **budget: Any) -> Served:
        whole = {"max_share": share, "window_s": 300, "max_duration_s": 3600, **budget}
        started.append(Served(tmp_path, fault, whole, *flags))
        return started[-1]

    yield start
    for one in started:
        one.child.kill()
        one.child.wait()


def test_a_backend_that_raises_gives_way_and_the_budget_holds(serve: Callable[..., Served]) -> None:
    one = serve("backend_raises", share=0.5)
    one.wait_ready()
    answer = one.ask()
    assert answer.status_code == 200, "the request that meets the fault is answered"
    assert answer.json()["choices"][0]["text"].strip().startswith("Paris")
    (failed,) = one.events("backend_raised")
    assert (failed["backend"], "cannot be launched" in failed["error"]) == (FLASH, True)
    assert {event["message"] for event in one.events("backend_failed")} >= {f"decode: {FLASH} gave way to {MATH}"}
    falls = one.metric("attention_backend_fallback_total")
    assert falls[f'attention_backend_fallback_total{{from="{FLASH}",reason="LAUNCH_FAILED",to="{MATH}"}}'] >= 1
    refused = one.ask()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "fallback_refused"
    assert "1 of 1 requests of the last 300 s fell back; the policy bears 50.00%" in refused.json()["error"]["message"]
    assert one.events("fallback_refused")
    wait_until(lambda: len(one.rows()) == 2)
    first = one.rows()[0]
    assert (first["fallback"], first["fallback_reason"]) == (True, "LAUNCH_FAILED")
    assert (first["resolved_decode"], first["confirmed_decode"]) == (MATH, MATH)
    assert httpx.get(f"{one.url}/health").json()["resolved"]["decode"] == MATH


@pytest.mark.slow
def test_a_backend_that_gives_nan_gives_way(serve: Callable[..., Served]) -> None:
    one = serve("backend_nan")
    one.wait_ready()
    answers = [one.ask() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {answers[0].json()["choices"][0]["text"]}
    wait_until(lambda: len(one.rows()) == 2)
    assert [row["num_nonfinite"] for row in one.rows()] == [1, 0], "the second never meets it"
    assert {row["confirmed_decode"] for row in one.rows()} == {MATH}
    assert [event["to"] for event in one.events("backend_failed")] == [MATH] * 3


@pytest.mark.slow
def test_a_policy_that_drains_is_ready_no_more(serve: Callable[..., Served]) -> None:
    one = serve("backend_nan", share=0.0, on_exceeded="drain")
    one.wait_ready()
    assert one.ask().status_code == 500, "no other backend may take it"
    refused = one.ask()
    assert refused.status_code == 503
    health = httpx.get(f"{one.url}/health").json()
    assert not health["ready"]
    assert health["reasons"] == [
        "fallback budget: drained, since 0 of 1 requests of the last 300 s fell back; the policy bears 0.00%; restart "
        "the instance"
    ]


@pytest.mark.slow
def test_a_backend_that_hangs_is_left_and_the_next_request_is_answered(serve: Callable[..., Served]) -> None:
    one = serve("backend_hangs", "--step-timeout-s", "2")
    one.wait_ready()
    lost = one.ask()
    assert lost.status_code == 500
    assert "a step has not ended for 2 s" in lost.json()["error"]["message"]
    waiting = one.ask()  # connects while the process begins anew
    assert waiting.status_code in (200, 503)
    one.wait_ready(times=2)
    answer = one.ask()
    assert answer.status_code == 200
    (hung,) = one.events("engine_hung")
    assert hung["backends"] == [FLASH]
    health = httpx.get(f"{one.url}/health").json()
    assert health["resolved"] == dict.fromkeys(("prefill", "decode", "extend"), MATH)
    assert "TIMEOUT" in health["fallbacks"][0]["reasons"][0]
    wait_until(lambda: len(one.rows()) >= 2)
    assert one.rows()[0]["error"] is not None, "the row of the request that was lost is there"


@pytest.mark.slow
def test_a_probe_that_dies_is_a_startup_fallback(serve: Callable[..., Served]) -> None:
    one = serve("probe_crash")
    one.wait_ready()
    assert one.ask().status_code == 200
    told = [(e["phase"], e["from"], e["to"], e["reasons"][0]["code"]) for e in one.events("startup_fallback")]
    assert told == [(phase, FLASH, MATH, "LAUNCH_FAILED") for phase in ("prefill", "decode", "extend")]
    assert set(httpx.get(f"{one.url}/health").json()["confirmed"].values()) == {MATH}


@pytest.mark.slow
def test_sigterm_while_a_backend_hangs_answers_who_waits_and_ends(serve: Callable[..., Served]) -> None:
    one = serve("backend_hangs", "--step-timeout-s", "120")
    one.wait_ready()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.ask)
        wait_until(lambda: httpx.get(f"{one.url}/health").json()["running"] == 1)
        one.child.terminate()
        answer = waiting.result(60)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server is shutting down")
    assert one.child.wait(60) == 0
