"""Contenders take turns, and one that is lost costs its own case and no other."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention.cases import AttentionCase
from attention.job import BenchCommand, BenchJob, BenchSample, Setup
from data.environment import Environment
from tasks import measurement
from tasks.measurement import Contender, Crew, Effort, Pair, compare, noise_floor, survey

CASE = AttentionCase(
    phase="decode", batch="2q1s64", heads_q=4, heads_kv=2, head_dim_qk=16, head_dim_vo=16, dtype="float32"
)
OTHER = CASE.model_copy(update={"phase": "prefill", "batch": "q64"})
EFFORT = Effort(blocks=4, max_blocks=16, processes=1, margin=0.01, min_s=0.01)


class Scripted:
    """A crew whose answers a function gives; keeps the questions."""

    def __init__(self, names: list[str], answer: Any) -> None:
        self.contenders = dict.fromkeys(names)
        self.asked: list[tuple[str, str]] = []
        self.renewed: list[list[str]] = []
        self._answer = answer

    def renew(self, names: list[str]) -> None:
        self.renewed.append(names)

    def ask(self, name: str, command: BenchCommand) -> BenchSample:
        self.asked.append((name, command.metric))
        found: BenchSample = self._answer(name, command, len(self.asked))
        return found


def steady(name: str, command: BenchCommand, nth: int) -> BenchSample:
    if command.metric in ("matmul_s", "read_s"):
        return BenchSample(seconds=(0.5,), work=100.0)
    return BenchSample(seconds=(1.0 if name == "a" else 2.0,) * 3, confirmed="torch_sdpa:math")


def test_blocks_are_a_b_b_a_and_b_a_a_b_and_the_ceilings_lie_between_them() -> None:
    crew: Any = Scripted(["a", "b"], steady)
    run = survey(crew, CASE, blocks=2, min_s=0.01)
    block = [("a", "kernel_s"), ("b", "kernel_s"), ("b", "kernel_s"), ("a", "kernel_s")]
    after = [[(name, "matmul_s"), (name, "read_s")] for name in "ba"]
    turned = [("ab"[name == "a"], metric) for name, metric in block]
    assert crew.asked == [*block[:2], *block, *after[0], *turned, *after[1]]
    assert run.seconds("b") == [2.0] * 12
    assert run.block_medians("a") == [1.0, 1.0]
    machine = run.machine()
    assert machine is not None
    assert (machine.flops_per_s, machine.bytes_per_s) == (200.0, 200.0)


def test_a_clear_difference_needs_one_build_alone() -> None:
    crew: Any = Scripted(["a", "b"], steady)
    [found] = compare(crew, [Pair(CASE)], "a", "b", EFFORT)
    assert found.judged is not None
    assert (found.judged.verdict, found.num_blocks, len(found.runs)) == ("SLOW", 4, 1)
    assert found.judged.interval.value == pytest.approx(2.0)


def noisy(name: str, command: BenchCommand, nth: int) -> BenchSample:
    if command.case == OTHER:
        return steady(name, command, nth)
    return BenchSample(seconds=(1.0 + 0.2 * (hash((nth, 7)) % 100) / 100,) * 3, work=1.0)


def test_only_what_is_ambiguous_is_built_again_until_its_last_block_or_the_deadline() -> None:
    crew: Any = Scripted(["a", "b"], noisy)
    heard: list[Any] = []
    found = compare(crew, [Pair(CASE), Pair(OTHER)], "a", "b", EFFORT, heard=heard.append)
    assert [one.num_blocks for one in found] == [16, 4]
    assert [one.pair.case for one in heard] == [CASE, OTHER, CASE, CASE, CASE]
    assert crew.renewed == [["a", "b"]] * 3, "in fresh processes"
    hurried = compare(crew, [Pair(CASE)], "a", "b", replace(EFFORT, deadline=time.monotonic()))
    assert hurried[0].judged is not None
    assert (hurried[0].judged.verdict, hurried[0].num_blocks) == ("AMBG", 4)


def test_every_case_is_built_in_as_many_processes_as_the_effort_says() -> None:
    crew: Any = Scripted(["a", "b"], steady)
    found = compare(crew, [Pair(CASE), Pair(OTHER)], "a", "b", replace(EFFORT, processes=2))
    assert [len(one.runs) for one in found] == [2, 2]
    assert len(crew.renewed) == 1


def test_processes_that_differ_leave_a_case_ambiguous() -> None:
    def differing(name: str, command: BenchCommand, nth: int) -> BenchSample:
        slower = 1 + 0.04 * (len(crew.renewed) % 2) if name == "b" else 1.0
        return BenchSample(seconds=(slower,) * 3, work=1.0)

    crew: Any = Scripted(["a", "b"], differing)
    [once] = compare(crew, [Pair(CASE)], "a", "b", replace(EFFORT, max_blocks=4))
    assert once.judged is not None and once.judged.verdict == "SAME", "one process cannot tell"
    [found] = compare(crew, [Pair(CASE)], "a", "b", replace(EFFORT, processes=2))
    assert found.judged is not None and found.judged.verdict == "AMBG"


def test_builds_of_a_case_are_one_run_in_the_end() -> None:
    crew: Any = Scripted(["a", "b"], noisy)
    [found] = compare(crew, [Pair(CASE)], "a", "b", EFFORT)
    run = found.run
    assert run.num_blocks == 16
    assert len(run.turns["a"]) == len(run.turns["b"]) == 32
    assert run.first["a"] == found.runs[0].first["a"], "the first call was the first build's"


def falls(name: str, command: BenchCommand, nth: int) -> BenchSample:
    if name == "b" and nth > 6:
        return BenchSample(outcome="illegal_access", error="misaligned address")
    return steady(name, command, nth)


def test_who_is_lost_on_the_way_is_out_of_the_case_and_the_others_go_on() -> None:
    crew: Any = Scripted(["a", "b", "c"], falls)
    run = survey(crew, CASE, blocks=3, min_s=0.01)
    assert run.lost["b"].outcome == "illegal_access"
    assert (run.seconds("b"), len(run.seconds("a"))) == ([], 18)
    pair: Any = Scripted(["a", "b"], falls)
    [found] = compare(pair, [Pair(CASE)], "a", "b", EFFORT)
    assert (found.is_lost, found.judged) == (True, None)
    assert "b" not in found.run.first


def test_the_floor_is_how_far_equal_contenders_came_apart() -> None:
    def biased(name: str, command: BenchCommand, nth: int) -> BenchSample:
        return BenchSample(seconds=(1.0 if name == "a" else 0.98,) * 3, work=1.0)

    crew: Any = Scripted(["a", "b"], biased)
    assert noise_floor(crew, [Pair(CASE), Pair(OTHER)], "a", "b", EFFORT) == pytest.approx(1 / 0.98 - 1)
    lost: Any = Scripted(["a", "b"], lambda *asked: BenchSample(outcome="crashed", error="gone"))
    assert noise_floor(lost, [Pair(CASE)], "a", "b", EFFORT) == 0.0


def setup(tmp_path: Path) -> Setup:
    (tmp_path / "model").mkdir(exist_ok=True)
    config = '{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, '
    config += '"num_key_value_heads": 2, "head_dim": 16}'
    (tmp_path / "model" / "config.json").write_text(config)
    (tmp_path / "policy.yaml").write_text("attention_policy: {preferred: [torch_sdpa], fallback: [math]}\n")
    return Setup(model=tmp_path / "model", policy=tmp_path / "policy.yaml")


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    job, here = BenchJob(setup=setup(tmp_path)), Environment(name="current", interpreter=sys.executable)
    contenders = [Contender(name, job, here, backend=name) for name in ("torch_sdpa:flash", "torch_sdpa:math")]
    with Crew(contenders, tmp_path / "work", timeout_s=60) as made:
        made.wait_ready()
        yield made


def test_real_workers_are_measured_refused_killed_and_hung(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    run = survey(crew, CASE, blocks=2, min_s=0.002)
    assert run.lost == {}
    assert {name: first.confirmed for name, first in run.first.items()} == {name: name for name in crew.contenders}
    assert all(second > 0 for name in crew.contenders for second in run.seconds(name))
    assert run.machine() is not None

    refused = survey(crew, CASE.model_copy(update={"execution": "cuda_graph"}), blocks=1, min_s=0.002)
    assert {one.outcome for one in refused.lost.values()} == {"refused"}

    victim = crew.worker("torch_sdpa:flash")
    os.kill(victim.pid, signal.SIGKILL)
    killed = survey(crew, CASE, blocks=1, min_s=0.002)
    assert killed.lost["torch_sdpa:flash"].outcome == "crashed"
    assert killed.seconds("torch_sdpa:math")

    back = survey(crew, CASE, blocks=1, min_s=0.002)
    assert back.lost == {}, "a fresh process answers the next case"
    before = {name: crew.worker(name).pid for name in crew.contenders}
    crew.renew(list(crew.contenders))
    assert all(crew.worker(name).pid != pid for name, pid in before.items())

    os.kill(crew.worker("torch_sdpa:math").pid, signal.SIGSTOP)
    monkeypatch.setattr(crew, "_timeout_s", 0.5)
    hung = survey(crew, CASE, blocks=1, min_s=0.002, names=["torch_sdpa:math"])
    assert hung.lost["torch_sdpa:math"].outcome == "timed_out"
    assert measurement.ASK_TIMEOUT_S > 60, "a first call may compile"
