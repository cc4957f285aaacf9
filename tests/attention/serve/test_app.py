"""The HTTP side of an instance: what OpenAI clients, routers and people on call see."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from attention.faults import SLOW_DECODE
from attention.limits import Limits
from attention.serve.app import is_shadow
from tests.attention.fake_runner import EOS, FakeRunner, expected_tokens
from tests.attention.serve.fake_instance import INSTANCE, Running, serving

MAX_BODY_BYTES = Limits().max_body_bytes
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0}
PLAIN = {"prompt": "hello", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("lake"), FakeRunner(num_pages=512, eos_token_ids=frozenset())) as running:
        yield running


def text_of(ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def answer_of(text: str, max_tokens: int) -> str:
    return text_of(expected_tokens(text.encode(), max_tokens, frozenset()))


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion_answers_in_openai_form(shared: Running) -> None:
    response = shared.post("/v1/completions", PLAIN)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "logprobs": None, "finish_reason": "length", "text": answer_of("hello", 8)}]
    assert body["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert body["model"] == "fake-1m"
    assert body["system_fingerprint"] == "f1f2f3"


def test_a_chat_goes_through_the_chat_template(shared: Running) -> None:
    body = shared.post("/v1/chat/completions", CHAT).json()
    assert body["object"] == "chat.completion"
    message = body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": answer_of("<user>hello\n<assistant>", 5)}


def test_a_developer_is_a_system(shared: Running) -> None:
    def answer(role: str) -> Any:
        messages = [{"role": role, "content": "be brief"}, *CHAT["messages"]]
        return shared.post("/v1/chat/completions", {**CHAT, "messages": messages}).json()["choices"]

    assert answer("developer") == answer("system")


def test_content_in_parts_is_joined_and_a_prompt_may_be_tokens(shared: Running) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    in_parts = shared.post("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": parts}]})
    assert in_parts.json()["choices"] == shared.post("/v1/chat/completions", CHAT).json()["choices"]
    tokens = shared.post("/v1/completions", {**PLAIN, "prompt": list(b"hello")})
    one_in_a_list = shared.post("/v1/completions", {**PLAIN, "prompt": ["hello"]})
    text = answer_of("hello", 8)
    assert tokens.json()["choices"][0]["text"] == one_in_a_list.json()["choices"][0]["text"] == text


def test_a_chat_without_max_tokens_may_fill_the_context(shared: Running) -> None:
    body = shared.post("/v1/chat/completions", {"messages": CHAT["messages"], "temperature": 0}).json()
    assert body["usage"]["total_tokens"] == 128


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_says_the_same_as_the_whole_answer(shared: Running, path: str) -> None:
    body = {**(CHAT if "chat" in path else PLAIN), "max_tokens": 40}
    whole = shared.post(path, body).json()
    with shared.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response)
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    if "chat" in path:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["choices"][0]["message"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]


def test_a_stream_leaves_the_usage_out_on_request(shared: Running) -> None:
    body = {**PLAIN, "stream": True, "stream_options": {"include_usage": False}}
    with shared.client.stream("POST", "/v1/completions", json=body) as response:
        assert all("usage" not in chunk for chunk in events(response))


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_a_stop_string_and_generation_ends_with_it(shared: Running, stream: bool) -> None:
    text = answer_of("hello", 60)
    stop = text[20:23]
    body = {**PLAIN, "max_tokens": 60, "stop": ["never there", stop], "stream": stream}
    with shared.client.stream("POST", "/v1/completions", json=body) as response:
        if stream:
            chunks = events(response)
            got = "".join(c["choices"][0]["text"] for c in chunks[:-1])
            reason, usage = chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]
        else:
            response.read()
            choice, usage = response.json()["choices"][0], response.json()["usage"]
            got, reason = choice["text"], choice["finish_reason"]
    assert got == text[: text.index(stop)]
    assert reason == "stop"
    assert usage["completion_tokens"] < 60


def test_the_end_token_ends_an_answer_and_is_not_in_its_text(tmp_path: Path) -> None:
    first = expected_tokens(b"hello", 8, frozenset())
    with serving(tmp_path, FakeRunner(eos_token_ids=frozenset({EOS, first[3]}))) as running:
        choice = running.post("/v1/completions", PLAIN).json()["choices"][0]
        assert choice["finish_reason"] == "stop"


def test_a_seed_repeats_a_sampled_answer(shared: Running) -> None:
    def sample(seed: int) -> str:
        body = {"prompt": "hello", "max_tokens": 30, "temperature": 1.5, "top_p": 0.9, "seed": seed}
        return str(shared.post("/v1/completions", body).json()["choices"][0]["text"])

    assert sample(1) == sample(1) != sample(2)


def test_requests_at_the_same_time_get_the_answers_they_get_alone(shared: Running) -> None:
    prompts = [f"prompt {i} " * (1 + i % 3) for i in range(16)]
    got: dict[str, str] = {}

    def ask(prompt: str) -> None:
        response = shared.post("/v1/completions", {**PLAIN, "prompt": prompt, "max_tokens": 20})
        got[prompt] = response.json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {prompt: answer_of(prompt, 20) for prompt in prompts}


def test_every_response_says_who_served_it(shared: Running) -> None:
    for response in (
        shared.post("/v1/completions", PLAIN, x_request_id="id-7"),
        shared.client.post("/v1/completions", content=b"{", headers={"x-request-id": "id-7"}),
        shared.client.get("/no/such/path", headers={"x-request-id": "id-7"}),
    ):
        assert response.headers["x-request-id"] == "id-7"
        assert response.headers["x-attention-release"] == "r-1"
        assert response.headers["x-attention-fingerprint"] == "f1f2f3"
        assert response.headers["x-attention-instance"] == "candidate-1"
        assert response.headers["x-attention-backend"] == "prefill=torch_sdpa:math,decode=torch_sdpa:math"


def test_a_request_id_that_is_missing_or_strange_is_replaced(shared: Running) -> None:
    for sent in ({}, {"x-request-id": "a b"}, {"x-request-id": "x" * 500}):
        response = shared.client.post("/v1/completions", json=PLAIN, headers=sent)
        assert len(response.headers["x-request-id"]) == 32


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 2}, "n", "n=2 is not supported"),
    ({"logprobs": 6}, "logprobs", "less than or equal to 5"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs=2"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "whole answers only"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty", "leave it out or send 0"),
    ({"frequency_penalty": -1}, "frequency_penalty", "would change the result"),
    ({"best_of": 3}, "best_of", "best_of"),
    ({"echo": 1}, "echo", "valid boolean"),
    ({"suffix": "x"}, "suffix", "suffix"),
    ({"max_token": 3}, "max_token", "did you mean max_tokens"),
    ({"temperature": 3}, "temperature", "less than or equal to 2"),
    ({"top_p": -1}, "top_p", "greater than or equal to 0"),
    ({"max_tokens": 0}, "max_tokens", "send at least 1, or echo or prompt_logprobs"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": True}, "max_tokens", "valid integer"),
    ({"max_tokens": "4"}, "max_tokens", "valid integer"),
    ({"max_tokens": 4.0}, "max_tokens", "valid integer"),
    ({"temperature": "0"}, "temperature", "valid number"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"seed": True}, "seed", "valid integer"),
    ({"seed": 2**70}, "seed", ""),
    ({"prompt": None}, "prompt", ""),
    ({"prompt": {"a": 1}}, "prompt", ""),
    ({"prompt": ["a", "b"]}, "prompt", "2 prompts"),
    ({"prompt": [1, 300]}, "prompt", "token 300 is outside the vocabulary 0..299"),
    ({"prompt": [-1]}, "prompt", "token -1"),
    ({"prompt": ""}, "", "no tokens"),
    ({"prompt": "x" * 128}, "", "128 tokens, the context 128"),
    ({"prompt": "x" * 100, "max_tokens": 29}, "", "may be at most 28"),
    ({"max_tokens": 5000}, "", "above this server's bound of 2048"),
]


@pytest.mark.parametrize(("changes", "param", "message"), REFUSALS, ids=lambda value: str(value)[:40])
def test_what_cannot_be_served_is_refused_by_name(
    shared: Running, changes: dict[str, Any], param: str, message: str
) -> None:
    response = shared.post("/v1/completions", {**PLAIN, **changes})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").split(".")[0] == param
    assert message in error["message"]
    assert "Traceback" not in response.text


def test_defaults_that_are_spelled_out_and_fields_without_bearing_are_accepted(shared: Running) -> None:
    neutral = {
        "n": 1, "logprobs": None, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0,
        "user": "me", "stream": False, "stop": None, "best_of": 1, "echo": False,
    }  # fmt: skip
    assert shared.post("/v1/completions", {**PLAIN, **neutral}).status_code == 200
    chat = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "metadata": {"a": "b"}}
    assert shared.post("/v1/chat/completions", {**CHAT, **chat}).status_code == 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages.0"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_completion_tokens": 4}, "not both"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs=3 needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "less than or equal to 20"),
        ({"logprobs": 1}, "logprobs: "),
        ({"echo": True}, "echo"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "the arguments of an earlier tool call are not JSON",
        ),
    ],
)
def test_a_chat_that_cannot_be_served_is_refused_by_name(
    shared: Running, changes: dict[str, Any], message: str
) -> None:
    response = shared.post("/v1/chat/completions", {**CHAT, **changes})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"nonsense", b'"text"', b"\xff\xfe", b'{"temperature": NaN}', b"[" * 100_000],
    ids=["empty", "cut", "list", "word", "string", "not UTF-8", "NaN", "deep"],
)
def test_a_body_that_is_no_json_object_is_a_400(shared: Running, raw: bytes) -> None:
    response = shared.client.post("/v1/completions", content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


def test_half_a_surrogate_is_refused_and_not_a_crash(shared: Running) -> None:
    response = shared.client.post("/v1/completions", content=b'{"prompt": "\\ud800", "max_tokens": 1}')
    assert response.status_code == 400


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_above_a_mebibyte_is_a_413(shared: Running, declared: bool) -> None:
    raw = json.dumps({**PLAIN, "prompt": "x" * MAX_BODY_BYTES}).encode()
    response = shared.client.post("/v1/completions", content=raw if declared else iter([raw[:1000], raw[1000:]]))
    assert response.status_code == 413
    assert str(MAX_BODY_BYTES) in response.json()["error"]["message"]


def test_an_unknown_model_is_a_404_and_the_known_one_may_be_named(shared: Running) -> None:
    response = shared.post("/v1/completions", {**PLAIN, "model": "gpt-9"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "fake-1m" in response.json()["error"]["message"]
    for name in ("fake-1m", ""):
        assert shared.post("/v1/completions", {**PLAIN, "model": name}).status_code == 200
    assert [m["id"] for m in shared.client.get("/v1/models").json()["data"]] == ["fake-1m"]


def test_paths_and_methods_that_are_not_there_answer_in_openai_form(shared: Running) -> None:
    assert shared.client.get("/v1/nothing").json()["error"]["message"] == "GET /v1/nothing: Not Found"
    response = shared.client.get("/v1/completions")
    assert response.status_code == 405
    assert "error" in response.json()


def test_a_full_queue_answers_429_and_says_when_to_try_again(tmp_path: Path) -> None:
    runner = FakeRunner(num_pages=256, seconds=0.05, eos_token_ids=frozenset())
    limits = Limits(max_running=1, max_queue=1, max_step_tokens=64, prefill_chunk=32)
    statuses: list[int] = []

    def ask() -> None:
        response = running.post("/v1/completions", {**PLAIN, "max_tokens": 10})
        statuses.append(response.status_code)
        if response.status_code == 429:
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["type"] == "rate_limit_error"

    with serving(tmp_path, runner, limits=limits) as running:
        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200, 429}
        assert sorted(row["status"] for row in running.rows()) == sorted(statuses)


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_is_a_500_with_the_request_id_and_the_engine_goes_on(tmp_path: Path, stream: bool) -> None:
    runner = FakeRunner(num_pages=256)
    with serving(tmp_path, runner) as running:
        runner.fail_steps = {runner.num_steps + 1}
        response = running.post("/v1/completions", {**PLAIN, "stream": stream}, x_request_id="id-9")
        assert response.status_code == 500
        assert "id-9" in response.json()["error"]["message"]
        assert "illegal memory" not in response.text
        assert running.post("/v1/completions", PLAIN).status_code == 200
        failed, good = running.rows()
        assert (failed["status"], failed["finish_reason"]) == (500, "error")
        assert failed["error"] == "the model step failed: RuntimeError"
        assert good["status"] == 200
        assert runner.pool.num_free == 256


def test_a_stream_that_fails_halfway_ends_with_an_error_event(tmp_path: Path) -> None:
    runner = FakeRunner(num_pages=256, eos_token_ids=frozenset())
    with serving(tmp_path, runner) as running:
        runner.fail_steps = {runner.num_steps + 6}
        body = {**PLAIN, "prompt": "abc", "max_tokens": 30, "stream": True}
        with running.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            assert "the model step failed" in events(response)[-1]["error"]["message"]
        # The row follows the last event of the stream.
        running.wait_until(lambda: bool(running.rows()))
        assert [row["status"] for row in running.rows()] == [500]


def test_logits_with_nan_are_a_500_and_counted(tmp_path: Path) -> None:
    runner = FakeRunner(num_pages=256)
    runner.nan_for_prompt = tuple(b"poison")
    with serving(tmp_path, runner) as running:
        response = running.post("/v1/completions", {**PLAIN, "prompt": "poison"})
        assert response.status_code == 500
        assert "NaN or Inf" in response.json()["error"]["message"]
        assert [row["num_nonfinite"] for row in running.rows()] == [1]
        assert "attention_nonfinite_logits_total 1.0" in running.client.get("/metrics").text


def test_steps_that_keep_failing_make_the_instance_unready_until_one_succeeds(tmp_path: Path) -> None:
    runner = FakeRunner(num_pages=256)
    with serving(tmp_path, runner) as running:
        runner.fail_steps = {runner.num_steps + i for i in (1, 2, 3)}
        for _ in range(3):
            assert running.post("/v1/completions", PLAIN).status_code == 500
        health = running.client.get("/health")
        assert health.status_code == 503
        assert health.json()["reasons"] == ["model: the last 3 steps failed"]
        assert running.post("/v1/completions", PLAIN).status_code == 200
        assert running.client.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_pages_and_leaves_a_row(tmp_path: Path, stream: bool) -> None:
    runner = FakeRunner(num_pages=256, seconds=0.02, eos_token_ids=frozenset())
    with serving(tmp_path, runner) as running:
        body = {**PLAIN, "max_tokens": 100, "stream": stream}
        if stream:
            with running.client.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                running.client.post("/v1/completions", json=body, timeout=0.3)
        running.wait_until(lambda: runner.pool.num_free == 256 and running.service.num_open == 0)
        (row,) = running.rows()
        assert (row["status"], row["finish_reason"]) == (499, "cancelled")
        assert row["output_tokens"] < 100
        assert 'attention_requests_total{finish_reason="cancelled",traffic="live"} 1.0' in (
            running.client.get("/metrics").text
        )


def test_health_is_503_with_reasons_until_the_probes_passed_and_then_200(tmp_path: Path) -> None:
    proceed = threading.Event()
    with serving(tmp_path, prepare=lambda: _after(proceed)) as running:
        health = running.client.get("/health")
        assert health.status_code == 503
        assert health.json()["live"] is True
        assert health.json()["ready"] is False
        assert any("probes" in reason for reason in health.json()["reasons"])
        refused = running.post("/v1/completions", PLAIN)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert running.client.get("/fingerprint").status_code == 503
        proceed.set()
        running.wait_until(lambda: running.client.get("/health").status_code == 200)
        health_now = running.client.get("/health").json()
        assert health_now["reasons"] == []
        assert health_now["fingerprint"] == "f1f2f3"
        assert health_now["resolved"]["decode"] == "torch_sdpa:math"
        assert running.client.get("/fingerprint").json()["id"] == "f1f2f3"


def _after(proceed: threading.Event) -> Any:
    from tests.attention.serve.fake_instance import FakeStarted

    proceed.wait(20)
    return FakeStarted(FakeRunner())


def test_a_start_that_fails_says_why_in_health(tmp_path: Path) -> None:
    def prepare() -> Any:
        raise RuntimeError("no backend is left for decode")

    with serving(tmp_path, prepare=prepare) as running:
        running.wait_until(lambda: running.service.engine.failure is not None)
        assert running.client.get("/health").json()["reasons"] == ["startup failed: no backend is left for decode"]
        assert running.post("/v1/completions", PLAIN).status_code == 503


def test_a_fault_shows_in_health_and_fingerprint_and_slows_live_requests_only(tmp_path: Path) -> None:
    runner = FakeRunner(num_pages=256, eos_token_ids=frozenset())
    with serving(tmp_path, runner, instance=replace(INSTANCE, fault=SLOW_DECODE)) as running:
        for path in ("/health", "/fingerprint"):
            assert running.client.get(path).json()["fault"] == SLOW_DECODE
        started = time.perf_counter()
        shadow = running.post("/v1/completions", {**PLAIN, "max_tokens": 4}, host="127.0.0.1-shadow:80")
        live = running.post("/v1/completions", {**PLAIN, "max_tokens": 4})
        assert live.json()["choices"] == shadow.json()["choices"]
        assert time.perf_counter() - started >= 3 * 0.060
        by_shadow = {row["shadow"]: row["tpot_s"] for row in running.rows()}
        assert by_shadow[True] < 0.060 <= by_shadow[False]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "localhost:8700"}, False),
        ({"host": "localhost-shadow:8700"}, True),
        ({"host": "localhost-shadow"}, True),
        ({"host": "localhost:8700-shadow"}, True),
        ({"host": "my-shadow.example:80"}, False),
        ({"host": "a", "x-attention-role": "shadow"}, True),
    ],
)
def test_a_shadow_is_known_by_its_host_or_role(headers: dict[str, str], expected: bool) -> None:
    assert is_shadow(headers) is expected


def test_an_engine_that_has_ended_is_not_ready_and_takes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        running.service.engine.stop(5)
        assert running.client.get("/health").json()["reasons"] == ["engine: its thread has ended; restart the instance"]
        assert running.post("/v1/completions", PLAIN).status_code == 503


def test_a_detokenizer_that_fails_fails_its_step_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = FakeRunner(num_pages=256, eos_token_ids=frozenset())
    with serving(tmp_path, runner) as running:

        def decode(ids: list[int], skip_special_tokens: bool = True) -> str:
            raise RuntimeError("cannot decode")

        with monkeypatch.context() as patch:
            patch.setattr(runner.tokenizer, "decode", decode)
            response = running.post("/v1/completions", {**PLAIN, "stream": True})
            assert response.status_code == 500
            assert "cannot decode" not in response.text
        assert running.post("/v1/completions", PLAIN).status_code == 200
        assert runner.pool.num_free == 256


def test_after_a_burst_with_cancellations_all_pages_are_free_again(tmp_path: Path) -> None:
    runner = FakeRunner(num_pages=64, seconds=0.005, eos_token_ids=frozenset())
    with serving(tmp_path, runner) as running:
        total = running.service.engine.kv_pages["total"]

        def ask(number: int) -> None:
            body = {**PLAIN, "prompt": "x" * (1 + 3 * number), "max_tokens": 30, "stream": number % 2 == 0}
            with (
                contextlib.suppress(httpx.TimeoutException),
                httpx.Client(base_url=running.client.base_url, timeout=0.05 if number % 3 == 0 else 30) as client,
                client.stream("POST", "/v1/completions", json=body) as response,
            ):
                for seen, _ in enumerate(response.iter_bytes()):
                    if number % 4 == 0 and seen == 2:
                        break

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(ask, range(24)))
        running.wait_until(lambda: running.service.num_open == 0 and running.service.engine.num_running == 0)
        running.wait_until(lambda: running.service.engine.kv_pages["free"] == total)
        assert {row["finish_reason"] for row in running.rows()} == {"length", "cancelled"}
        assert running.client.get("/health").json()["kv_pages"] == {"free": total, "total": total}
        page = running.client.get("/metrics").text
        assert f'attention_kv_pages{{state="free"}} {total}.0' in page
