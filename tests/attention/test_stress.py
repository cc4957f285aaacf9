"""Load on the real scheduler: saturation of a full batch, open-loop arrivals, goodput, and an end to every level."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from attention.__main__ import main
from attention.dispatch import FallbackEvent
from attention.errors import UserError
from attention.job import Setup, StressJob
from attention.limits import Limits
from attention.sampling import SamplingParams
from attention.scheduler import Generation
from attention.schemas import SCHEMAS
from attention.startup import identify
from attention.stress import (
    Arrival,
    Played,
    bounded,
    burst,
    fitting,
    play,
    poisson,
    run,
    saturation_per_s,
    summary,
    told,
)
from tests.attention.fake_runner import FakeRunner

LIMITS = Limits(max_running=2, max_step_tokens=16, prefill_chunk=8, max_queue=64, max_output_tokens=64)
LENGTHS = [(6, 5, 1.0)]


def job(**changed: Any) -> StressJob:
    fields = {
        "setup": Setup(model=Path("m"), policy=Path("p")),
        "lengths": LENGTHS,
        "max_running": 2,
        "saturation_requests": 8,
        "levels": (0.5, 1.2),
        "duration_s": 1.0,
        "slo_ttft_s": 0.5,
        "slo_tpot_s": 0.1,
    }
    return StressJob(**{**fields, **changed})


def fake(**changed: Any) -> Any:
    """A runner without a model, whose answers no token ends."""
    return FakeRunner(eos_token_ids=frozenset(), **changed)


def arrivals(*times: float, num_output: int = 5) -> list[Arrival]:
    return [Arrival(at_s, tuple(range(n, n + 6)), num_output) for n, at_s in enumerate(times)]


def row_of(played: Played, offered: list[Arrival], runner: Any, **changed: Any) -> dict[str, Any]:
    return summary(job(**changed), offered, played, runner)


def ended(finished: float, admitted: float = 0.0, reason: Any = "length") -> Generation:
    one = Generation("r", (1,), SamplingParams(max_tokens=2, temperature=0), submitted=0.0)
    one.admitted, one.finished, one.finish_reason = admitted, finished, reason
    return one


def test_the_verb_measures_a_real_model_and_its_rows_are_columns_of_the_lake(
    setup: Setup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = job(setup=setup, duration_s=0.3, lengths=[(40, 4, 2.0), (12, 6, 1.0), (5000, 4, 1.0)])
    (tmp_path / "job.json").write_text(one.model_dump_json())
    assert main(["bench", "stress", "--job", str(tmp_path / "job.json"), "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert found["fingerprint_id"] == identify(setup).id, "the bound that is varied is a column, not an environment"
    assert found["saturation_per_s"] > 0
    assert found["left_out"] == pytest.approx(0.25)
    assert [row["level"] for row in found["levels"]] == [0.5, 1.2]
    for row in found["levels"]:
        assert row.keys() <= set(SCHEMAS["perf_stress"].names)
        assert (
            row["num_completed"] == row["num_offered"] == max(1, round(row["level"] * found["saturation_per_s"] * 0.3))
        )
        assert row["num_failed"] == row["num_refused"] == row["num_preempted"] == row["num_fallbacks"] == 0
        assert 0 < row["ttft_p50_s"] <= row["ttft_p95_s"] <= row["ttft_p99_s"]
        assert 0 < row["kv_peak_share"] < 1
        assert 0 < row["running_mean"] <= 2
        assert row["output_tokens_per_s"] > 0
        assert told(row) in capsys.readouterr().err or row["level"] == 1.2


def test_weights_may_be_drawn_where_the_folder_holds_none(
    setup: Setup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "tiny-llama"
    bare.mkdir()
    for file in setup.model.iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    one = job(setup=setup.model_copy(update={"model": bare}), duration_s=0.05, levels=(1.0,), random_weights=True)
    (tmp_path / "job.json").write_text(one.model_dump_json())
    assert main(["bench", "stress", "--job", str(tmp_path / "job.json"), "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert found["levels"][0]["num_failed"] == 0
    assert "100%" in capsys.readouterr().err


def test_no_token_ends_an_answer_so_that_it_has_the_length_that_was_drawn(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attention.model._eos", lambda *of: frozenset(range(20_000)))
    [row] = run(job(setup=setup, duration_s=0.05, levels=(1.0,)), lambda line: None)["levels"]
    assert row["num_completed"] == row["num_offered"]
    assert row["tpot_p50_s"] > 0, "five tokens each, though any could have been the last"


def test_a_burst_too_small_for_its_concurrency_is_refused_with_the_least_that_would_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match="give 8 or more, four times max_running"):
        job(saturation_requests=7)
    document = {**json.loads(job().model_dump_json()), "saturation_requests": 7}
    (tmp_path / "job.json").write_text(json.dumps(document))
    assert main(["bench", "stress", "--job", str(tmp_path / "job.json"), "--out", str(tmp_path)]) == 2
    assert "saturation_requests: Value error, give 8 or more" in capsys.readouterr().err


def test_both_sides_of_a_seed_meet_the_same_requests_at_the_same_times() -> None:
    mix = [(6, 5, 1.0), (20, 3, 3.0)]
    first, again, other = (poisson(fake(), mix, 50.0, 4.0, (seed, 2)) for seed in (0, 0, 1))
    assert first == again != other
    assert len(first) == 200, "the offered rate is exact"
    times = [one.at_s for one in first]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] <= 4.0
    long = sum(len(one.prompt_ids) == 20 for one in first) / len(first)
    assert long == pytest.approx(0.75, abs=0.1), "as often as it counts"
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread == pytest.approx(mean, rel=0.2), "gaps of a Poisson process scatter as much as they last"


def test_who_fits_no_instance_is_left_out_and_a_mix_of_such_alone_is_refused() -> None:
    fit, left_out = fitting(fake(max_context=32), LIMITS, [(6, 5, 3.0), (200, 5, 1.0)])
    assert (fit, left_out) == ([(6, 5, 3.0)], 0.25)
    with pytest.raises(UserError, match="no request of the mix fits this instance: the prompt has 200 tokens"):
        fitting(fake(max_context=32), LIMITS, [(200, 5, 1.0)])


def test_a_bound_that_a_step_does_not_hold_gets_a_larger_step() -> None:
    assert bounded(Limits(), 8) == Limits(max_running=8, prefix_reuse=False)
    assert bounded(Limits(), 256).max_step_tokens == 256 + Limits().prefill_chunk


def test_saturation_counts_what_a_full_batch_completes_and_neither_its_filling_nor_its_emptying() -> None:
    # Two run at a time; after a slow start one ends every half second; the last is admitted at 7, ends late.
    steady = [ended(5.0 + 0.5 * n, admitted=4.5 + 0.5 * n) for n in range(6)]
    found = saturation_per_s([ended(4.0), ended(4.9), *steady, ended(30.0, admitted=7.0)], max_running=2)
    assert found == pytest.approx(5 / 2.1), "after 4.9 up to 7.0: five"


def test_saturation_of_requests_that_failed_or_never_filled_a_batch_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="1 of 2 requests failed"):
        saturation_per_s([ended(1.0), ended(2.0, reason="error")], 1)
    with pytest.raises(RuntimeError, match="never fill a batch of 2; offer more"):
        saturation_per_s([ended(1.0), ended(2.0)], 2)


def test_saturation_of_the_real_scheduler_is_what_its_steps_allow() -> None:
    runner = fake(seconds=0.004)
    played = play(runner, LIMITS, burst(runner, LENGTHS, 24, (0, 1)))
    # Five steps a request (the first gives a token), two at a time.
    at_best = 2 / (5 * 0.004)
    assert 0.4 * at_best < saturation_per_s(played.generations, 2) <= at_best, "a sleep lasts that long at least"


def test_arrivals_do_not_wait_for_a_slow_instance_and_their_wait_counts_from_their_time() -> None:
    runner = fake(seconds=0.02)
    offered = arrivals(*(0.01 * n for n in range(8)))
    played = play(runner, LIMITS, offered)
    started = played.generations[0].submitted
    assert [round(one.submitted - started, 6) for one in played.generations] == [round(a.at_s, 6) for a in offered]
    waits = [one.ttft_s or 0.0 for one in played.generations]
    assert waits[-1] > waits[0] + 0.15, "the queue is seen, since nobody slowed down for it"
    row = row_of(played, offered, runner, slo_ttft_s=0.2)
    assert 0 < row["num_good"] < row["num_completed"] == 8
    assert row["goodput_per_s"] == row["num_good"] / 1.0


def test_an_idle_instance_waits_for_the_next_arrival() -> None:
    runner = fake()
    played = play(runner, LIMITS, arrivals(0.0, 0.3))
    assert played.elapsed_s >= 0.3
    assert max(one.ttft_s or 9.0 for one in played.generations) < 0.25
    assert runner.num_steps == 10, "no step without work"
    assert played.running_s / played.elapsed_s < 0.5, "idle seconds count as none running"


def test_a_level_ends_and_who_is_unfinished_then_is_not_good_but_stays_in_the_tail() -> None:
    runner = fake(seconds=0.02)
    offered = arrivals(*([0.0] * 6), num_output=40)
    began = time.perf_counter()
    played = play(runner, LIMITS, offered, drain_s=0.3)
    assert time.perf_counter() - began < 1.5, "120 steps of 20 ms would take longer"
    assert {one.finish_reason for one in played.generations} == {"cancelled"}
    assert runner.pool.num_free == runner.pool.num_pages
    row = row_of(played, offered, runner)
    assert (row["num_completed"], row["num_good"], row["num_failed"]) == (0, 0, 0)
    assert row["ttft_p99_s"] >= 0.28, "who never got a token has waited so long at least"


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "good"), [(0.5, 0.1, 1), (0.51, 0.1, 0), (0.5, 0.11, 0), (0.5, None, 1), (None, None, 0)]
)
def test_good_is_what_completed_within_both_objectives(ttft_s: float | None, tpot_s: float | None, good: int) -> None:
    one = ended(9.0)
    if ttft_s is not None:
        one.first_token, one.last_token, one.output_ids = ttft_s, ttft_s, [1]
        if tpot_s is not None:
            one.last_token, one.output_ids = ttft_s + 2 * tpot_s, [1, 2, 3]
    played = Played([one], elapsed_s=1.0)
    assert row_of(played, arrivals(0.0), fake(), slo_tpot_s=0.1 + 1e-9)["num_good"] == good


def test_refused_failed_and_memory_are_counted_apart_and_the_others_go_on() -> None:
    runner = fake()
    runner.fail_steps = {3}
    full = Limits(max_running=2, max_step_tokens=16, prefill_chunk=8, max_queue=4, max_output_tokens=64)
    offered = arrivals(*([0.0] * 6))
    row = row_of(play(runner, full, offered), offered, runner)
    assert (row["num_offered"], row["num_refused"], row["num_failed"], row["num_completed"]) == (6, 2, 2, 2)
    assert row["num_out_of_memory"] == 0


def test_a_step_without_memory_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = fake()

    def full(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(runner, "forward", full)
    offered = arrivals(0.0)
    row = row_of(play(runner, LIMITS, offered), offered, runner)
    assert (row["num_failed"], row["num_out_of_memory"]) == (1, 1)
    assert (row["ttft_p50_s"], row["tpot_p99_s"]) == (None, None), "a percentile of nothing is none"
    assert "TTFT p95 nan s" in told({"max_running": 2, "level": 1.0, **row})


def test_pages_are_counted_at_their_peak_within_a_step() -> None:
    runner = fake(num_pages=16, page_size=4)
    offered = arrivals(0.0, num_output=4)
    row = row_of(play(runner, LIMITS, offered), offered, runner)
    assert row["kv_peak_share"] == 3 / 16, "the last step caches token 9 on a third page, and frees all three"


def test_requests_that_fell_back_are_counted() -> None:
    runner = fake()
    runner.dispatcher.step_fallback = FallbackEvent("request_fallback", "decode", "a", "b", ())
    offered = arrivals(0.0, 0.0)
    assert row_of(play(runner, LIMITS, offered), offered, runner)["num_fallbacks"] == 2
