"""Releases of the real model through the real command, from the first to a rollback and two drills.

The tests go in this order through one home, in which the champion is kept up: a release takes one to
two minutes on two cores, and each test starts where the one before ended. Of a test that is run alone the
first release is made too; the drills then meet another champion than the incumbent and fail.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from data.lake import Lake
from tasks.lifecycle import STAGES
from tests.commands import SAMPLE, Home, candidate_file

# Minutes of real traffic: `make test-all`.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BLOCKED = ("prefect", "mlflow", "torch", "great_expectations", "duckdb", "transformers")
FAMILY = ("--gpu", "cpu", "--family", "smollm2")

BLOCKER = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ImportError(f"{{name}} is blocked by the test")

sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("release")
    (folder / "home").mkdir()
    home = Home(folder / "home", folder / "prefect")
    yield home
    down = home.run("down")
    assert (down.returncode, home.processes()) == (0, []), down.stderr


@pytest.fixture(scope="module")
def candidates(home: Home) -> Path:
    return home.path.parent / "candidates"


def flash(candidates: Path) -> Path:
    """The sound candidate; its traffic has one corrupt line."""
    traffic = candidates / "traffic.jsonl"
    candidates.mkdir(exist_ok=True)
    lines = SAMPLE.read_text().splitlines()
    traffic.write_text("\n".join([*lines[:6], '{"custom_id": "torn', *lines[6:]]) + "\n")
    return candidate_file(candidates, traffic={"source": str(traffic), "mix": "chat"})


def drill(candidates: Path, fault: str) -> Path:
    return candidate_file(candidates / "drill", f"drill-{fault.replace('_', '-')}", fault=fault)


def document(done: subprocess.CompletedProcess[str], code: int) -> dict[str, Any]:
    """The JSON on stdout of a command that ended with `code`."""
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rows(home: Home, release_id: str) -> int:
    """Live rows of a release's candidate."""
    with Lake(home.path / "lake") as lake:
        [(found,)] = lake.rows(
            "select count(*) from requests where release_id = $id and side = 'candidate' and not shadow", id=release_id
        )
    return int(found)


def ask(home: Home) -> tuple[int, str, dict[str, Any]]:
    """One live request through Envoy: status, who served, the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", home.port, timeout=30)
    try:
        body = {"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 3}
        headers = {"content-type": "application/json", "x-session-id": os.urandom(4).hex()}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.getheader("x-attention-release", ""), json.loads(response.read())
    finally:
        connection.close()


@functools.lru_cache
def mlflow(home: Home) -> MlflowClient:
    uri = f"sqlite:///{home.path}/state/mlflow/mlflow.db"
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def aliases(home: Home) -> dict[str, str]:
    """Release id behind each alias of the registered model."""
    model = mlflow(home).get_registered_model("attention.smollm2.cpu")
    found = {}
    for alias in model.aliases:
        run_id = mlflow(home).get_model_version_by_alias(model.name, alias).run_id
        found[alias] = mlflow(home).get_run(run_id).data.tags["release_id"]
    return found


@pytest.fixture(scope="module")
def promoted(home: Home, candidates: Path) -> dict[str, Any]:
    """What the first release printed, and under `said` its progress."""
    done = home.run("release", flash(candidates), "--json", timeout_s=500)
    return {**document(done, 0), "said": done.stderr}


def test_a_sound_candidate_is_promoted_and_every_pass_says_what_it_could_have_seen(
    home: Home, promoted: dict[str, Any]
) -> None:
    assert (promoted["state"], promoted["failed_gate"], promoted["changed"]) == ("promoted", None, True)
    assert [gate["stage"] for gate in promoted["gates"]] == list(STAGES)
    assert {gate["verdict"] for gate in promoted["gates"]} == {"pass"}
    assert all(gate["detectable"] for gate in promoted["gates"])
    assert (promoted["champion"], promoted["previous"]) == ("flash", "torch-math-cpu")
    assert promoted["router_shares"] == {"champion": 100, "control": 0, "candidate": 0}
    # Shadows count for neither; a canary of 50 and 100 % and the expansion took 36 + 36 + 20 at least.
    assert promoted["candidate_requests"]["router"] >= 92
    assert promoted["candidate_requests"]["rows"] == rows(home, promoted["release_id"]) >= 92
    assert Path(promoted["report"]).is_file()
    status, serves, answer = ask(home)
    assert (status, serves) == (200, promoted["release_id"]), answer


def test_a_corrupt_line_of_traffic_is_named_and_the_rest_is_played(promoted: dict[str, Any]) -> None:
    assert "traffic: line 7 left out:" in promoted["said"]


def test_no_user_request_was_lost_on_the_way(home: Home, promoted: dict[str, Any]) -> None:
    live = {stage.stage: stage.detail for stage in home.record().stages}
    assert [live[name]["lost"] for name in ("shadow", "expand")] == [0, 0]
    assert [(step["share"], step["lost"]) for step in live["canary"]["steps"]] == [(50, 0), (100, 0)]


def test_mlflow_holds_a_run_with_a_nested_run_a_stage_and_the_alias(home: Home, promoted: dict[str, Any]) -> None:
    run = mlflow(home).get_run(promoted["mlflow_run_id"])
    tags = run.data.tags
    assert {tags[f"gate.{stage}"] for stage in STAGES} == {"pass"}
    assert (tags["state"], tags["champion"]) == ("promoted", "torch-math-cpu")
    assert "torch_sdpa:flash" in tags["confirmed_backend"]
    assert run.info.status == "FINISHED"
    nested = mlflow(home).search_runs(
        [run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{promoted['mlflow_run_id']}'"
    )
    assert sorted(child.data.tags["stage"] for child in nested) == sorted(STAGES)
    assert aliases(home) == {"champion": promoted["release_id"]}


def test_the_same_command_again_says_within_15_s_that_nothing_changed(
    home: Home, candidates: Path, promoted: dict[str, Any]
) -> None:
    started = time.monotonic()
    again = document(home.run("release", flash(candidates), "--json"), 0)
    assert time.monotonic() - started < 15
    assert (again["state"], again["changed"]) == ("promoted", False)
    assert again["release_id"] == promoted["release_id"]


def test_a_rollback_is_confirmed_in_a_second_without_prefect_mlflow_and_torch(
    home: Home, promoted: dict[str, Any], tmp_path: Path
) -> None:
    """From the start of the interpreter until Envoy confirms; a busy machine gets three tries, there and back."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    probe = subprocess.run([sys.executable, "-c", "import torch"], env=home.env(PYTHONPATH=path), capture_output=True)
    assert b"blocked by the test" in probe.stderr
    incumbent, flash_id, seconds = "incumbent-torch-math-cpu", promoted["release_id"], []
    for bad, good in ((flash_id, incumbent), (incumbent, flash_id), (flash_id, incumbent)):
        if seconds and min(seconds) < 1.0 and bad == incumbent:
            break
        previous = home.record().previous
        assert previous is not None and previous.instance is not None
        port = previous.instance.port
        started = time.monotonic()
        there = ("--to", good) if seconds else ()  # what was rolled back before serves again only when named
        command = home.start("rollback", *FAMILY, *there, "--reason", "users see garbage", "--json", PYTHONPATH=path)
        while home.router.observe().endpoints["champion"] != port:
            assert time.monotonic() - started < 30, command.said()
            time.sleep(0.01)
        seconds.append(time.monotonic() - started)
        assert command.child.wait(30) == 0, command.said()
        said = json.loads(command.out.read_text())
        assert (said["release_id"], said["serves"], said["confirmed"]) == (bad, good, True)
        assert said["share_zero_s"] < 1.0
        assert ask(home)[:2] == (200, good)
    print("rollback confirmed by Envoy after", ", ".join(f"{one:.2f} s" for one in seconds))
    assert min(seconds) < 1.0


@pytest.mark.usefixtures("promoted")
def test_what_was_rolled_back_is_not_tried_again_unasked(home: Home, candidates: Path) -> None:
    done = home.run("release", flash(candidates))
    assert done.returncode == 1, done.stderr
    assert "rolled back" in done.stdout and "--retry" in done.stdout
    assert document(home.run("release", flash(candidates), "--json"), 1)["state"] == "rolled_back"
    assert home.record().state == "rolled_back"


@pytest.mark.usefixtures("promoted")
def test_a_wrong_scale_is_stopped_by_replay_and_meets_no_user(home: Home, candidates: Path) -> None:
    before = aliases(home)
    said = document(home.run("release", drill(candidates, "wrong_scale"), "--json", timeout_s=300), 1)
    assert (said["state"], said["failed_gate"]) == ("rejected", "replay")
    assert said["candidate_requests"] == {"router": 0, "rows": 0}
    assert rows(home, said["release_id"]) == 0
    assert ask(home)[:2] == (200, "incumbent-torch-math-cpu")
    assert aliases(home) == before
    assert "drill" in home.record().tags


@pytest.mark.usefixtures("promoted")
def test_a_slow_decode_is_rolled_back_by_the_canary_and_no_request_is_lost(home: Home, candidates: Path) -> None:
    before = aliases(home)
    said = document(home.run("release", drill(candidates, "slow_decode"), "--json", timeout_s=400), 1)
    assert (said["state"], said["failed_gate"]) == ("rolled_back", "canary")
    assert said["router_shares"] == {"champion": 100, "control": 0, "candidate": 0}
    observed = home.router.observe()
    assert (observed.shares.champion, observed.shares.candidate, observed.mirror) == (100, 0, 0.0)
    [canary] = [stage for stage in home.record().stages if stage.stage == "canary"]
    assert canary.verdict == "fail"
    assert [(step["share"], step["lost"]) for step in canary.detail["steps"]] == [(50, 0)]
    assert said["candidate_requests"]["router"] > 0
    assert (said["user_requests"]["sent"] > 0, said["user_requests"]["lost"]) == (True, 0)
    assert aliases(home) == before
    assert ask(home)[:2] == (200, "incumbent-torch-math-cpu")
