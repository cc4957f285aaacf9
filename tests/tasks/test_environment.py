"""A measuring command that crashes, hangs or is killed becomes one error; a finished one is not run again."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from attention.job import BenchJob, FingerprintJob, Setup
from data.environment import Environment
from tasks.environment import (
    Job,
    MeasureError,
    Worker,
    WorkerSilentError,
    kill_running,
    measure,
    measure_all,
    serve_command,
)

MakeJob = Callable[..., Job]

# Stands for `python -m attention VERB --job FILE --out DIR`; $5 is the file, $7 the folder.
GOOD = 'echo ran >> "$7/runs"; echo \'{"cases": 3}\' > "$7/result.json"'


@pytest.fixture
def job(tmp_path: Path) -> MakeJob:
    """A job whose environment's interpreter is a shell script."""

    def make(script: str, name: str = "probe-candidate", model: str = "m") -> Job:
        python = tmp_path / f"python-{len(list(tmp_path.glob('python-*')))}"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        setup = Setup(model=Path(model), policy=Path("p"))
        return Job(name, FingerprintJob(setup=setup), Environment(name="fake", interpreter=str(python)))

    return make


def test_the_command_gets_its_job_and_its_result_comes_back(job: MakeJob, tmp_path: Path) -> None:
    done = job(f'echo "$@" > "$7/words"; cp "$5" "$7/seen.json"; {GOOD}')
    found = measure(done, tmp_path / "work")
    out = Path(found["out"])
    assert (found["cases"], out.parent) == (3, tmp_path / "work")
    assert (out / "words").read_text().split()[:3] == ["-m", "attention", "fingerprint"]
    assert FingerprintJob.model_validate_json((out / "seen.json").read_text()) == done.job


def test_what_was_measured_is_not_measured_again_unless_the_job_is_another(job: MakeJob, tmp_path: Path) -> None:
    first = measure(job(GOOD), tmp_path)
    assert measure(job("exit 9"), tmp_path) == first
    assert (Path(first["out"]) / "runs").read_text() == "ran\n"
    assert measure(job(GOOD, model="other"), tmp_path)["out"] != first["out"]


def test_exit_1_is_a_measurement_too(job: MakeJob, tmp_path: Path) -> None:
    assert measure(job(f"{GOOD}; exit 1"), tmp_path)["cases"] == 3


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo illegal memory access >&2; exit 139", "exit 139: illegal memory access"),
        ("echo before; kill -SEGV $$", "killed by signal 11: before"),
        ("exit 2", "exit 2: it wrote nothing"),
        ("echo no result; exit 0", "exit 0: no result"),
    ],
)
def test_a_crash_quotes_the_end_of_its_log_and_the_next_try_measures(
    job: MakeJob, tmp_path: Path, script: str, told: str
) -> None:
    with pytest.raises(MeasureError, match=f"probe-candidate: {told}"):
        measure(job(script), tmp_path)
    assert measure(job(GOOD), tmp_path)["cases"] == 3


def test_a_hang_is_ended_after_its_time(job: MakeJob, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(MeasureError, match=r"no end after 0\.3 s: still at case 7"):
        measure(job("echo still at case 7; exec sleep 60"), tmp_path, timeout_s=0.3)
    assert time.monotonic() - started < 10


def test_jobs_run_side_by_side_and_keep_their_order(job: MakeJob, tmp_path: Path) -> None:
    meet = (
        'touch "../$$" 2>/dev/null; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do'
        f' [ $(ls -d {tmp_path}/work/*/here | wc -l) = 2 ] && break; touch "$7/here"; sleep 0.1; done; '
    )
    count = f'echo "{{\\"met\\": $(ls -d {tmp_path}/work/*/here | wc -l)}}" > "$7/result.json"'
    jobs = [job(meet + count, name=f"replay-{side}") for side in ("champion", "candidate")]
    found = measure_all(jobs, tmp_path / "work")
    assert [Path(one["out"]).name.rpartition("-")[0] for one in found] == ["replay-champion", "replay-candidate"]
    assert [one["met"] for one in found] == [2, 2]


def test_the_first_failure_is_told_after_all_have_ended(job: MakeJob, tmp_path: Path) -> None:
    good = job(f"sleep 0.3; {GOOD}", name="replay-candidate")
    with pytest.raises(MeasureError, match="replay-champion"):
        measure_all([job("exit 2", name="replay-champion"), good], tmp_path)
    assert len(list(tmp_path.glob("replay-candidate-*/result.json"))) == 1


def test_an_interrupted_release_ends_what_it_measures(job: MakeJob, tmp_path: Path) -> None:
    failures: list[str] = []

    def release() -> None:
        try:
            measure(job('touch "$7/started"; exec sleep 60'), tmp_path)
        except MeasureError as error:
            failures.append(str(error))

    thread = threading.Thread(target=release)
    thread.start()
    deadline = time.monotonic() + 10
    while not list(tmp_path.glob("*/started")) and time.monotonic() < deadline:
        time.sleep(0.02)
    kill_running()
    thread.join(10)
    assert failures and "killed by signal 9" in failures[0]


WORKER = """
import json, sys, time
ready = {"resolved": {"decode": "torch_sdpa:math"}, "fingerprint_id": "f1", "device_name": "cpu"}
print(json.dumps(ready), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["setup"]["model"] == "crash":
        print("out of memory", file=sys.stderr)
        sys.exit(7)
    if asked["setup"]["model"] == "hang":
        time.sleep(60)
    print(json.dumps({"seconds": 0.5}), flush=True)
"""


def worker(tmp_path: Path, script: str) -> Worker:
    (tmp_path / "worker.py").write_text(script)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "worker.py"} "$@"\n')
    python.chmod(0o755)
    job = BenchJob(setup=Setup(model=Path("m"), policy=Path("p")))
    return Worker(Job("bench-candidate", job, Environment(name="fake", interpreter=str(python))), tmp_path)


def ask(model: str) -> FingerprintJob:
    return FingerprintJob(setup=Setup(model=Path(model), policy=Path("p")))


def test_a_worker_answers_until_it_is_closed(tmp_path: Path) -> None:
    bench = worker(tmp_path, WORKER).wait_ready()
    assert (bench.resolved, bench.fingerprint_id) == ({"decode": "torch_sdpa:math"}, "f1")
    assert [bench.ask(ask("m"))["seconds"] for _ in range(3)] == [0.5] * 3
    bench.close()
    with pytest.raises((MeasureError, ValueError)):
        bench.ask(ask("m"))


def test_a_worker_that_hangs_is_killed_and_told_apart(tmp_path: Path) -> None:
    bench = worker(tmp_path, WORKER).wait_ready()
    with pytest.raises(WorkerSilentError, match=r"no answer within 0\.2 s"):
        bench.ask(ask("hang"), timeout_s=0.2)
    bench.close()


def test_a_worker_that_dies_is_an_error_now_and_later(tmp_path: Path) -> None:
    bench = worker(tmp_path, WORKER).wait_ready()
    with pytest.raises(MeasureError, match="bench-candidate: exit 7: out of memory"):
        bench.ask(ask("crash"))
    with pytest.raises(MeasureError, match="bench-candidate"):
        bench.ask(ask("m"))
    bench.close()


def test_a_worker_that_cannot_load_says_why(tmp_path: Path) -> None:
    bench = worker(tmp_path, "import sys; sys.exit('no such backend')")
    with pytest.raises(MeasureError, match="exit 1: no such backend"):
        bench.wait_ready()
    bench.close()


def test_flags_without_a_value_are_left_out() -> None:
    python = Environment(name="other", interpreter="/opt/python")
    flags: dict[str, str | None] = {"model": "m", "fault": None}
    assert serve_command(python, flags) == ["/opt/python", "-m", "attention", "serve", "--model", "m"]
