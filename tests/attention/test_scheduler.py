"""The scheduler: same answers in any company, no page lost, limits kept, failures contained."""

from __future__ import annotations

import random
import time

import pytest
import torch

from attention.cases import phase_of
from attention.dispatch import FallbackEvent, PhaseRun, StepRecord
from attention.errors import UserError
from attention.faults import SLOW_DECODE, check_fault, slow_decode_pause_s
from attention.limits import Limits
from attention.model import Chunk
from attention.sampling import SamplingParams
from attention.scheduler import Generation, QueueFullError, Scheduler
from tests.attention.fake_runner import FakeRunner, expected_tokens

SMALL = Limits(
    max_running=4, max_step_tokens=16, prefill_chunk=8, max_queue=64, max_output_tokens=64, prefix_reuse=False
)


def generation(
    prompt: list[int] | range,
    max_tokens: int = 6,
    request_id: str = "r",
    temperature: float = 0,
    shadow: bool = False,
) -> Generation:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    return Generation(request_id, tuple(prompt), params, shadow)


def run(scheduler: Scheduler, *generations: Generation) -> None:
    for one in generations:
        scheduler.submit(one)
    while scheduler.has_work:
        scheduler.step()


def random_prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def test_greedy_answers_are_those_of_the_model() -> None:
    runner = FakeRunner()
    one = generation(range(20), max_tokens=12)
    run(Scheduler(runner, SMALL), one)
    assert one.output_ids == expected_tokens(range(20), 12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_is_the_same_alone_and_among_others(temperature: float) -> None:
    prompts = random_prompts(1, 24)
    alone = [generation(p, 10, f"r{i}", temperature) for i, p in enumerate(prompts)]
    for one in alone:
        run(Scheduler(FakeRunner(), SMALL), one)
    together = [generation(p, 10, f"r{i}", temperature) for i, p in enumerate(prompts)]
    run(Scheduler(FakeRunner(), SMALL), *together)
    assert [g.output_ids for g in together] == [g.output_ids for g in alone]


def test_a_prompt_is_cut_at_the_same_places_alone_and_among_others() -> None:
    def pieces(*company: Generation) -> list[tuple[int, int]]:
        runner = FakeRunner()
        run(Scheduler(runner, SMALL), *company, generation(range(30), 2))
        chunks = [c for step in runner.steps for c in step]
        return [(c.start, len(c.token_ids)) for c in chunks if c.token_ids[0] == c.start < 30]

    crowd = [generation([200 + i] * 11, 9, f"c{i}") for i in range(3)]
    assert pieces() == pieces(*crowd) == [(0, 8), (8, 8), (16, 8), (24, 6)]


def test_a_step_stays_within_its_budget_and_decodes_are_not_held_up_by_prompts() -> None:
    runner = FakeRunner(num_pages=256)
    scheduler = Scheduler(runner, SMALL)
    first = generation([1], 30, "decoding")
    scheduler.submit(first)
    scheduler.step()
    for i in range(3):
        scheduler.submit(generation([i] * 40, 2, f"p{i}"))
    while scheduler.has_work:
        scheduler.step()
    for step in runner.steps:
        assert sum(len(c.token_ids) for c in step) <= SMALL.max_step_tokens
    # One token every step from the first to the last.
    last = next(i for i, s in enumerate(runner.steps) if s[0].start + 1 == 1 + len(first.output_ids) - 1)
    assert last == len(first.output_ids) - 1


@pytest.mark.parametrize("seed", range(20))
def test_no_page_is_lost_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    runner = FakeRunner(num_pages=rng.choice([12, 24, 64]), page_size=rng.choice([1, 4, 16]), max_context=48)
    reuse = seed % 2 == 0
    limits = Limits(rng.randint(1, 8), max_step_tokens=24, prefill_chunk=8, max_queue=1000, prefix_reuse=reuse)
    stem = [rng.randrange(256) for _ in range(20)]
    scheduler = Scheduler(runner, limits)
    runner.fail_steps = {rng.randrange(1, 60) for _ in range(rng.randrange(4))}
    free_at_start = runner.pool.num_free
    live: list[Generation] = []
    ended: list[Generation] = []
    for i in range(150):
        if rng.random() < 0.4 and i < 100:
            prompt = [*stem[: rng.choice([0, 0, 8, 20])], *(rng.randrange(256) for _ in range(rng.randint(1, 12)))]
            one = generation(prompt, rng.randint(1, 12), f"r{i}")
            try:
                scheduler.submit(one)
                live.append(one)
            except UserError:
                assert one.finish_reason is None
        if rng.random() < 0.1 and live:
            scheduler.cancel(rng.choice(live), "cancelled")
        if rng.random() < 0.02:
            scheduler.cancel_all("cancelled", "test")
        ended += scheduler.step().finished
        tables = [page for g in live for page in g.block_table]
        assert scheduler.num_free_pages + len(set(tables)) == free_at_start
        assert reuse or len(tables) == len(set(tables)), "two requests share a page"
    while scheduler.has_work:
        ended += scheduler.step().finished
    assert scheduler.num_free_pages == free_at_start
    assert reuse or sorted(runner.pool.alloc(free_at_start)) == list(range(free_at_start)), "a page was freed twice"
    assert len(ended) == len(set(map(id, ended))), "a request was reported twice"
    for one in live:
        assert one.finish_reason is not None
        if one.finish_reason in ("stop", "length"):
            assert one.output_ids == expected_tokens(one.prompt_ids, one.params.max_tokens)


def test_pages_never_run_out_midway_because_they_are_reserved_at_admission() -> None:
    runner = FakeRunner(num_pages=8, page_size=4)  # 32 tokens; each request needs up to 19
    scheduler = Scheduler(runner, SMALL)
    many = [generation([i] * 8, 12, f"r{i}") for i in range(6)]
    run(scheduler, *many)
    assert all(g.finish_reason in ("stop", "length") for g in many)
    assert max(len(step) for step in runner.steps) == 1


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    scheduler = Scheduler(FakeRunner(num_pages=8, page_size=4), SMALL)
    small, large, late = (
        generation([1] * 4, 5, "s"),
        generation([2] * 20, 12, "l"),
        generation([3], 1, "late"),
    )
    run(scheduler, small, large, late)
    assert small.admitted is not None
    assert large.admitted is not None
    assert late.admitted is not None
    assert small.admitted < large.admitted <= late.admitted


def test_a_request_that_can_never_get_its_pages_fails_instead_of_waiting_for_ever() -> None:
    runner = FakeRunner(num_pages=8, page_size=4)
    scheduler = Scheduler(runner, SMALL)
    runner.pool.alloc(6)  # someone else's
    one = generation([1] * 20, 8)
    scheduler.submit(one)
    assert scheduler.step().finished == [one]
    assert "6 cache pages" in (one.error or "") or "7 cache pages" in (one.error or "")


def test_what_could_never_run_is_refused_with_figures() -> None:
    scheduler = Scheduler(FakeRunner(max_context=128, num_pages=16, page_size=4), SMALL)
    for num_prompt, max_tokens, figures in (
        (0, 1, "no tokens"),
        (128, 1, "128 tokens, the context 128"),
        (120, 9, "at most 8"),
        (10, 65, "bound of 64"),
        (60, 20, "need 20 pages of 4 tokens, the cache has 16"),
    ):
        with pytest.raises(UserError, match=figures):
            scheduler.check(num_prompt, max_tokens)
    assert scheduler.largest_answer(10) == 55  # 16 pages of 4 hold 10 and 54 of 55: the last is not fed back
    scheduler.check(10, 55)


def test_the_queue_is_bounded() -> None:
    scheduler = Scheduler(FakeRunner(), Limits(max_running=1, max_step_tokens=16, prefill_chunk=8, max_queue=2))
    scheduler.submit(generation([1]))
    scheduler.submit(generation([2]))
    with pytest.raises(QueueFullError, match="2 requests wait"):
        scheduler.submit(generation([3]))


def test_the_end_token_ends_an_answer_with_stop_and_the_bound_with_length() -> None:
    first = expected_tokens([5, 6], 3, frozenset())
    stopped, bounded = generation([5, 6], 3), generation([5, 6], 3)
    run(Scheduler(FakeRunner(eos_token_ids=frozenset({first[1]})), SMALL), stopped)
    run(Scheduler(FakeRunner(eos_token_ids=frozenset()), SMALL), bounded)
    assert (stopped.finish_reason, stopped.output_ids) == ("stop", first[:2])
    assert (bounded.finish_reason, bounded.output_ids) == ("length", first)


def test_a_failing_step_fails_its_requests_alone_and_says_no_detail_of_the_device() -> None:
    runner = FakeRunner()
    runner.fail_steps = {2}
    scheduler = Scheduler(runner, SMALL)
    hit = [generation([1], 5, "a"), generation([2], 5, "b")]
    for one in hit:
        scheduler.submit(one)
    scheduler.step()
    result = scheduler.step()
    assert result.finished == hit
    assert "illegal memory access" in str(result.failure)
    assert {g.error for g in hit} == {"the model step failed: RuntimeError"}
    assert runner.pool.num_free == 64
    later = generation(range(9))
    run(scheduler, later)
    assert later.output_ids == expected_tokens(range(9), 6)


def test_logits_with_nan_fail_their_request_and_no_other() -> None:
    runner = FakeRunner()
    runner.nan_for_prompt = (9, 9)
    bad, good = generation([9, 9], 5), generation([1, 2], 5)
    run(Scheduler(runner, SMALL), bad, good)
    assert bad.finish_reason == "error"
    assert "output token 0 hold NaN or Inf" in (bad.error or "")
    assert bad.num_nonfinite == 1
    assert good.output_ids == expected_tokens([1, 2], 5)
    assert runner.pool.num_free == 64


def test_times_and_batch_sizes_are_booked() -> None:
    runner = FakeRunner(seconds=0.01, eos_token_ids=frozenset())
    one, two = generation([1], 5), generation([2], 5)
    run(Scheduler(runner, SMALL), one, two)
    assert one.queue_s is not None
    assert one.ttft_s is not None
    assert one.tpot_s is not None
    assert 0 <= one.queue_s < one.ttft_s
    assert 0.01 <= one.tpot_s < 0.05
    assert one.batch_size_mean == 2
    assert one.confirmed == {"prefill": "torch_sdpa:math", "decode": "torch_sdpa:math"}


def test_one_output_token_has_no_time_between_tokens_and_no_decode_backend() -> None:
    one = generation([1, 2], 1)
    run(Scheduler(FakeRunner(), SMALL), one)
    assert one.tpot_s is None
    assert set(one.confirmed) == {"prefill"}


def test_a_fallback_of_a_step_is_noted_on_its_requests() -> None:
    runner = FakeRunner()
    runner.dispatcher.step_fallback = FallbackEvent("request_fallback", "decode", "a:x", "b:y", ())
    one = generation([1, 2], 3)
    run(Scheduler(runner, SMALL), one)
    assert one.fallback_reasons == ["UNCONFIRMED"]


def test_slow_decode_slows_live_decodes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("attention.scheduler.time.sleep", slept.append)
    run(
        Scheduler(FakeRunner(), SMALL, fault=SLOW_DECODE),
        generation([1, 2, 3], 1),
        generation([4], 6, shadow=True),
    )
    assert slept == []
    live = generation(range(12), 4)
    run(Scheduler(FakeRunner(), SMALL, fault=SLOW_DECODE), live)
    assert len(slept) == len(live.output_ids) - 1
    assert min(slept) >= 0.060
    assert live.output_ids == expected_tokens(range(12), 4), "slow, not wrong"
    assert slow_decode_pause_s(0.1) == pytest.approx(0.3)


def test_an_unknown_fault_is_refused_with_the_nearest_names() -> None:
    assert check_fault(None) is None
    with pytest.raises(UserError, match="did you mean slow_decode"):
        check_fault("slow_decod")


def test_limits_that_would_starve_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="starve"):
        Limits(max_running=8, max_step_tokens=10, prefill_chunk=8)


def test_phases_of_chunks_are_those_of_the_cases() -> None:
    runner = FakeRunner(eos_token_ids=frozenset())
    run(Scheduler(runner, SMALL), generation(range(12), 3))
    phases = [phase_of(len(c.token_ids), c.start + len(c.token_ids)) for step in runner.steps for c in step]
    assert phases == ["prefill", "extend", "decode", "decode"]


def test_the_scheduler_costs_less_than_0_3_ms_a_step_of_8_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(num_pages=2048, page_size=16, max_context=8192, eos_token_ids=frozenset())
    hidden, logits = torch.zeros(8, 1), torch.rand(8, 300)
    ran = PhaseRun("decode", "decode/kv<=64", "a:x", "a:x", "a:x", 8)

    def forward(chunks: list[Chunk], rows: str) -> torch.Tensor:
        runner.dispatcher.record = StepRecord([ran], [ran] * len(chunks))
        return hidden[: len(chunks)]

    monkeypatch.setattr(runner, "forward", forward)
    monkeypatch.setattr(runner, "logits", lambda hidden: logits[: len(hidden)])
    scheduler = Scheduler(runner, Limits())
    for i in range(8):
        scheduler.submit(generation(range(40), 400, f"r{i}"))
    scheduler.step()
    seconds = []
    for _ in range(300):
        started = time.process_time()
        scheduler.step()
        seconds.append(time.process_time() - started)
    # Processor seconds of the quicker quarter: others share this machine's cores.
    assert sorted(seconds)[len(seconds) // 4] < 0.3e-3
