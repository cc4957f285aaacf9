"""prefect.yaml: what it declares, and a real server, worker and event that lead to a promoted release."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow

from attention.errors import UserError
from data.candidate import candidate_named
from data.paths import repo_dir
from flows.telemetry import SWITCHES
from tasks.processes import free_port
from tests.commands import Home, candidate_file

DECLARED = yaml.safe_load((repo_dir() / "prefect.yaml").read_text())
DEPLOYMENTS = {one["name"]: one for one in DECLARED["deployments"]}
EVENT = "attention.candidate.registered"


# ---------------------------------------------------------------------------- the file


def flow_of(name: str) -> Flow[..., Any]:
    module, _, attribute = DEPLOYMENTS[name]["entrypoint"].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    assert isinstance(found, Flow)
    return found


def test_every_deployment_is_a_flow_of_its_name_on_a_pool_of_processes() -> None:
    assert set(DEPLOYMENTS) == {"release", "nightly", "measure"}
    for name in DEPLOYMENTS:
        assert flow_of(name).name == name
    pools = {name: one["work_pool"]["name"] for name, one in DEPLOYMENTS.items()}
    # A measuring machine runs no flow but `measure`.
    assert pools == {"release": "release", "nightly": "release", "measure": "measure"}


def test_a_run_sends_no_telemetry_and_shows_its_death_in_time() -> None:
    for one in DEPLOYMENTS.values():
        env = one["work_pool"]["job_variables"]["env"]
        assert env == {**SWITCHES, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}


def test_an_event_gives_the_release_a_name_and_nothing_else() -> None:
    release = DEPLOYMENTS["release"]
    (trigger,) = release["triggers"]
    assert trigger["expect"] == [EVENT] and trigger["enabled"]
    assert trigger["parameters"] == {"candidate": "{{ event.payload.candidate }}"}
    assert set(trigger["parameters"]) <= set(inspect.signature(flow_of("release").fn).parameters)
    assert release["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}


def test_nightly_runs_at_two() -> None:
    (schedule,) = DEPLOYMENTS["nightly"]["schedules"]
    assert schedule == {"cron": "0 2 * * *", "timezone": "UTC", "active": True, "slug": "nightly"}


def test_a_name_finds_a_candidate_of_the_folder() -> None:
    folder = repo_dir() / "data" / "candidates"
    assert candidate_named("torch-flash-cpu") == folder / "torch-flash-cpu.yaml"
    assert candidate_named("drill/slow_decode") == folder / "drill" / "slow_decode.yaml"


@pytest.mark.parametrize("name", ["", "torch-flash-cpu.yaml", "../plans/demo", "drill/../torch-flash-cpu", "/etc/x"])
def test_a_name_that_is_none_of_the_folder_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"^candidate '.*': not a name in .*candidates; (known|did you mean)"):
        candidate_named(name)
    with pytest.raises(UserError, match="not a name in"):
        candidate_named(str(repo_dir() / "data" / "candidates" / f"{name}.yaml"))


# ---------------------------------------------------------------------------- a server, a worker, an event


@dataclass(frozen=True)
class Server:
    """A Prefect server on loopback with a folder of its own, and the commands of README against it."""

    home: Home
    env: dict[str, str]
    port: int

    def prefect(self, *words: str) -> None:
        done = subprocess.run(
            [*PREFECT, *words], cwd=repo_dir(), env=self.env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"prefect {' '.join(words)}:\n{done.stdout}{done.stderr}"

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """A command that stays, in a session of its own: a shell's `&` would make it deaf to signals."""
        with self.log(words[0]).open("wb") as log:
            return subprocess.Popen(
                [*PREFECT, *words], cwd=repo_dir(), env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def log(self, name: str) -> Path:
        return self.home.path / f"{name}.log"

    def call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api{path}", data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read() or b"null")

    def answers(self) -> bool:
        try:
            return bool(self.call("/health"))
        except OSError:
            return False

    def register(self, candidate: str) -> None:
        """Post the event that starts a release."""
        resource = {"prefect.resource.id": "attention.candidate.test"}
        event = {"id": str(uuid.uuid4()), "occurred": datetime.now(UTC).isoformat(), "event": EVENT}
        self.call("/events", [{**event, "resource": resource, "payload": {"candidate": candidate}}])

    def ended(self, number: int) -> dict[str, Any] | None:
        """The state of the release's flow run of that number, once it is final."""
        runs = self.call(
            "/flow_runs/filter",
            {"deployments": {"name": {"any_": ["release"]}}, "sort": "EXPECTED_START_TIME_ASC"},
        )
        if len(runs) < number or runs[number - 1]["state_type"] not in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            return None
        state: dict[str, Any] = runs[number - 1]["state"]
        return state


PREFECT = [sys.executable, "-m", "prefect", "--no-prompt"]


def wait(condition: Callable[[], Any], timeout_s: float, what: Callable[[], str]) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain: {what()}"
        time.sleep(0.5)
    return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    port, home = free_port(), Home(tmp_path, tmp_path / "prefect")
    home.prefect.mkdir()
    foreign = {name: value for name, value in home.env().items() if not name.startswith("PREFECT_")}
    own = {
        **SWITCHES,
        "PWD": str(repo_dir()),
        "PREFECT_HOME": str(home.prefect),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_UI_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "ATTENTION_RELEASE_CANDIDATES": str(tmp_path / "candidates"),
    }
    found = Server(home, {**foreign, **own}, port)
    started = [found.start("server", "start", "--port", str(port))]
    try:
        wait(found.answers, 120, found.log("server").read_text)
        found.prefect("work-pool", "create", "release", "--type", "process")
        found.prefect("work-pool", "create", "measure", "--type", "process")
        found.prefect("deploy", "--all")
        started.append(found.start("worker", "start", "--pool", "release", "--limit", "1"))
        yield found
    finally:
        for process in reversed(started):
            os.killpg(process.pid, signal.SIGTERM)
        home.run("down")
        for process in started:
            process.wait(30)
        left = home.processes()
    assert left == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_event_starts_a_release_that_ends_promoted(server: Server) -> None:
    file = candidate_file(server.home.path / "candidates", "quick")
    pools = {name: DEPLOYMENTS[name]["work_pool"]["name"] for name in DEPLOYMENTS}
    deployed = {one["name"]: one["work_pool_name"] for one in server.call("/deployments/filter", {})}
    assert deployed == pools

    # The same file by its path: an event may pick a candidate, not bring one.
    server.register(str(file))
    refused = wait(lambda: server.ended(1), 120, server.log("worker").read_text)
    assert refused["type"] == "FAILED" and "not a name in" in refused["message"]
    assert not server.home.cell.exists()

    server.register("quick")
    state = wait(lambda: server.ended(2), 900, server.log("worker").read_text)
    assert state["type"] == "COMPLETED", f"{state}\n{server.log('worker').read_text()}"
    record = server.home.record()
    assert record.state == "promoted" and record.champion is not None
    assert (record.champion.candidate, record.candidate) == ("quick", "quick")
    assert mlflow_state(server.home, record.champion.release_id) == ("promoted", "FINISHED")


def mlflow_state(home: Home, release_id: str) -> tuple[str, str]:
    """Tag `state` and status of the release's own run, not of its stages."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home.path / 'state' / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("attention-release/smollm2")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], f"tags.release_id = '{release_id}'")
    (run,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    return run.data.tags["state"], run.info.status
