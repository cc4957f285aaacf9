"""OpenAI's own Python client, unmodified, against a real instance."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.attention.serve.fake_instance import wait_until
from tests.attention.serve.real_instance import Process, serving_process

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    flags = ("--max-running", "2", "--max-queue", "2")
    with serving_process(tmp_path_factory.mktemp("real"), *flags, max_position_embeddings=4096) as found:
        yield found
        wait_until(found.is_idle)
        assert found.health()["ready"] is True


@pytest.fixture(scope="module")
def client(process: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


@pytest.fixture
def model(process: Process) -> str:
    return process.model


def test_the_model_is_listed(client: openai.OpenAI, model: str) -> None:
    assert [one.id for one in client.models.list()] == [model]


def test_a_chat_and_a_completion_answer(client: openai.OpenAI, model: str) -> None:
    chat = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].message.content
    assert chat.choices[0].finish_reason in ("stop", "length")
    assert chat.usage is not None
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    assert chat.system_fingerprint
    plain = client.completions.create(model=model, prompt="hello", **GREEDY)
    assert plain.choices[0].text
    assert plain.usage is not None
    assert plain.usage.prompt_tokens == len("hello")
    assert plain._request_id


def test_streams_say_what_whole_answers_say_and_end_with_the_usage(client: openai.OpenAI, model: str) -> None:
    usage: Any = {"include_usage": True}
    chat = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    *chunks, last = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, stream_options=usage, **GREEDY
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat.choices[0].message.content
    assert (last.choices, last.usage) == ([], chat.usage)
    plain = client.completions.create(model=model, prompt="hello", **GREEDY)
    *pieces, end = client.completions.create(model=model, prompt="hello", stream=True, stream_options=usage, **GREEDY)
    assert "".join(piece.choices[0].text for piece in pieces) == plain.choices[0].text
    assert end.usage == plain.usage
    # The client's own helper takes no answer that was cut off: let this one end by itself.
    with client.chat.completions.stream(model=model, messages=MESSAGES, stop=text[8:10], **GREEDY) as stream:
        assert stream.get_final_completion().choices[0].message.content == text[: text.index(text[8:10])]


def test_logprobs_are_read_as_the_client_types_them(client: openai.OpenAI, model: str) -> None:
    chat = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY
    ).choices[0]
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    for entry in chat.logprobs.content:
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 3
    told = b"".join(bytes(entry.bytes or b"") for entry in chat.logprobs.content if entry.token != "<eos>")
    assert told.decode(errors="replace") == chat.message.content
    streamed = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices]
    assert [one for part in parts if part for one in part.content or []] == chat.logprobs.content
    plain = client.completions.create(model=model, prompt="hello", logprobs=2, echo=True, max_tokens=0)
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("hello")
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.text_offset == list(range(5))
    extra = client.completions.create(
        model=model, prompt="hello", max_tokens=1, extra_body={"prompt_logprobs": 1}
    ).choices[0]
    assert extra.model_extra is not None
    assert len(extra.model_extra["prompt_logprobs"]) == 5


def test_a_stop_string_ends_an_answer(client: openai.OpenAI, model: str) -> None:
    text = client.completions.create(model=model, prompt="hello", **GREEDY).choices[0].text
    stop = text[5:7]
    choice = client.completions.create(model=model, prompt="hello", stop=[stop], **GREEDY).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_a_seed_repeats_a_sampled_answer(client: openai.OpenAI, model: str) -> None:
    def sample(seed: int) -> str | None:
        chat = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=24, temperature=1.5, seed=seed)
        return chat.choices[0].message.content

    assert sample(1) == sample(1) != sample(2)


def test_tools_may_be_offered(client: openai.OpenAI, model: str) -> None:
    tool: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    chat = client.chat.completions.create(model=model, messages=MESSAGES, tools=[tool], tool_choice="auto", **GREEDY)
    assert chat.choices[0].message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(model=model, messages=MESSAGES, tools=[tool], tool_choice="required", **GREEDY)


def test_an_answer_may_be_sent_back_as_a_message(client: openai.OpenAI, model: str) -> None:
    first = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY).choices[0].message
    messages: list[Any] = [*MESSAGES, first, {"role": "user", "content": "and now?"}]
    assert client.chat.completions.create(model=model, messages=messages, **GREEDY).choices[0].message.content


def test_mistakes_raise_the_clients_own_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="n=2") as bad:
        client.chat.completions.create(model=model, messages=MESSAGES, n=2)
    assert (bad.value.param, bad.value.code, bad.value.type) == ("n", "unsupported_parameter", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.APIStatusError, match="exceeds") as large:
        client.completions.create(model=model, prompt="x" * (2 << 20))
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="the context 4096"):
        client.completions.create(model=model, prompt="x" * 100_000)


def test_a_full_queue_raises_and_a_client_that_retries_gets_its_answer(
    client: openai.OpenAI, process: Process, model: str
) -> None:
    def occupy() -> None:
        client.completions.create(model=model, prompt="hello", max_tokens=1500, temperature=0, timeout=120)

    def num_taken() -> int:
        health = process.health()
        return int(health["running"] + health["waiting"])

    threads = [threading.Thread(target=occupy) for _ in range(4)]
    for number, thread in enumerate(threads, start=1):
        thread.start()
        # One after the other: until it is admitted a request counts as waiting.
        wait_until(lambda n=number: num_taken() == n)  # type: ignore[misc]
    with pytest.raises(openai.RateLimitError) as full:
        client.completions.create(model=model, prompt="hello", **GREEDY)
    assert int(full.value.response.headers["retry-after"]) >= 1
    patient = client.with_options(max_retries=20)
    assert patient.completions.create(model=model, prompt="hello", **GREEDY).choices[0].text
    for thread in threads:
        thread.join()


def test_a_client_that_gives_up_leaves_nothing_running(client: openai.OpenAI, process: Process, model: str) -> None:
    started = time.monotonic()
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model=model, prompt="hello", max_tokens=1500, temperature=0, timeout=0.2)
    assert time.monotonic() - started < 5
    wait_until(process.is_idle)


def test_the_asynchronous_client_works_too(process: Process, model: str) -> None:
    async def ask_all() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{process.url}/v1", api_key="unused", max_retries=20) as client:
            asked = (client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY) for _ in range(4))
            return [chat.choices[0].message.content for chat in await asyncio.gather(*asked)]

    answers = asyncio.run(ask_all())
    assert answers[0]
    assert len(set(answers)) == 1
