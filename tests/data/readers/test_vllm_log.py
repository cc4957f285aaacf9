from __future__ import annotations

from typing import Any

import pytest

from data.jsonl import Rejected
from data.readers.record import Recorded
from data.readers.vllm_log import read
from tests.data.readers.logs import lines, reason, rows


def params(**changes: Any) -> str:
    values = {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": [],
        "stop_token_ids": [],
        "bad_words": [],
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "max_tokens": 120,
        "min_tokens": 0,
        "logprobs": None,
        "truncate_prompt_tokens": None,
        "guided_decoding": None,
        "extra_args": None,
    } | changes
    return "SamplingParams(" + ", ".join(f"{name}={value!r}" for name, value in values.items()) + ")"


def received(prompt: object, ids: object = None, told: str | None = None, when: str = "08-06 10:19:36") -> str:
    """The line of vLLM 0.10."""
    return (
        f"(APIServer pid=190319) INFO {when} [logger.py:41] Received request cmpl-6f57-0: prompt: {prompt!r}, "
        f"params: {told or params()}, prompt_token_ids: {ids}, prompt_embeds shape: None, lora_request: None."
    )


TRICKY = (
    "a 'quoted' \"word\", params: PoolingParams(max_tokens=1, guided_decoding=x), prompt_token_ids: [1, 2]\n"
    "next\\line 你好 \x00"
)


@pytest.mark.parametrize("prompt", ["Do you know the book", "it's", 'say "x"', TRICKY, ""])
def test_the_prompt_is_read_whole_whatever_stands_in_it(prompt: str) -> None:
    [found] = read(lines(received(prompt, [128000, 5519, 499])))
    assert isinstance(found, Recorded)
    assert found.row["body"] == {"model": "vllm", "temperature": 0.0, "max_tokens": 120, "prompt": prompt}
    assert (found.row["custom_id"], found.row["url"], found.prompt_tokens) == ("cmpl-6f57-0", "/v1/completions", 3)


def test_what_the_client_asked_for_goes_into_the_body_and_neutral_values_do_not() -> None:
    told = params(temperature=0.7, seed=42, top_p=0.95, top_k=18, repetition_penalty=1.3, stop=["]", "a, 'b'"], n=2)
    [row] = rows(read(lines(received("x", told=told))))
    assert row["body"] == {
        "model": "vllm",
        "prompt": "x",
        "temperature": 0.7,
        "seed": 42,
        "top_p": 0.95,
        "top_k": 18,
        "repetition_penalty": 1.3,
        "stop": ["]", "a, 'b'"],
        "n": 2,
        "max_tokens": 120,
    }


def test_the_two_lines_of_later_versions_are_joined_by_the_id() -> None:
    log = lines(
        "DEBUG 03-20 05:36:49 [logger.py:42] Request a details: prompt: 'one', prompt_token_ids: [1, 2], "
        "prompt_embeds shape: None.",
        "DEBUG 03-20 05:36:49 [logger.py:42] Request b details: prompt: 'two', prompt_token_ids: [3], "
        "prompt_embeds shape: None.",
        f"INFO 03-20 05:36:50 [logger.py:49] Received request b: params: {params(max_tokens=5)}, lora_request: None.",
        f"INFO 03-20 05:36:51 [logger.py:49] Received request a: params: {params(max_tokens=6)}, lora_request: None.",
    )
    second, first = rows(read(log))
    assert (second["body"]["prompt"], second["body"]["max_tokens"]) == ("two", 5)
    assert (first["body"]["prompt"], first["body"]["max_tokens"]) == ("one", 6)
    assert first["t_s"] - second["t_s"] == 1.0


def test_the_line_of_the_first_versions_is_read_too() -> None:
    log = lines(
        "INFO 02-01 06:36:12 async_llm_engine.py:436] Received request cmpl-a-0: prompt: 'x', prefix_pos: None,"
        f"sampling_params: {params(temperature=0.1, frequency_penalty=0.5)}, prompt_token_ids: [], lora_request: None."
    )
    [row] = rows(read(log))
    assert row["body"] == {
        "model": "vllm",
        "prompt": "x",
        "temperature": 0.1,
        "frequency_penalty": 0.5,
        "max_tokens": 120,
    }


def test_token_ids_without_text_count_by_their_number() -> None:
    [row] = rows(read(lines(received(None, [5, 6, 7, 8]))))
    assert row["shape"] == {"prompt_tokens": 4}


def test_time_goes_on_over_new_year() -> None:
    log = lines(received("a", when="12-31 23:59:58"), received("b", when="01-01 00:00:01"))
    old, new = rows(read(log))
    assert new["t_s"] - old["t_s"] == 3.0


def test_lines_about_no_request_are_passed_over() -> None:
    log = lines(
        "INFO 08-06 10:19:30 [api_server.py:1] Starting vLLM API server",
        "INFO 08-06 10:19:36 [engine.py:315] Added request cmpl-6f57-0.",
        'INFO:     127.0.0.1:5000 - "POST /v1/completions HTTP/1.1" 200 OK',
        b"\xff\xfe equest ",
    )
    assert list(read(log)) == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (f"INFO Received request a: params: {params()}, lora_request: None.", "vLLM writes it with VLLM_LOGGING_LEVEL"),
        ("INFO Received request a: prompt: 'x', params: PoolingParams(dim=3), lora_request: None.", "PoolingParams"),
        (received("x", told=params(guided_decoding={"json": 1})), "structured output"),
        (received("x", told=params(max_tokens=None)), "max_tokens is not recorded"),
        (received("x")[:100], "no request to generate text"),
        (r"INFO Received request a: prompt: '\x', params: " + params(), "prompt: no Python string"),
    ],
)
def test_a_request_that_cannot_be_replayed_says_why(line: str, why: str) -> None:
    assert why in reason(read(lines(line)))


def test_a_prompt_without_its_parameters_is_counted() -> None:
    log = lines("DEBUG Request a details: prompt: 'one', prompt_token_ids: None, prompt_embeds shape: None.")
    assert list(read(log)) == [Rejected(1, "request a has no line with its parameters")]
