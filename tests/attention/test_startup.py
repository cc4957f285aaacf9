"""Start-up: probe before Ready, give way with reasons, refuse when nobody is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention import startup
from attention.errors import UserError
from attention.job import Setup
from attention.model import Chunk
from attention.probe import ProbeResult, probes_of
from attention.reasons import Code, Reason
from attention.startup import decide, prepare, scale_factor

FLASH, MATH = "torch_sdpa:flash", "torch_sdpa:math"


def failed(setup: Setup, backend: str, *, required: bool = True) -> ProbeResult:
    from attention.model import specs_of

    one = probes_of(specs_of(setup.model, "float32")[0], "float32", 16)[0]
    crash = Reason(
        code=Code.LAUNCH_FAILED,
        dimension="process",
        observed="died",
        allowed="alive",
        source="probe",
        message="signal 11",
    )
    return ProbeResult(
        backend=backend,
        probe=one.name,
        level="execute",
        feature=one.feature,
        required=required,
        case=one.case,
        status="fail",
        reasons=(crash,),
    )


def test_a_backend_that_fails_a_required_probe_gives_way_to_the_next(setup: Setup) -> None:
    dispatcher = decide(setup, [failed(setup, FLASH)])
    assert set(dispatcher.resolved.values()) == {MATH}
    assert {event.reason for event in dispatcher.fallbacks} == {"LAUNCH_FAILED"}


def test_a_probe_of_what_is_never_launched_excludes_nobody(setup: Setup) -> None:
    assert set(decide(setup, [failed(setup, FLASH, required=False)]).resolved.values()) == {FLASH}


def test_a_policy_that_does_not_reject_on_probes_keeps_the_backend_and_says_so(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("attention_policy: {preferred: [torch_sdpa:flash], reject_on: [numerical_gate_failed]}")
    lenient = setup.model_copy(update={"policy": policy})
    monkeypatch.setattr(startup, "probe", lambda *args, **kwargs: [failed(setup, FLASH)])
    started = prepare(lenient)
    assert set(started.dispatcher.resolved.values()) == {FLASH}
    (told,) = started.tolerated()[FLASH]
    assert told.startswith("LAUNCH_FAILED: signal 11")


def test_with_nobody_left_the_instance_stays_unready_and_says_why(setup: Setup) -> None:
    with pytest.raises(UserError, match="no backend of the policy can serve") as caught:
        decide(setup, [failed(setup, FLASH), failed(setup, MATH)])
    assert FLASH in str(caught.value)
    assert MATH in str(caught.value)
    assert "signal 11" in str(caught.value)


def test_only_the_scale_fault_changes_the_scale() -> None:
    assert (scale_factor(None), scale_factor("slow_decode"), scale_factor("wrong_scale")) == (1.0, 1.0, 1.05)
    with pytest.raises(UserError, match="fault 'wrong_scal' is unknown; did you mean wrong_scale"):
        scale_factor("wrong_scal")


def test_a_fault_shows_in_the_fingerprint(setup: Setup) -> None:
    drill = setup.model_copy(update={"fault": "wrong_scale"})
    assert startup.identify(drill).identity.fault == "wrong_scale"
    assert startup.identify(drill).id != startup.identify(setup).id


def test_a_process_is_ready_once_probed_resolved_loaded_and_fingerprinted(setup: Setup) -> None:
    started = prepare(setup)
    assert set(started.dispatcher.resolved.values()) == {FLASH}
    assert started.runner.dispatcher is started.dispatcher
    assert {(r.backend, r.status) for r in started.probes if r.required} == {(FLASH, "pass"), (MATH, "pass")}
    assert started.fingerprint.id == startup.identify(setup).id
    pages = tuple(started.runner.pool.alloc(1))
    started.runner.forward([Chunk((1, 2, 3), 0, pages)])
    assert started.dispatcher.confirmed["prefill"] == FLASH
