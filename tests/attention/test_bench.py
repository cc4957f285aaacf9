"""The bench worker: it times what it is asked, says what ran, and answers a bad command with its error."""

from __future__ import annotations

import io
import json
from statistics import median
from typing import Any

import pytest

from attention import bench
from attention.cases import AttentionCase
from attention.job import BenchCommand, BenchJob, Setup
from attention.startup import identify
from attention.timing import MOST_CALLS


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
        command("kernel_s", case(), 0.005),
        command("kernel_s", case()),
        command("kernel_s", case("prefill", "q40")),
    )
    resolved = dict.fromkeys(("prefill", "decode", "extend"), "torch_sdpa:flash")
    expected = {"ready": True, "resolved": resolved, "fingerprint_id": identify(setup).id, "device_name": "cpu"}
    assert ready == expected
    assert len(first["seconds"]) == MOST_CALLS or sum(first["seconds"]) >= 0.005
    assert first["first_call_s"] > 0
    assert first["peak_bytes"] > 50e6
    assert second["first_call_s"] is None, "the first call is told once a case"
    assert other["first_call_s"] > 0
    assert {a["confirmed"] for a in (first, second, other)} == {"torch_sdpa:flash"}
    assert {(a["outcome"], a["error"]) for a in (first, second, other)} == {("measured", None)}


def test_a_backend_may_be_named_and_slowed(setup: Setup) -> None:
    named = BenchCommand(metric="kernel_s", case=case("prefill", "q300"), min_s=0.02, backend="torch_sdpa:math")
    slowed = named.model_copy(update={"slowdown": 4.0})
    _, plain, slow = ask(setup, named.model_dump_json(), slowed.model_dump_json())
    assert plain["confirmed"] == slow["confirmed"] == "torch_sdpa:math"
    assert median(slow["seconds"]) > 2 * median(plain["seconds"])


def test_ceilings_are_measured_beside_a_case_that_stays(setup: Setup) -> None:
    _, first, matmul, read, again = ask(
        setup,
        command("kernel_s", case()),
        command("matmul_s", case()),
        command("read_s", case()),
        command("kernel_s", case()),
    )
    assert matmul["work"] == 2 * 512**3
    assert read["work"] >= case().num_bytes()
    assert first["first_call_s"] is not None
    assert again["first_call_s"] is None, "the ceilings do not evict the case"


def test_a_model_step_is_a_prefill_or_a_decode_of_the_whole_model_and_gives_its_pages_back(setup: Setup) -> None:
    steps = [command("ttft_s", case("prefill", "q40")), command("tpot_s", case("decode", "q1s20_q1s40"))]
    small = setup.model_copy(update={"num_pages": 6})
    _, *answers = ask(small, *steps, *steps, with_model=True)
    assert [(a["error"], a["confirmed"]) for a in answers] == [(None, "torch_sdpa:flash")] * 4
    assert min(second for a in answers for second in a["seconds"]) > 0


def test_a_command_that_fails_is_answered_and_the_next_one_runs(setup: Setup) -> None:
    refused = BenchCommand(metric="kernel_s", case=case(), min_s=0.01, backend="flash_attn:fa2").model_dump_json()
    _, garbled, missing, left_out, sound = ask(
        setup, "{not json", command("ttft_s", case("prefill", "q40")), refused, command("kernel_s", case())
    )
    assert garbled["error"].startswith("not a command")
    assert "set with_model in the job" in missing["error"]
    assert (missing["seconds"], missing["outcome"]) == ([], "failed")
    assert (left_out["seconds"], left_out["outcome"]) == ([], "refused")
    assert sound["error"] is None
    assert sound["seconds"]


def test_a_lost_device_ends_the_worker(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(bench, "prepare", lost)
    answers = ask(setup, command("kernel_s", case()), command("kernel_s", case()))
    assert [a["outcome"] for a in answers[1:]] == ["illegal_access"]


def test_a_step_that_needs_more_pages_than_there_are_says_so(setup: Setup) -> None:
    small = setup.model_copy(update={"num_pages": 4})
    _, refused, sound = ask(
        small, command("ttft_s", case("prefill", "q100")), command("ttft_s", case("prefill", "q40")), with_model=True
    )
    assert "OutOfPages" in refused["error"]
    assert sound["error"] is None
