"""One backend on one case: what runs is proven before anything is timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention import contender
from attention.cases import AttentionCase
from attention.contender import prepare, random_problem
from attention.outcomes import MeasurementError
from attention.timing import clock_of

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
