"""The process: bad input is one clear line, a signal loses no request and no row."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from attention.dispatch import PHASES
from attention.errors import UserError
from attention.limits import Limits
from attention.serve.flags import add_arguments, run
from attention.serve.main import limits_of
from tests.attention.serve.fake_instance import read_rows, wait_until

POLICY = "attention_policy: {mode: pinned, preferred: [math]}\n"

# The real process but for the model: everything from flags to exit code is what users run.
SCRIPT = """
import argparse, sys, time
from attention.serve import flags, main
from tests.attention.fake_runner import FakeRunner
from attention.dispatch import NoBackendError
from tests.attention.serve.fake_instance import FakeStarted
def fail(text): raise NoBackendError(text)
main.prepare = lambda setup, notice, **more: {prepare}
parser = argparse.ArgumentParser()
flags.add_arguments(parser)
sys.exit(main.run(parser.parse_args()))
"""
ANSWERS = "FakeStarted(FakeRunner(num_pages=256, seconds=0.05, eos_token_ids=frozenset()))"
HANGS = "time.sleep(600)"
CRASHES = "1 / 0"
NO_BACKEND = "fail('no backend of the policy can serve decode: a:x: reason')"


class Process:
    """A child process and the events that it has logged."""

    def __init__(self, flags: list[str], prepare: str) -> None:
        command = [sys.executable, "-c", SCRIPT.format(prepare=prepare), *flags]
        self.child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        assert self.child.stderr is not None
        self._reader = threading.Thread(target=self.lines.extend, args=(self.child.stderr,), daemon=True)
        self._reader.start()

    def events(self) -> dict[str, dict[str, object]]:
        """By kind; fails unless every line is one JSON document."""
        return {event["event"]: event for event in map(json.loads, list(self.lines))}

    def wait_for(self, kind: str) -> None:
        wait_until(lambda: kind in self.events() or self.child.poll() is not None, timeout_s=60)

    def exit_code(self) -> int:
        code = self.child.wait(60)
        self._reader.join(5)
        return code


@pytest.fixture
def start_process(flags: list[str]) -> Iterator[Callable[[str], Process]]:
    processes: list[Process] = []

    def start(prepare: str) -> Process:
        processes.append(Process(flags, prepare))
        return processes[-1]

    yield start
    for process in processes:
        process.child.kill()
        process.exit_code()


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    model, policy = tmp_path / "fake-1m", tmp_path / "policy.yaml"
    model.mkdir()
    (model / "config.json").write_text("{}")
    policy.write_text(POLICY)
    names = {
        "--model": model,
        "--policy": policy,
        "--port": 0,
        "--release-id": "r-1",
        "--side": "candidate",
        "--instance": "candidate-1",
        "--lake": tmp_path / "lake",
    }
    return [str(part) for item in names.items() for part in item]


def start(flags: list[str]) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(flags))


def test_a_port_in_use_is_one_line_with_the_remedy(flags: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} on 127.0.0.1 is in use; .*--port"):
            start([*flags, "--port", str(port)])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--fault", "wrong_scal"], "did you mean wrong_scale"),
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--policy", "/no/such/policy.yaml"], "/no/such/policy.yaml"),
        (["--release-id", "mine€"], "--release-id 'mine€'"),
        (["--release-id", "../other"], "--release-id '../other'"),
        (["--release-id", "a\nb"], "--release-id"),
        (["--release-id", ""], "--release-id ''"),
        (["--instance", "mine 1"], "--instance 'mine 1'"),
        (["--threads", "0"], "--threads 0"),
        (["--port", "99999"], "--port 99999"),
        (["--step-timeout-s", "0"], "--step-timeout-s 0"),
        (["--retired", "torch_sdpa:flahs=it hung"], "did you mean torch_sdpa:flash"),
        (["--max-queue", "0"], "--max-queue 0"),
        (["--cuda-graphs"], "--cuda-graphs: there are none on a CPU"),
        (["--max-running", "-1"], "--max-running -1"),
        (["--max-prompt-tokens", "0"], "--max-prompt-tokens 0"),
        (["--max-output-tokens", "0"], "--max-output-tokens 0"),
        (["--max-body-bytes", "0"], "--max-body-bytes 0"),
        (["--request-timeout-s", "0"], "--request-timeout-s 0"),
        (["--request-timeout-s", "nan"], "--request-timeout-s nan"),
        (["--admin-token-file", "/no/such/token"], "--admin-token-file /no/such/token: cannot be read"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], extra: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        start([*flags, *extra])
    assert "\n" not in str(caught.value)


def test_flags_become_the_limits_that_the_fingerprint_holds(flags: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert limits_of(parser.parse_args(flags)) == Limits()
    extra = ["--max-running", "200", "--max-queue", "7", "--request-timeout-s", "1.5", "--max-body-bytes", "9"]
    found = limits_of(parser.parse_args([*flags, *extra, "--max-prompt-tokens", "5", "--max-output-tokens", "6"]))
    assert found == Limits(
        max_running=200,
        max_step_tokens=200 + Limits.prefill_chunk,  # or so many decodes would starve the prompts
        max_queue=7,
        request_timeout_s=1.5,
        max_body_bytes=9,
        max_prompt_tokens=5,
        max_output_tokens=6,
    )


def test_the_admin_token_is_in_no_line_of_the_log_no_argument_and_no_variable(
    start_process: Callable[[str], Process], flags: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("a-token-of-some-length\n")
    flags += ["--admin-token-file", str(path)]
    process = start_process(ANSWERS)
    process.wait_for("ready")
    url = f"http://127.0.0.1:{process.events()['listening']['port']}"
    answer = httpx.post(f"{url}/admin/drain", headers={"authorization": "Bearer a-token-of-some-length"})
    assert answer.status_code == 200
    assert httpx.get(f"{url}/health/ready").status_code == 503
    of_process = Path(f"/proc/{process.child.pid}")
    told = [(of_process / name).read_text() for name in ("cmdline", "environ")]
    told += [httpx.get(f"{url}{page}").text for page in ("/health", "/fingerprint", "/policy", "/metrics")]
    process.child.send_signal(signal.SIGTERM)
    assert process.exit_code() == 0, "a drained instance still stops"
    assert "admin_drain" in process.events()
    assert not any("a-token-of-some-length" in text for text in (*told, *process.lines))


def test_sigterm_finishes_what_is_in_flight_writes_its_row_and_exits_0(
    start_process: Callable[[str], Process], tmp_path: Path
) -> None:
    process = start_process(ANSWERS)
    process.wait_for("ready")
    url = f"http://127.0.0.1:{process.events()['listening']['port']}"
    answers: list[httpx.Response] = []
    body = {"prompt": "hello", "max_tokens": 20, "temperature": 0}
    asking = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=30)))
    asking.start()
    wait_until(lambda: httpx.get(f"{url}/health").json()["running"] == 1)
    process.child.send_signal(signal.SIGTERM)
    asking.join()
    assert process.exit_code() == 0
    assert answers[0].status_code == 200
    assert [row["output_tokens"] for row in read_rows(tmp_path / "lake", "requests")] == [20]
    assert list(process.events()) == [
        "listening", "backend_resolved", "ready", "stopping", "request_finished", "stopped",
    ]  # fmt: skip
    ready = process.events()["ready"]
    assert ready["fingerprint"] == "f1f2f3"
    assert ready["resolved"] == ready["confirmed"] == dict.fromkeys(PHASES, "torch_sdpa:math")
    assert ready["fallbacks"] == []


def test_ctrl_c_while_the_model_still_loads_ends_at_once_with_130(
    start_process: Callable[[str], Process],
) -> None:
    process = start_process(HANGS)
    process.wait_for("listening")
    process.child.send_signal(signal.SIGINT)
    assert process.child.wait(5) == 130


def test_with_no_backend_left_it_stays_unready_and_says_why(start_process: Callable[[str], Process]) -> None:
    process = start_process(NO_BACKEND)
    process.wait_for("start_failed")
    health = httpx.get(f"http://127.0.0.1:{process.events()['listening']['port']}/health")
    assert health.status_code == 503
    assert (health.json()["ready"], health.json()["failed"]) == (False, True)
    assert health.json()["reasons"] == ["startup failed: no backend of the policy can serve decode: a:x: reason"]
    process.child.send_signal(signal.SIGTERM)
    assert process.exit_code() == 1, "the error, which the command line turns into one line"


def test_a_model_that_crashes_while_it_starts_ends_the_process_with_3(
    start_process: Callable[[str], Process],
) -> None:
    process = start_process(CRASHES)
    assert process.exit_code() == 3
    assert process.events()["start_failed"]["error"] == "division by zero"
