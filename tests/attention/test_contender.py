"""One backend on one case: what runs is proven before anything is timed."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention import contender, timing
from attention.cases import AttentionCase
from attention.contender import prepare, random_problem
from attention.outcomes import MeasurementError
from attention.timing import CudaClock, Rotation, clock_of

CASES = (
    ("prefill", "q80_q33", {}),
    ("decode", "3q1s70_q1s9", {}),
    ("extend", "q40s90_2q3s17", {}),
    ("prefill", "q50", {"layout": "ragged", "page_size": None}),
    ("decode", "2q1s50", {"layout": "contiguous", "page_size": None}),
    ("prefill", "q60", {"window": (7, 0)}),
    ("extend", "q20s60", {"custom_mask": True}),
)


def case(phase: str, batch: str, **fields: Any) -> AttentionCase:
    base = {"heads_q": 4, "heads_kv": 2, "head_dim_qk": 16, "head_dim_vo": 16, "dtype": "float32"}
    return AttentionCase(phase=phase, batch=batch, **base, **fields)


@pytest.mark.parametrize(("phase", "batch", "fields"), CASES)
def test_a_sound_backend_is_ready_on_every_kind_of_case(phase: str, batch: str, fields: dict[str, Any]) -> None:
    ready = prepare("torch_sdpa:math", case(phase, batch, **fields), "cpu", clock_of("cpu"))
    assert (ready.backend, ready.confirmed) == ("torch_sdpa:math", "torch_sdpa:math")
    assert ready.first_call_s > 0
    assert (ready.cold_ratio, ready.workspace_bytes, ready.graph_capture) == (None, None, None)
    outputs = [call()[0] for call in ready.rotation.calls]
    assert len(outputs) >= 2, "calls rotate over copies"
    assert all(torch.equal(outputs[0], other) for other in outputs)


def outcome(backend: str, one: AttentionCase) -> MeasurementError:
    with pytest.raises(MeasurementError) as caught:
        prepare(backend, one, "cpu", clock_of("cpu"))
    return caught.value


def test_what_the_rules_leave_out_is_refused_with_its_reasons() -> None:
    found = outcome("flash_attn:fa2", case("prefill", "q16"))
    assert found.outcome == "refused"
    assert "ARCH_UNSUPPORTED" in str(found)
    assert outcome("torch_sdpa:math", case("prefill", "q16", execution="compile")).outcome == "refused"


def test_another_kernel_than_was_asked_for_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contender.confirm, "watch", lambda call, device: (call(), "torch_sdpa:flash"))
    found = outcome("torch_sdpa:math", case("prefill", "q16"))
    assert (found.outcome, "names torch_sdpa:flash" in str(found)) == ("wrong_kernel", True)


@pytest.mark.parametrize("member", [0, 2])
def test_wrong_numbers_of_the_first_or_last_member_are_no_measurement(
    member: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = contender.create("torch_sdpa:math")

    class Wrong:
        def check(self, one: AttentionCase) -> list[Any]:
            return []

        def plan(self, batch: Any, spec: Any, **kwargs: Any) -> Any:
            planned = made.plan(batch, spec, **kwargs)
            ends = torch.tensor(batch.q_lens).cumsum(0).tolist()

            class Run:
                def run(self, q: Any, k: Any, v: Any) -> Any:
                    out = planned.run(q, k, v)[0].clone()
                    out[ends[member] - 1] *= 1.5
                    return out, None

            return Run()

    monkeypatch.setattr(contender, "create", lambda name, device: Wrong())
    found = outcome("torch_sdpa:math", case("decode", "q1s70_q1s40_q1s9"))
    assert found.outcome == "wrong_numbers"


def test_inputs_are_random_and_the_same_for_every_contender() -> None:
    first, second = (random_problem(case("decode", "2q1s50"), "cpu") for _ in range(2))
    assert torch.equal(first.q_THD, second.q_THD)
    assert first.q_THD.std() == pytest.approx(1.0, abs=0.3)
    assert torch.isnan(first.k).any(), "slots that no member owns are poisoned"


class Event:
    """Of wall time, in place of a device's."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture
def device_clock(monkeypatch: pytest.MonkeyPatch) -> CudaClock:
    """The clock of a GPU on the CPU: its bookkeeping is the same."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=100_000))
    monkeypatch.setattr(contender, "_NOISE", 10.0)  # the CPU proves nothing
    return CudaClock("cuda")


def test_on_a_gpu_calls_rotate_over_more_than_a_cache_and_over_the_replicas(device_clock: CudaClock) -> None:
    one = case("decode", "q1s100")
    ready = prepare("torch_sdpa:math", one, "cpu", device_clock, replicas=4)
    rotation, (plans, problems) = ready.rotation, ready.held
    copy_bytes = problems[0].k.nbytes + problems[0].v.nbytes
    assert len(rotation.calls) * copy_bytes > 3 * device_clock.l2_bytes
    assert (rotation.replicas, len(plans), len(rotation.calls) % 4) == (4, 4, 0)
    assert len({problem.k.data_ptr() for problem in problems}) == len(problems)
    assert ready.cold_ratio is not None
    outputs = [call()[0] for call in rotation.calls]
    assert all(torch.equal(outputs[0], other) for other in outputs)
    taken = device_clock.times(rotation, min_s=1e-9)
    assert len(taken) % 4 == 0
    assert rotation.at % 4 == 0


def test_a_block_in_which_the_device_waited_for_the_host_is_counted(
    device_clock: CudaClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([1e-4] * 10 + [2e-3] * 1000)
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def call() -> None:
        now[0] += next(seconds)

    rotation = Rotation([call])
    device_clock.block(rotation, 5)
    assert rotation.num_waited == 0, "the first block only says how long to sleep"
    device_clock.block(rotation, 5)
    assert rotation.num_waited == 0, "a host that became slow has a second try"
    assert len(device_clock.block(rotation, 48)) <= 15, "no more than the host queues while the device sleeps"
    rotation.host_s, seconds = 1e-4, iter([1e-3] * 5 + [5e-2] * 5)
    device_clock.block(rotation, 5)
    assert rotation.num_waited == 1


def test_large_inputs_prove_themselves_and_have_few_copies(device_clock: CudaClock) -> None:
    ready = prepare("torch_sdpa:math", case("decode", "2q1s400"), "cpu", device_clock, replicas=4)
    assert ready.cold_ratio is None, "one alone is larger than the cache"
    assert len(ready.rotation.calls) == 4


def test_a_cache_that_holds_the_copies_is_found_out(device_clock: CudaClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contender, "_NOISE", 0.03)
    monkeypatch.setattr(
        CudaClock, "block", lambda self, rotation, num: [2e-5 if len(rotation.calls) > 12 else 1e-5] * num
    )
    with pytest.raises(MeasurementError, match="rotating buffers") as caught:
        prepare("torch_sdpa:math", case("decode", "q1s100"), "cpu", device_clock, replicas=4)
    assert caught.value.outcome == "warm_cache"
