"""The dispatcher: who runs each phase, that company changes no answer, and that no change goes unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attention import confirmations, dispatch, matrix
from attention.backends import create
from attention.backends.base import AttentionSpec, Backend, Batch, Planned
from attention.cases import AttentionCase
from attention.dispatch import BackendFailedError, Dispatcher, FallbackEvent
from attention.errors import UserError
from attention.policy import Policy
from attention.reasons import Code, Reason
from attention.replay.problems import Problem, make

FLASH, MATH = "torch_sdpa:flash", "torch_sdpa:math"
FALLBACK = Policy(preferred=(FLASH,), fallback=(MATH,), allow_runtime_fallback=True)
SPEC = AttentionSpec(4, 2, 32, 32, torch.float32, 32**-0.5)


def problem(batch: str) -> Problem:
    case = AttentionCase(
        phase="extend", batch=batch, heads_q=4, heads_kv=2, head_dim_qk=32, head_dim_vo=32, dtype="float32"
    )
    return make(case, "normal", 1)


def run(dispatcher: Dispatcher, one: Problem, layers: int = 1) -> torch.Tensor:
    with torch.inference_mode():
        dispatcher.plan(one.batch)
        outs = [dispatcher.run(layer, one.q_THD, one.k, one.v) for layer in range(layers)]
    return outs[-1]


def drift() -> Reason:
    return Reason(
        code=Code.NUMERIC_DRIFT, dimension="R_rms", observed="70", allowed="<= 10", source="probe", message="error"
    )


def refuse(monkeypatch: pytest.MonkeyPatch, backend: str, when: Callable[[AttentionCase], bool]) -> None:
    """A declared rule of `backend`, where real CPU kernels have none that depends on the request."""
    real = matrix.declared_reasons

    def declared(name: str, case: AttentionCase, *, device: str) -> list[Reason]:
        more = [drift()] if name == backend and when(case) else []
        return [*real(name, case, device=device), *more]

    monkeypatch.setattr(matrix, "declared_reasons", declared)


def longer_than_100(case: AttentionCase) -> bool:
    return max(m.kv_len for m in case.members) > 100


def test_every_phase_gets_the_first_backend_of_its_chain() -> None:
    one = Dispatcher(FALLBACK, [SPEC])
    assert one.requested == one.resolved == dict.fromkeys(("prefill", "decode", "extend"), FLASH)
    assert one.resolutions["decode"].chain == (FLASH, MATH)
    assert one.fallbacks == []
    assert set(one.confirmed.values()) == {"unconfirmed(nothing ran)"}


def test_a_failed_probe_makes_a_startup_fallback_with_its_reasons() -> None:
    one = Dispatcher(FALLBACK, [SPEC], observed={FLASH: [drift()]})
    assert set(one.requested.values()) == {FLASH}
    assert set(one.resolved.values()) == {MATH}
    assert [(f.kind, f.phase) for f in one.fallbacks] == [
        ("startup_fallback", phase) for phase in ("prefill", "decode", "extend")
    ]
    event = one.fallbacks[0]
    assert (event.from_backend, event.to_backend, event.reason) == (FLASH, MATH, "NUMERIC_DRIFT")
    assert event.reasons == (drift(),)


def test_with_no_backend_left_every_reason_is_told() -> None:
    with pytest.raises(UserError, match="no backend of the policy can serve prefill") as caught:
        Dispatcher(FALLBACK, [replace(SPEC, softcap=30.0)])
    assert str(caught.value).count("SOFTCAP_UNSUPPORTED") == 2
    assert "\n" not in str(caught.value)


def test_a_backend_must_serve_every_kind_of_layer() -> None:
    policy = FALLBACK.model_copy(update={"fail_closed_features": ("sliding_window",)})
    one = Dispatcher(policy, [SPEC, replace(SPEC, window=(7, 0))])
    assert one.resolutions["decode"].chain == (FLASH,)
    assert MATH in one.resolutions["decode"].excluded


def test_a_mixed_step_equals_its_members_alone() -> None:
    mixed = problem("q1s50_q20_q1s33_q7s60_q1s9")
    dispatcher = Dispatcher(FALLBACK, [SPEC])
    out = run(dispatcher, mixed)
    torch.testing.assert_close(out.double(), mixed.truth.out_QHD, rtol=0, atol=1e-5)
    row = 0
    for i, q_len in enumerate(mixed.batch.q_lens):
        batch = Batch((q_len,), (mixed.batch.kv_lens[i],), (mixed.batch.block_tables[i],), 16)
        alone = run(dispatcher, replace(mixed, batch=batch, q_THD=mixed.q_THD[row : row + q_len]))
        torch.testing.assert_close(out[row : row + q_len], alone, rtol=1e-6, atol=1e-6)
        row += q_len


def test_layers_with_a_window_get_plans_of_their_own() -> None:
    one = problem("q1s50_q20")
    windowed = replace(SPEC, window=(7, 0))
    out = run(Dispatcher(FALLBACK, [SPEC, windowed]), one, layers=2)
    alone = run(Dispatcher(FALLBACK, [windowed]), one)
    assert torch.equal(out, alone)
    assert not torch.allclose(out, run(Dispatcher(FALLBACK, [SPEC]), one), atol=1e-3)


@pytest.mark.parametrize("backend", [FLASH, MATH])
def test_confirmed_is_the_operator_that_ran(backend: str) -> None:
    one = Dispatcher(Policy(mode="pinned", preferred=(backend,)), [SPEC])
    run(one, problem("q1s50_q20_q7s60"))
    assert one.confirmed == dict.fromkeys(("prefill", "decode", "extend"), backend)
    record = {run.phase: run for run in one.last_step().phases}
    assert set(record) == {"prefill", "decode", "extend"}
    assert all((r.requested, r.resolved, r.confirmed) == (backend,) * 3 for r in record.values())
    assert record["decode"].bucket == "decode/kv<=64"
    assert all(r.num_members == 1 and r.layers == 1 and r.first_call_seconds for r in record.values())


def test_a_signature_is_confirmed_once_and_again_when_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = []
    real = dispatch.confirm.watch
    monkeypatch.setattr(
        dispatch.confirm, "watch", lambda call, device: (watched.append(1), real(call, device=device))[1]
    )
    dispatcher = Dispatcher(FALLBACK, [SPEC, SPEC])
    run(dispatcher, problem("q1s50"), layers=2)
    assert dispatcher.last_step().phases[0].first_call_seconds is not None
    run(dispatcher, problem("q1s60"), layers=2)
    assert len(watched) == 1, "the same bucket and backend"
    assert dispatcher.last_step().phases[0].confirmed == FLASH
    assert dispatcher.last_step().phases[0].first_call_seconds is None
    assert dispatcher.last_step().phases[0].kernel_seconds > 0
    run(dispatcher, problem("q1s70"), layers=2)
    assert len(watched) == 2
    monkeypatch.setattr(confirmations, "CONFIRMATION_TTL_S", 0.0)
    run(dispatcher, problem("q1s50"), layers=2)
    assert len(watched) == 3


class Liar:
    """Says flash and runs math."""

    name = FLASH

    def check(self, case: AttentionCase) -> list[Reason]:
        return []

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        return create(MATH).plan(batch, spec)


def test_a_backend_that_runs_another_kernel_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def lying(name: str, device: str) -> Backend:
        return Liar() if name == FLASH else create(name, device)

    monkeypatch.setattr(dispatch, "create", lying)
    events: list[FallbackEvent] = []
    one = Dispatcher(FALLBACK, [SPEC], on_event=events.append)
    run(one, problem("q1s50"))
    assert [(e.kind, e.phase, e.from_backend, e.to_backend) for e in events] == [
        ("backend_mismatch", "decode", FLASH, MATH)
    ]
    assert events[0].reason == "UNCONFIRMED"
    assert (one.resolved["decode"], one.confirmed["decode"]) == (FLASH, MATH)
    assert one.last_step().phases[0].confirmed == MATH


def test_a_request_that_the_backend_cannot_serve_falls_back_with_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, FLASH, longer_than_100)
    one = Dispatcher(FALLBACK, [SPEC])
    assert one.fallbacks == []
    run(one, problem("q1s50"))
    assert one.last_step().phases[0].fallback is None
    long = problem("q1s150")
    out = run(one, long)
    torch.testing.assert_close(out.double(), long.truth.out_QHD, rtol=0, atol=1e-5)
    (ran,) = one.last_step().phases
    assert (ran.requested, ran.resolved, ran.confirmed) == (FLASH, MATH, MATH)
    assert ran.fallback is not None
    assert (ran.fallback.kind, ran.fallback.from_backend, ran.fallback.to_backend, ran.fallback.reason) == (
        "request_fallback", FLASH, MATH, "NUMERIC_DRIFT",
    )  # fmt: skip


def test_who_falls_back_is_a_part_of_its_own_in_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, FLASH, longer_than_100)
    one = Dispatcher(FALLBACK, [SPEC], on_event=lambda event: pytest.fail(str(event)))
    mixed = problem("q1s50_q1s150_q1s60_q12_q1s220")
    out = run(one, mixed)
    torch.testing.assert_close(out.double(), mixed.truth.out_QHD, rtol=0, atol=1e-5)
    record = one.last_step()
    assert [(r.phase, r.resolved, r.confirmed, r.num_members) for r in record.phases] == [
        ("decode", FLASH, FLASH, 2), ("decode", MATH, MATH, 2), ("prefill", FLASH, FLASH, 1),
    ]  # fmt: skip
    assert [run.resolved for run in record.members] == [FLASH, MATH, FLASH, FLASH, MATH]
    run(one, mixed)
    assert all(run.kernel_seconds > 0 for run in one.last_step().phases), "each part has its own time"


def test_what_a_request_will_meet_is_known_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, FLASH, longer_than_100)
    one = Dispatcher(FALLBACK, [SPEC])
    assert one.foresee(0, 20, 60, chunk=16) is None
    assert one.foresee(0, 20, 100, chunk=16) is None
    for num_prompt, num_cached in ((20, 129), (150, 160), (130, 140)):
        event = one.foresee(0, num_prompt, num_cached, chunk=16)
        assert event is not None and (event.from_backend, event.to_backend) == (FLASH, MATH)
    with pytest.raises(UserError, match=r"can serve decode/kv<=256: .*NUMERIC_DRIFT"):
        one.foresee(0, 20, 150, chunk=16, avoid={MATH: drift()})
    forbids = Dispatcher(FALLBACK.model_copy(update={"allow_runtime_fallback": False}), [SPEC])
    with pytest.raises(UserError, match="forbids request-level fallback"):
        forbids.foresee(0, 20, 150, chunk=16)


def test_a_member_runs_on_nothing_that_it_is_to_avoid() -> None:
    one = Dispatcher(FALLBACK, [SPEC])
    mixed = problem("q1s50_q1s60")
    with torch.inference_mode():
        one.plan(mixed.batch, [{}, {FLASH: drift()}])
        out = one.run(0, mixed.q_THD, mixed.k, mixed.v)
    torch.testing.assert_close(out.double(), mixed.truth.out_QHD, rtol=0, atol=1e-5)
    assert [run.resolved for run in one.last_step().members] == [FLASH, MATH]
    run(one, problem("q1s60"))
    assert one.last_step().phases[0].resolved == FLASH, "only that member, and only then"


class Raises:
    """Refuses nothing, and then cannot run."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self._error = name, error

    def check(self, case: AttentionCase) -> list[Reason]:
        return []

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        raise self._error


def failing(error: Exception) -> Callable[[Backend], Backend]:
    return lambda backend: Raises(FLASH, error) if backend.name == FLASH else backend


def test_a_backend_that_raises_can_be_retired_and_the_next_of_the_chain_serves() -> None:
    events: list[FallbackEvent] = []
    one = Dispatcher(FALLBACK, [SPEC], wrap=failing(RuntimeError("no kernel image")), on_event=events.append)
    with pytest.raises(
        BackendFailedError, match=r"torch_sdpa:flash failed in decode: RuntimeError: no kernel"
    ) as caught:
        run(one, problem("q1s50"))
    one.retire(caught.value.backend, drift())
    assert [(e.kind, e.phase, e.from_backend, e.to_backend) for e in events] == [
        ("backend_failed", phase, FLASH, MATH) for phase in ("prefill", "decode", "extend")
    ]
    run(one, problem("q1s50"))
    (ran,) = one.last_step().phases
    assert (ran.requested, ran.resolved, ran.confirmed) == (FLASH, MATH, MATH)
    assert ran.fallback is not None and ran.fallback.reasons == (drift(),)
    assert one.resolved == dict.fromkeys(("prefill", "decode", "extend"), MATH)
    assert one.unserved() == {}
    one.retire(MATH, drift())
    assert set(one.unserved()) == {"prefill", "decode", "extend"}
    assert one.unserved()["decode"].count("NUMERIC_DRIFT") == 2
    with pytest.raises(UserError, match="no backend of the policy can serve"):
        one.plan(problem("q1s50").batch)


def test_without_leave_to_fall_back_a_retired_backend_leaves_nobody() -> None:
    events: list[FallbackEvent] = []
    policy = FALLBACK.model_copy(update={"allow_runtime_fallback": False})
    one = Dispatcher(policy, [SPEC], on_event=events.append)
    assert one.unserved() == {}
    one.retire(FLASH, drift())
    assert {event.to_backend for event in events} == {"none"}
    assert set(one.unserved()) == {"prefill", "decode", "extend"}
    assert one.unserved()["decode"].endswith("the policy forbids request-level fallback")
    assert set(one.resolved.values()) == {FLASH}


def test_memory_that_runs_out_is_not_the_backends_failure() -> None:
    one = Dispatcher(FALLBACK, [SPEC], wrap=failing(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        run(one, problem("q1s50"))


def test_an_idle_moment_asks_again_for_what_was_confirmed_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(confirmations.Confirmations.__init__, "__defaults__", (lambda: now[0],))
    asked: list[str] = []
    one = Dispatcher(FALLBACK, [SPEC], on_confirmation=lambda phase, added_s: asked.append(phase))
    long = problem("q1s150")
    for at, batch in ((0.0, "q1s50"), (1.0, "q20"), (2.0, "q1s150")):
        now[0] = at
        run(one, problem(batch))
    assert asked == ["decode", "prefill", "decode"]
    before = long.k.clone()
    assert not one.confirm_idle(long.k, long.v, age_s=5.0)
    now[0] = 6.5
    assert one.confirm_idle(long.k, long.v, age_s=5.0) and one.confirm_idle(long.k, long.v, age_s=5.0)
    assert not one.confirm_idle(long.k, long.v, age_s=5.0), "the third is not old"
    assert asked[3:] == ["decode", "prefill"]
    assert torch.equal(long.k.view(torch.int32), before.view(torch.int32)), "the cache is only read"
    now[0] = 5000.0
    one.plan(long.batch)
    assert one.last_step().phases[0].confirmed == confirmations.STALE


def test_a_mismatch_that_an_idle_moment_finds_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[FallbackEvent] = []
    one = Dispatcher(FALLBACK, [SPEC], on_event=events.append)
    long = problem("q1s150")
    run(one, long)
    assert one.mismatches == {}
    monkeypatch.setattr(one, "_backends", {FLASH: Liar()})
    assert one.confirm_idle(long.k, long.v, age_s=0.0)
    assert [(e.kind, e.from_backend, e.to_backend) for e in events] == [("backend_mismatch", FLASH, MATH)]
    assert list(one.mismatches.values()) == [MATH]


def test_a_request_falls_back_from_what_stood_in_at_start_too(monkeypatch: pytest.MonkeyPatch) -> None:
    other = "torch_sdpa:efficient"
    refuse(monkeypatch, MATH, lambda case: max(m.kv_len for m in case.members) > 100)
    monkeypatch.setattr(
        matrix,
        "declared_reasons",
        lambda name, case, *, device, real=matrix.declared_reasons: (
            [] if name == other else real(name, case, device="cpu")
        ),
    )
    policy = Policy(preferred=(FLASH,), fallback=(MATH, other), allow_runtime_fallback=True)
    one = Dispatcher(policy, [SPEC], observed={FLASH: [drift()]})
    assert one.resolved["decode"] == MATH
    one.plan(problem("q1s50").batch)
    assert one.last_step().phases[0].fallback is None
    monkeypatch.setattr(one, "_backend", lambda name: create(FLASH, "cpu"))
    one.plan(problem("q1s150").batch)
    fallback = one.last_step().phases[0].fallback
    assert fallback is not None
    assert (fallback.kind, fallback.from_backend, fallback.to_backend) == ("request_fallback", MATH, other)


def test_an_overrides_backend_that_cannot_run_is_a_startup_fallback_once() -> None:
    override = {"phase": "decode", "kv_len": [100, None], "preferred": [MATH]}
    policy = Policy.model_validate({"preferred": [FLASH], "overrides": [override]})
    events: list[FallbackEvent] = []
    one = Dispatcher(policy, [SPEC], observed={MATH: [drift()]}, on_event=events.append)
    assert [(f.kind, f.phase, f.from_backend, f.to_backend) for f in one.fallbacks] == [
        ("startup_fallback", "decode", MATH, FLASH)
    ]
    run(one, problem("q1s150"))
    assert events == []
    assert one.last_step().phases[0].resolved == FLASH


def test_a_policy_may_refuse_request_level_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, FLASH, lambda case: max(m.kv_len for m in case.members) > 100)
    one = Dispatcher(FALLBACK.model_copy(update={"allow_runtime_fallback": False}), [SPEC])
    run(one, problem("q1s50"))
    with pytest.raises(UserError, match="forbids request-level fallback for decode/kv<=256"):
        one.plan(problem("q1s150").batch)


def test_a_request_that_nobody_can_serve_is_refused_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, FLASH, lambda case: max(m.kv_len for m in case.members) > 100)
    one = Dispatcher(Policy(mode="pinned", preferred=(FLASH,)), [SPEC])
    with pytest.raises(UserError, match=r"(?s)can serve prefill/kv<=256.*NUMERIC_DRIFT"):
        one.plan(problem("q150").batch)


def test_an_override_that_begins_inside_a_bucket_holds_from_there_on_in_any_order() -> None:
    policy = FALLBACK.model_copy(
        update={
            "overrides": Policy.model_validate(
                {"preferred": [FLASH], "overrides": [{"phase": "decode", "kv_len": [100, None], "preferred": [MATH]}]}
            ).overrides
        }
    )
    one = Dispatcher(policy, [SPEC])
    for kv_len, expected in ((70, FLASH), (120, MATH), (70, FLASH), (99, FLASH), (100, MATH)):
        run(one, problem(f"q1s{kv_len}"))
        (ran,) = one.last_step().phases
        assert (ran.bucket, ran.resolved, ran.confirmed) == ("decode/kv<=128", expected, expected)
        assert ran.fallback is None


def test_a_drills_scale_reaches_every_layer() -> None:
    one = problem("q1s50")
    sound, wrong = (run(Dispatcher(FALLBACK, [SPEC], scale_factor=f), one) for f in (1.0, 1.05))
    assert not torch.allclose(sound, wrong, atol=1e-4)


def test_a_dispatcher_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        Dispatcher(FALLBACK, [])
