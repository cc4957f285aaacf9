"""Decode steps as graphs, on the CPU: a capture that runs the call anew stands for one that the device replays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from attention.backends.base import AttentionSpec, Backend, Batch, Planned
from attention.backends.oracle import OracleBackend
from attention.cases import AttentionCase
from attention.decode_graphs import DecodeGraphs
from attention.dispatch import Dispatcher
from attention.errors import UserError
from attention.limits import Limits
from attention.model import Runner
from attention.reasons import Reason
from attention.sampling import SamplingParams
from attention.scheduler import Generation, Scheduler

FLASH, MATH = "torch_sdpa:flash", "torch_sdpa:math"


class Capturable:
    """A backend of that name whose plans can be captured: the oracle's."""

    def __init__(self, backend: Backend) -> None:
        self.name = backend.name

    def check(self, case: AttentionCase) -> list[Reason]:
        return []

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        return OracleBackend().plan(batch, spec, lse=lse)


@dataclass
class Again:
    """A replay that makes the call again, into the same place."""

    call: Callable[[], torch.Tensor]
    output: torch.Tensor
    dispatcher: Any
    runner: Runner
    backend: str = FLASH

    def __call__(self) -> None:
        own, self.runner.dispatcher = self.runner.dispatcher, self.dispatcher
        try:
            self.output.copy_(self.call())
        finally:
            self.runner.dispatcher = own


def capture_on(runner: Runner) -> Callable[[Callable[[], torch.Tensor]], Again]:
    return lambda call: Again(call, call().clone(), runner.dispatcher, runner)


def served(runner: Runner, prompts: list[list[int]]) -> list[list[int]]:
    scheduler = Scheduler(runner, Limits(prefill_chunk=16, prefix_reuse=False))
    asked = [
        Generation(str(i), tuple(prompt), SamplingParams(max_tokens=5 + i, temperature=0))
        for i, prompt in enumerate(prompts)
    ]
    for one in asked:
        scheduler.submit(one)
    with torch.inference_mode():
        while scheduler.has_work:
            scheduler.step()
    assert scheduler.num_free_pages == runner.pool.num_pages
    assert all(set(one.confirmed.values()) == {FLASH} for one in asked if runner.graphs)
    return [one.output_ids for one in asked]


@pytest.fixture
def runner(make_runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr("attention.confirm.watch", lambda call, device: (call(), FLASH))  # no kernel of FLASH runs
    one = make_runner(FLASH)
    one.eos_token_ids = frozenset()
    one.dispatcher = Dispatcher(one.dispatcher.policy, one.dispatcher.specs, wrap=Capturable)
    return one


PROMPTS = [[11 + i, *range(20, 22 + 5 * i)] for i in range(5)]


def test_answers_with_graphs_are_those_without(runner: Runner) -> None:
    without = served(runner, PROMPTS)
    runner.graphs = DecodeGraphs(runner, sizes=(1, 2, 4, 8), capture=capture_on(runner))  # type: ignore[arg-type]
    assert served(runner, PROMPTS) == without
    assert runner.graphs.num_replayed >= 8
    assert {(size, room) for _, size, room in runner.graphs._graphs} <= {(s, 512) for s in (1, 2, 4, 8)}


def test_a_replay_is_in_the_record_with_what_its_capture_confirmed(runner: Runner) -> None:
    runner.graphs = DecodeGraphs(runner, capture=capture_on(runner))  # type: ignore[arg-type]
    served(runner, PROMPTS[:1])
    (run,) = runner.dispatcher.last_step().phases
    assert (run.phase, run.resolved, run.confirmed, run.graph_hit) == ("decode", FLASH, FLASH, True)


def test_a_capture_that_launches_another_kernel_is_a_mismatch(runner: Runner) -> None:
    def lying(call: Callable[[], torch.Tensor]) -> Again:
        found = capture_on(runner)(call)
        found.backend = MATH
        return found

    runner.graphs = DecodeGraphs(runner, capture=lying)  # type: ignore[arg-type]
    scheduler = Scheduler(runner, Limits(prefill_chunk=16))
    scheduler.submit(Generation("r", tuple(PROMPTS[0]), SamplingParams(max_tokens=3, temperature=0)))
    with torch.inference_mode():
        while scheduler.has_work:
            scheduler.step()
    assert list(runner.dispatcher.mismatches.values()) == [MATH]


def test_a_backend_that_cannot_be_captured_runs_as_ever(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(backend: str, batch: Batch) -> list[Planned]:
        raise UserError("no CUDA graph")

    without = served(runner, PROMPTS[:2])
    runner.graphs = DecodeGraphs(runner, capture=capture_on(runner))  # type: ignore[arg-type]
    monkeypatch.setattr(runner.dispatcher, "plans_for_graph", refuses)
    assert served(runner, PROMPTS[:2]) == without
    assert runner.graphs.num_replayed == 0


def test_a_batch_that_needs_another_launch_runs_as_ever(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    without = served(runner, PROMPTS[:2])
    runner.graphs = DecodeGraphs(runner, capture=capture_on(runner))  # type: ignore[arg-type]
    planned = type(OracleBackend().plan(Batch((1,), (1,), ((0,),), 16), runner.dispatcher.specs[0]))

    def refuses(self: Planned, batch: Batch) -> None:
        raise UserError("capture it anew")

    monkeypatch.setattr(planned, "replan", refuses)
    assert served(runner, PROMPTS[:2]) == without
    assert runner.graphs.num_replayed == 0
