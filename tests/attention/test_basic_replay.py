"""Basic replay: what is as exact as plain math may serve, what is not gives way before the instance is ready."""

from __future__ import annotations

import math

import pytest
import torch

from attention import startup
from attention.backends.base import AttentionSpec, Backend, Batch, Planned
from attention.basic_replay import MAX_RATIO, Replayed, replay
from attention.dispatch import Dispatcher, NoBackendError
from attention.faults import WRONG_SCALE
from attention.job import Setup
from attention.model import specs_of
from attention.policy import load_policy

FLASH, MATH = "torch_sdpa:flash", "torch_sdpa:math"


class Off:
    """A backend whose output is spoilt."""

    def __init__(self, backend: Backend, spoil: float) -> None:
        self.name, self.check, self._backend, self._spoil = backend.name, backend.check, backend, spoil

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        planned = self._backend.plan(batch, spec, graph=graph, lse=lse)
        sound = planned.run
        planned.run = lambda *tensors: (sound(*tensors)[0] * self._spoil, None)  # type: ignore[method-assign]
        return planned


def replayed(setup: Setup, spoil: float = 1.0) -> Replayed:
    specs = specs_of(setup.model, "float32")
    dispatcher = Dispatcher(
        load_policy(setup.policy), specs, wrap=lambda one: Off(one, spoil) if one.name == FLASH else one
    )
    runner = startup.load(setup, dispatcher)
    found = replay(runner, specs)
    assert runner.dispatcher is dispatcher, "what serves is in its place again"
    assert runner.pool.num_free == runner.pool.num_pages
    return found


def test_a_sound_backend_is_as_exact_as_plain_math(setup: Setup) -> None:
    found = replayed(setup)
    assert found.reason() is None
    assert set(found.served) == {"prefill", "decode", "extend"}
    assert max(found.served.values()) < 1e-5


@pytest.mark.parametrize("spoil", [1.0001, 1.05, float("nan"), 0.0])
def test_a_backend_that_is_off_is_found(setup: Setup, spoil: float) -> None:
    reason = replayed(setup, spoil).reason()
    assert reason is not None
    assert (reason.code, reason.source, reason.allowed) == ("NUMERIC_DRIFT", "basic replay", f"<= {MAX_RATIO:g}")


def test_a_missing_number_is_never_good() -> None:
    assert Replayed({"prefill": math.nan, "decode": 1e-7}, {"prefill": 1e-7, "decode": 1e-7}).reason() is not None


def test_at_start_the_next_of_the_chain_serves(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "faulty", lambda one, fault, target: Off(one, 1.01) if one.name == FLASH else one)
    monkeypatch.setattr(startup, "probe", lambda *args, **kwargs: [])
    started = startup.prepare(setup, with_replay=True)
    assert set(started.dispatcher.resolved.values()) == {MATH}
    assert {(event.from_backend, event.reason) for event in started.dispatcher.fallbacks} == {(FLASH, "NUMERIC_DRIFT")}
    assert started.replayed is not None and started.replayed.ratio == 1.0


def test_with_nobody_exact_left_it_does_not_start(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "probe", lambda *args, **kwargs: [])
    wrong = setup.model_copy(update={"fault": WRONG_SCALE})
    with pytest.raises(NoBackendError, match=r"no backend of the policy can serve .*NUMERIC_DRIFT"):
        startup.prepare(wrong, with_replay=True)
    assert torch.get_num_threads() == 1
