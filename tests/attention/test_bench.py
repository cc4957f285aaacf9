"""The bench worker: it times what it is asked, says what ran, and answers a bad command with its error."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest

from attention import bench
from attention.cases import AttentionCase
from attention.job import BenchCommand, BenchJob, Setup
from attention.startup import identify


def case(phase: str = "decode", batch: str = "2q1s40") -> AttentionCase:
    return AttentionCase(
        phase=phase, batch=batch, heads_q=4, heads_kv=2, head_dim_qk=16, head_dim_vo=16, dtype="float32"
    )


def command(metric: str, one: AttentionCase, min_s: float = 0.01) -> str:
    return BenchCommand(metric=metric, case=one, min_s=min_s).model_dump_json()


def ask(setup: Setup, *lines: str, with_model: bool = False) -> list[dict[str, Any]]:
    sink = io.StringIO()
    bench.serve(BenchJob(setup=setup, with_model=with_model), io.StringIO("\n".join(lines) + "\n"), sink)
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def test_a_kernel_is_timed_for_as_long_as_asked_and_confirmed(setup: Setup) -> None:
    ready, first, second, other = ask(
        setup,
        command("kernel_s", case(), 0.05),
        command("kernel_s", case()),
        command("kernel_s", case("prefill", "q40")),
    )
    resolved = dict.fromkeys(("prefill", "decode", "extend"), "torch_sdpa:flash")
    assert ready == {"ready": True, "resolved": resolved, "fingerprint_id": identify(setup).id}
    assert first["seconds"] * first["calls"] == pytest.approx(0.05, rel=1.0)
    assert first["seconds"] * first["calls"] >= 0.05
    assert first["calls"] > 1
    assert first["first_call_s"] > 0
    assert second["first_call_s"] is None, "the first call is told once a case"
    assert other["first_call_s"] > 0
    assert {a["confirmed"] for a in (first, second, other)} == {"torch_sdpa:flash"}
    assert {a["error"] for a in (first, second, other)} == {None}


def test_a_model_step_is_a_prefill_or_a_decode_of_the_whole_model(setup: Setup) -> None:
    _, ttft, tpot = ask(
        setup,
        command("ttft_s", case("prefill", "q40")),
        command("tpot_s", case("decode", "q1s20_q1s40")),
        with_model=True,
    )
    assert [(a["error"], a["confirmed"]) for a in (ttft, tpot)] == [(None, "torch_sdpa:flash")] * 2
    assert min(ttft["seconds"], tpot["seconds"]) > 0


def test_a_command_that_fails_is_answered_and_the_next_one_runs(setup: Setup) -> None:
    _, garbled, missing, sound = ask(
        setup,
        "{not json",
        command("ttft_s", case("prefill", "q40")),
        command("kernel_s", case()),
    )
    assert garbled["error"].startswith("ValidationError")
    assert "set with_model in the job" in missing["error"]
    assert missing["calls"] == 0
    assert missing["seconds"] is None or math.isnan(missing["seconds"])
    assert sound["error"] is None
    assert sound["calls"] > 0


def test_a_step_that_needs_more_pages_than_there_are_says_so(setup: Setup) -> None:
    small = setup.model_copy(update={"num_pages": 4})
    _, refused, sound = ask(
        small, command("ttft_s", case("prefill", "q100")), command("ttft_s", case("prefill", "q40")), with_model=True
    )
    assert "OutOfPages" in refused["error"]
    assert sound["error"] is None
