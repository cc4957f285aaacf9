"""Processes that are found again, and never mistaken for others."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from attention.errors import UserError
from tasks.processes import (
    ProcessError,
    find_process,
    free_port,
    is_alive,
    list_processes,
    require_free_port,
    running_processes,
    start_instance,
    start_process,
    start_ticks,
    stop_process,
    stop_processes,
    wait_ready,
    with_port,
)
from tasks.record import Instance
from tests.stub_instance import StubInstance

STUB = [sys.executable, str(Path(__file__).parents[1] / "stub_instance.py")]
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_an_instance_is_started_found_asked_and_stopped(tmp_path: Path) -> None:
    instance = start_instance(tmp_path, "candidate-r1", "candidate", STUB, free_port())
    assert wait_ready(instance, 10) == {"status": "ready"}
    found = find_process(tmp_path, "candidate-r1")
    assert found is not None and found.alive()
    assert (found.pid, found.started, found.port) == (instance.pid, instance.started, instance.port)
    assert found.command[-2:] == ["--port", str(instance.port)]
    assert os.getsid(instance.pid) == instance.pid, "a Ctrl-C here would reach it"
    stop_process(tmp_path, "candidate-r1")
    assert not is_alive(instance.pid, instance.started)
    assert list_processes(tmp_path) == []


def test_a_name_that_runs_is_not_started_twice(tmp_path: Path) -> None:
    process = start_process(tmp_path, "one", "candidate", SLEEP, None)
    with pytest.raises(UserError, match=rf"one already runs \(pid {process.pid}\)"):
        start_process(tmp_path, "one", "candidate", SLEEP, None)
    stop_process(tmp_path, "one")


def test_a_reused_pid_is_not_taken_for_the_process(tmp_path: Path) -> None:
    started = start_ticks(os.getpid())
    assert started is not None
    assert is_alive(os.getpid(), started) and not is_alive(os.getpid(), started - 1)


def test_stopping_never_signals_a_process_that_only_has_the_pid(tmp_path: Path) -> None:
    process = start_process(tmp_path, "one", "candidate", SLEEP, None)
    stranger = process.model_copy(update={"started": process.started - 1})
    stop_processes(tmp_path, [stranger], grace_s=0.1)
    assert process.alive()
    stop_process(tmp_path, "one")
    assert not process.alive()


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    process = start_process(tmp_path, "deaf", "candidate", [sys.executable, "-c", deaf], None)
    while "deaf" not in Path(process.log).read_text():
        time.sleep(0.02)
    started = time.monotonic()
    stop_process(tmp_path, "deaf", grace_s=0.3)
    assert not process.alive() and 0.3 <= time.monotonic() - started < 2


def test_a_killed_child_counts_as_dead_at_once(tmp_path: Path) -> None:
    process = start_process(tmp_path, "one", "candidate", SLEEP, None)
    os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert not process.alive()
    stop_process(tmp_path, "one")


def test_a_process_that_dies_while_starting_is_quoted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model: /nowhere')"]
    instance = start_instance(tmp_path, "broken", "candidate", command, free_port())
    with pytest.raises(ProcessError, match="broken died while starting:\nno such model: /nowhere"):
        wait_ready(instance, 10)


def test_a_process_that_is_not_ready_in_time_gives_its_reasons(tmp_path: Path) -> None:
    instance = start_instance(tmp_path, "slow", "candidate", [*STUB, "--ready-after", "60"], free_port())
    with pytest.raises(ProcessError, match=r"slow was not ready after 1\.5 s.*503.*probes are running"):
        wait_ready(instance, 1.5)
    stop_process(tmp_path, "slow")


def test_ready_is_waited_for() -> None:
    started = start_ticks(os.getpid())
    assert started is not None
    with StubInstance("late", ready_after_s=0.4) as stub:
        here = Instance(name="late", port=stub.port, pid=os.getpid(), started=started, log="/dev/null")
        before = time.monotonic()
        assert wait_ready(here, 5)["status"] == "ready"
        assert time.monotonic() - before >= 0.3


def test_a_program_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"candidate: cannot start /nowhere/python: No such file"):
        start_process(tmp_path, "candidate", "candidate", ["/nowhere/python"], None)
    assert list_processes(tmp_path) == []


def test_a_broken_process_file_is_no_process(tmp_path: Path) -> None:
    (tmp_path / "processes").mkdir()
    (tmp_path / "processes" / "one.json").write_text("{")
    assert find_process(tmp_path, "one") is None and list_processes(tmp_path) == []


def test_a_broken_process_file_does_not_hide_the_process(tmp_path: Path) -> None:
    process = start_process(tmp_path, "one", "candidate", [*SLEEP, "--port", "7"], None)
    (tmp_path / "processes" / "one.json").write_bytes(b"\xff\xfe")
    found = find_process(tmp_path, "one")
    assert found is not None and (found.pid, found.started, found.port) == (process.pid, process.started, 7)
    with pytest.raises(UserError, match="one already runs"):
        start_process(tmp_path, "one", "candidate", SLEEP, None)
    stop_process(tmp_path, "one")
    assert not process.alive() and list((tmp_path / "processes").iterdir()) == []


def test_a_process_whose_file_cannot_be_written_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tasks.processes.write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        start_process(tmp_path, "one", "candidate", SLEEP, None)
    assert running_processes(tmp_path) == []


def test_of_many_starts_of_a_name_in_the_same_moment_one_succeeds(tmp_path: Path) -> None:
    together, said = threading.Barrier(4), []

    def begin() -> None:
        together.wait()
        try:
            said.append(start_process(tmp_path, "one", "candidate", SLEEP, None).pid)
        except UserError as error:
            said.append(str(error))

    starts = [threading.Thread(target=begin) for _ in range(4)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    running = [process.pid for process in running_processes(tmp_path)]
    stop_processes(tmp_path, running_processes(tmp_path))
    [winner] = [line for line in said if isinstance(line, int)]
    assert running == [winner]


def test_a_port_in_use_is_refused_with_its_owner() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=rf"^port {port} is in use \(pid {os.getpid()} .*\): stop it or set ATT"):
            require_free_port(port)
    require_free_port(port)


def test_the_port_is_put_into_a_command_once() -> None:
    assert with_port(["serve"], 1) == ["serve", "--port", "1"]
    assert with_port(["serve", "--port", "1", "--x"], 2) == ["serve", "--port", "2", "--x"]
