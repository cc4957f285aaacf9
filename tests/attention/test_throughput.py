"""Where the time of a tensor replay goes, and that threads which keep a GPU fed change no figure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attention import confirm
from attention.backends.base import AttentionSpec
from attention.job import Setup, TensorPlan
from attention.replay import tensor, throughput
from attention.replay.tensor import Sources
from attention.replay.throughput import Meter
from attention.replay.truths import Truths, compute

SPEC = AttentionSpec(4, 2, 16, 16, torch.float32, 0.25)
SETUP = Setup(model=Path("unused"), policy=Path("unused"))
PLAN = TensorPlan(seeds=(1, 2), max_kv_len=144, inputs=("normal", "sink"))
RESOLVED = dict.fromkeys(("prefill", "decode", "extend"), "torch_sdpa:flash")
NUM_CASES = 5  # shapes up to 144 keys


def rows(sources: Sources | None = None) -> list[dict[str, Any]]:
    found = tensor.rows(SETUP, PLAN, [SPEC], ("bfloat16",), RESOLVED, 1.0, sources=sources)
    return [{name: value for name, value in row.items() if name != "time"} for row in found]


def test_shares_are_of_the_wall_time_and_a_second_run_has_no_oracle(tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        meter = Meter()
        found = rows(Sources(oracle=Truths(tmp_path, meter.oracle(compute)), meter=meter))
        seen.append(meter.summary(len(found)))
    first, second = seen
    assert 0 < first.oracle_share < first.busy_share < 1
    assert second.oracle_share == 0 < second.busy_share < 1
    for one in seen:
        assert one.num_cases == NUM_CASES * 4
        assert one.cases_per_minute == pytest.approx(60 * one.num_cases / one.wall_s)


class Event:
    """A CUDA event of a device that starts `lag` seconds after it was told."""

    lag = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter() + self.lag

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


@pytest.mark.parametrize(("lag", "busy"), [(60.0, True), (0.0, False)])
def test_a_device_that_may_have_waited_for_the_host_counts_as_idle(
    monkeypatch: pytest.MonkeyPatch, lag: float, busy: bool
) -> None:
    monkeypatch.setattr(throughput.torch.cuda, "Event", Event)
    monkeypatch.setattr(throughput.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Event, "lag", lag)
    meter = Meter("cuda")
    for part in (throughput.ORACLE, "kernel"):
        with meter.span(part):
            time.sleep(0.01)
    found = meter.summary(2)
    assert (found.busy_share > found.oracle_share) is busy
    assert (found.busy_share > 0) is busy
    assert found.oracle_share > 0, "an upper bound of the oracle's share"


def test_threads_that_make_problems_ahead_change_no_row_and_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = rows()
    start = tensor._Recorder.__init__

    def ahead(self: Any, *arguments: Any) -> None:
        start(self, *arguments)
        self._num_ahead = 3

    monkeypatch.setattr(tensor._Recorder, "__init__", ahead)
    assert rows() == plain
    assert not any("error" in row for row in plain)


def test_no_more_is_made_ahead_than_was_said() -> None:
    taken = []

    def items() -> Iterator[int]:
        for i in range(10):
            taken.append(i)
            yield i

    found = tensor._in_threads(lambda i: i * i, items(), 2)
    assert next(found) == 0
    assert taken == [0, 1, 2]
    assert list(found) == [i * i for i in range(1, 10)]


def test_one_look_confirms_all_numbers_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    watch = confirm.watch

    def counted(*arguments: Any, **options: Any) -> Any:
        looks.append(options)
        return watch(*arguments, **options)

    monkeypatch.setattr(tensor.confirm, "watch", counted)
    found = rows()
    assert len(looks) == NUM_CASES
    assert {row["confirmed_backend"] for row in found} == {"torch_sdpa:flash"}


def test_a_case_that_raises_in_any_step_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_on(name: str, wanted: int) -> Iterable[Any]:
        real, calls = getattr(tensor, name), []

        def step(*arguments: Any, **options: Any) -> Any:
            calls.append(None)
            if len(calls) == wanted:
                raise RuntimeError(f"{name} broke")
            return real(*arguments, **options)

        return step

    for wanted, name in ((2, "build"), (4, "create"), (6, "measure")):
        monkeypatch.setattr(tensor, name, fails_on(name, wanted))
    found = rows()
    errors = {i: row["error"] for i, row in enumerate(found) if "error" in row}
    assert list(errors.values()) == [
        "RuntimeError: build broke",
        "RuntimeError: create broke",
        "RuntimeError: measure broke",
    ]
    assert len(found) == NUM_CASES * 4
