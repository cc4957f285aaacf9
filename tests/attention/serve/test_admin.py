"""What people on call see and do: the policy in force, live and ready apart, drain and resume behind a token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from attention.dispatch import Dispatcher
from attention.errors import UserError
from attention.limits import Limits
from attention.model import specs_of
from attention.policy import Policy
from attention.serve.admin import read_token
from tests.attention.fake_runner import FakeRunner
from tests.attention.serve.fake_instance import FakeStarted, Running, serving

TOKEN = "a-token-of-some-length"
BEARER = {"authorization": f"Bearer {TOKEN}"}
PLAIN = {"prompt": "hello", "max_tokens": 8, "temperature": 0}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    runner = FakeRunner(num_pages=256, seconds=0.02, eos_token_ids=frozenset())
    with serving(tmp_path / "lake", runner, admin_token=TOKEN) as found:
        yield found


def test_a_drained_instance_finishes_what_runs_takes_nothing_and_can_be_resumed(running: Running) -> None:
    answers: list[httpx.Response] = []
    body = {**PLAIN, "max_tokens": 40}
    asking = threading.Thread(target=lambda: answers.append(running.post("/v1/completions", body)))
    asking.start()
    running.wait_until(lambda: running.service.engine.num_running == 1)
    drained = running.client.post("/admin/drain", headers=BEARER)
    assert drained.json() == {"draining": True, "running": 1, "waiting": 0}
    ready = running.client.get("/health/ready")
    assert ready.status_code == 503
    assert "POST /admin/drain" in ready.json()["reasons"][0]
    refused = running.post("/v1/completions", PLAIN)
    assert refused.status_code == 503
    assert "POST /admin/drain" in refused.json()["error"]["message"]
    asking.join()
    assert answers[0].status_code == 200
    assert running.client.get("/health/live").json() == {"live": True, "reasons": []}
    assert running.client.post("/admin/resume", headers=BEARER).json()["draining"] is False
    assert running.client.get("/health/ready").json() == {"ready": True, "reasons": []}
    assert running.post("/v1/completions", PLAIN).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}, {"authorization": f"Bearer {TOKEN} "[:-2]}],
)
def test_without_the_token_the_admin_surface_says_401_and_does_nothing(
    running: Running, headers: dict[str, str]
) -> None:
    response = running.client.post("/admin/drain", headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert TOKEN not in response.text
    assert running.client.get("/health/ready").status_code == 200


def test_without_a_token_file_there_is_no_admin_surface(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        for path in ("/admin/drain", "/admin/resume"):
            assert running.client.post(path, headers=BEARER).status_code == 404


def test_the_token_is_nowhere_to_be_read(running: Running, capfd: pytest.CaptureFixture[str]) -> None:
    for headers in (BEARER, {"authorization": "Bearer wrong"}):
        running.client.post("/admin/drain", headers=headers)
        running.client.post("/admin/resume", headers=headers)
    pages = [running.client.get(path).text for path in ("/health", "/fingerprint", "/metrics", "/policy", "/admin")]
    captured = capfd.readouterr()
    assert "admin_drain" in captured.err
    for text in (*pages, captured.err, captured.out, repr(running.service.__dict__)):
        assert TOKEN not in text


def test_a_token_file_is_one_line_that_only_its_owner_may_read(tmp_path: Path) -> None:
    path = tmp_path / "token"

    def written(text: str, mode: int = 0o600) -> Path:
        path.write_text(text)
        path.chmod(mode)
        return path

    assert read_token(written(f"{TOKEN}\n")) == read_token(written(TOKEN)) == TOKEN
    for text, mode, message in (
        (TOKEN, 0o640, "mode 0640; run chmod 600"),
        (TOKEN, 0o644, "mode 0644"),
        ("short", 0o600, "16 or more characters"),
        (f"{TOKEN}\n{TOKEN}\n", 0o600, "one line"),
        (f"{TOKEN} {TOKEN}", 0o600, "without spaces"),
        ("", 0o600, "16 or more"),
        ("schlüssel-der-länge-16", 0o600, "plain ASCII"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            read_token(written(text, mode))
        assert not text or text not in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_token(tmp_path / "none")


def test_the_policy_page_says_what_was_asked_chosen_and_left_out_and_why(running: Running) -> None:
    page = running.client.get("/policy").json()
    assert page["policy"]["preferred"] == ["torch_sdpa:flash"]
    assert set(page["policy"]) >= {"mode", "overrides", "runtime_fallback_budget", "fail_closed_features"}
    assert set(page["phases"]) == {"prefill", "decode", "extend"}
    decode = page["phases"]["decode"]
    assert (decode["requested"], decode["resolved"]) == ("torch_sdpa:flash", "torch_sdpa:math")
    assert (decode["chain"], decode["confirmed"]) == (["torch_sdpa:math"], "torch_sdpa:math")
    [reason] = decode["left_out"]["torch_sdpa:flash"]
    assert (reason["code"], reason["source"]) == ("MASK_UNSUPPORTED", "probe")
    assert page["fingerprint"] == "f1f2f3"


def test_the_policy_page_reads_a_real_dispatcher(tiny_model: Path, tmp_path: Path) -> None:
    runner = FakeRunner()
    policy = Policy(preferred=("flashinfer", "torch_sdpa:flash"), fallback=("math",))
    runner.dispatcher = Dispatcher(policy, specs_of(tiny_model, "float32"))  # type: ignore[assignment]
    with serving(tmp_path, prepare=lambda: FakeStarted(runner)) as running:
        running.wait_until(lambda: running.service.engine.failure is not None)
        running.service.engine.started = FakeStarted(runner)  # type: ignore[assignment]
        phases = running.client.get("/policy").json()["phases"]
    for phase in phases.values():
        assert phase["requested"].startswith("flashinfer:")
        assert phase["chain"] == ["torch_sdpa:flash", "torch_sdpa:math"]
        assert all(name.startswith("flashinfer:") and reasons for name, reasons in phase["left_out"].items())


def test_until_the_probes_passed_an_instance_is_live_and_neither_ready_nor_of_any_policy(tmp_path: Path) -> None:
    proceed = threading.Event()

    def prepare() -> object:
        proceed.wait(20)
        raise RuntimeError("no backend")

    with serving(tmp_path, prepare=prepare) as running:
        assert running.client.get("/health/live").status_code == 200
        ready = running.client.get("/health/ready")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        assert running.client.get("/policy").status_code == 503
        proceed.set()


def test_an_engine_that_has_ended_is_not_live(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        running.service.engine.stop(5)
        live = running.client.get("/health/live")
        assert (live.status_code, live.json()["reasons"]) == (
            503,
            ["engine: its thread has ended; restart the instance"],
        )
        assert running.client.get("/health").json()["live"] is False


def slow(**limits: float) -> Limits:
    return Limits(max_running=1, max_step_tokens=64, prefill_chunk=32, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_with_a_504_and_frees_its_pages(tmp_path: Path, stream: bool) -> None:
    runner = FakeRunner(num_pages=256, seconds=0.05, eos_token_ids=frozenset())
    with serving(tmp_path, runner, limits=slow(request_timeout_s=0.5)) as running:
        body = {**PLAIN, "max_tokens": 100, "stream": stream}
        with running.client.stream("POST", "/v1/completions", json=body) as response:
            text = response.read().decode()
        if stream:
            assert response.status_code == 200
            *pieces, error, end = [line for line in text.split("\n\n") if line]
            assert (len(pieces) > 2, end) == (True, "data: [DONE]")
            text = error.removeprefix("data: ")
        else:
            assert response.status_code == 504
            assert response.headers["x-should-retry"] == "false"
        found = json.loads(text)["error"]
        assert (found["code"], found["type"]) == ("timeout", "server_error")
        assert "0.5 s" in found["message"]
        running.wait_until(lambda: runner.pool.num_free == 256 and running.service.num_open == 0)
        [row] = running.rows()
        assert (row["status"], row["finish_reason"]) == (504, "error")
        assert 0 < row["output_tokens"] < 100
        assert (
            'attention_requests_total{finish_reason="error",traffic="live"} 1.0' in running.client.get("/metrics").text
        )


def test_a_request_that_waits_too_long_ends_with_a_504_too(tmp_path: Path) -> None:
    runner = FakeRunner(num_pages=256, seconds=0.05, eos_token_ids=frozenset())
    with serving(tmp_path, runner, limits=slow(request_timeout_s=0.6)) as running:
        statuses: list[int] = []

        def ask() -> None:
            statuses.append(running.post("/v1/completions", {**PLAIN, "max_tokens": 100}).status_code)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [504] * 3
        running.wait_until(lambda: running.service.engine.num_waiting == running.service.engine.num_running == 0)
        assert running.post("/v1/completions", {**PLAIN, "max_tokens": 2}).status_code == 200


def test_a_model_that_hangs_holds_no_client_beyond_its_time(tmp_path: Path) -> None:
    runner = FakeRunner(num_pages=256)
    with serving(tmp_path, runner, limits=slow(request_timeout_s=0.3)) as running:
        runner.seconds = 2.0
        assert (
            running.post(
                "/v1/completions",
                PLAIN,
            ).status_code
            == 504
        )
        runner.seconds = 0.0


def test_bounds_on_prompt_output_and_body_are_those_of_the_limits(tmp_path: Path) -> None:
    with serving(tmp_path, limits=Limits(max_prompt_tokens=20, max_output_tokens=9, max_body_bytes=200)) as running:
        for changes, status, message in (
            ({"prompt": "x" * 21}, 400, "21 tokens, above this server's bound of 20"),
            ({"max_tokens": 10}, 400, "above this server's bound of 9"),
            ({"prompt": "x" * 200}, 413, "exceeds 200 bytes"),
        ):
            response = running.post("/v1/completions", {**PLAIN, **changes})
            assert (response.status_code, message in response.text) == (status, True)
        assert running.post("/v1/completions", {**PLAIN, "prompt": "x" * 20}).status_code == 200


def test_retry_after_follows_the_queue_and_how_long_requests_run(tmp_path: Path) -> None:
    runner = FakeRunner(num_pages=256, seconds=0.05, eos_token_ids=frozenset())
    with serving(tmp_path, runner, limits=slow(max_queue=3)) as running:
        assert running.service.retry_after_s() == 1
        body = {**PLAIN, "max_tokens": 16}  # 0.8 s
        running.post("/v1/completions", body)
        threads = [threading.Thread(target=running.post, args=("/v1/completions", body)) for _ in range(4)]
        for number, thread in enumerate(threads):
            thread.start()
            running.wait_until(
                lambda n=number: running.service.engine.num_running + running.service.engine.num_waiting > n  # type: ignore[misc]
            )
        refused = running.post("/v1/completions", body)
        assert refused.status_code == 429
        assert 2 <= int(refused.headers["retry-after"]) <= 10
        for thread in threads:
            thread.join()
