"""Logs of every form as traffic: redacted, checked, counted, drawn."""

from __future__ import annotations

import json
import random
import tracemalloc
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from attention.errors import UserError
from data.plan import TrafficScale
from data.readers import FORMATS
from data.recorded import read_traffic
from data.requests import addressed, lengths, scale, with_texts
from tests.data.readers import test_litellm, test_vllm_log
from tests.data.readers.logs import write
from tests.data.readers.test_detection import EXAMPLES
from tests.data.words import Words

KEY = "sk-proj-abcdefghijklmnop1234"


def batch(number: int, text: str = "hello", **body: Any) -> dict[str, Any]:
    sent = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8} | body
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": sent}


def mooncake(*blocks: int, at_ms: int = 0, short_by: int = 0, output: int = 64) -> dict[str, Any]:
    length = 512 * len(blocks) - short_by
    return {"timestamp": at_ms, "input_length": length, "output_length": output, "hash_ids": list(blocks)}


@pytest.mark.parametrize(("name", "content"), EXAMPLES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_log_of_every_form_can_be_scaled_and_measured(tmp_path: Path, name: str, content: Any) -> None:
    if name == "litellm":
        content = content | {"proxy_server_request": {"prompt": "hello there"}}
    if name == "openai-batch":
        content = content | {"body": batch(0)["body"]}
    if name == "langfuse":
        content = content | {"model_parameters": ""}
    traffic = read_traffic(write(tmp_path / "log", content))
    assert (traffic.format, traffic.rejected) == (name, [])
    [played] = scale(traffic, TrafficScale(requests_per_s=1, max_in_flight=1), Words())
    [length] = lengths([played], Words())
    assert length.prompt_tokens >= 1
    assert played.payload()["max_tokens"] == length.output_tokens
    assert played.shape is None


def test_a_plain_batch_file_gets_what_our_columns_would_say(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    lines = [batch(0, "注意機構を説明して"), batch(1, tools=[tool], stream=True), batch(2)]
    first, second, third = read_traffic(write(tmp_path / "t", *lines)).requests
    assert (first.language, first.category, first.session_id, first.features) == ("ja", "chat", "r0", ())
    assert (second.language, second.category, second.features) == ("und", "tool_call", ("tools", "stream"))
    assert {request.t_s for request in (first, second, third)} == {0.0}


def test_a_line_of_ours_that_lacks_a_column_is_a_mistake_not_a_plain_one(tmp_path: Path) -> None:
    traffic = read_traffic(write(tmp_path / "t", batch(0), batch(1) | {"t_s": 1.0}))
    assert [(r.line, r.reason) for r in traffic.rejected] == [(2, "session_id: Field required")]


def test_no_credential_and_no_address_comes_out_of_a_log(tmp_path: Path) -> None:
    body = {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": f"key {KEY}"}]},
            {"role": "user", "content": "mail bob@example.com from 10.1.2.3"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"arguments": f'{{"token": "{KEY}"}}'}}],
            },
            {"role": "user", "content": "and?"},
        ],
        "tools": [{"type": "function", "function": {"description": f"uses {KEY}"}}],
        "stop": [KEY],
        "user": "bob",
        "metadata": {"ip": "10.1.2.3"},
    }
    rows = [
        test_litellm.spent(request_id="bob@example.com", session_id=KEY, proxy_server_request=body),
        test_litellm.spent(request_id="carol@example.com", proxy_server_request={**body, KEY: 1}),
        test_litellm.spent(request_id="bob@example.com"),
        test_litellm.spent(call_type=f"to {KEY}"),
    ]
    traffic = read_traffic(write(tmp_path / "t", *rows))
    [request] = traffic.requests
    out = request.model_dump_json() + repr(traffic.rejected)
    assert not any(secret in out for secret in (KEY, "example.com", "10.1.2.3", "bob"))
    assert "<api_key>" in out and "<email>" in out and "<ip_address>" in out
    assert [line.line for line in traffic.rejected] == [2, 3, 4]
    assert "unknown field '<api_key>'" in traffic.rejected[0].reason
    assert "was used by an earlier line" in traffic.rejected[1].reason


def test_an_id_that_no_header_can_carry_becomes_one_that_can_and_sessions_stay_together(tmp_path: Path) -> None:
    rows = [test_litellm.spent(request_id=str(n), session_id=name) for n, name in enumerate(("für\n", "für\n", "b"))]
    first, second, third = (r.session_id for r in read_traffic(write(tmp_path / "t", *rows)).requests)
    assert first == second != third == "b"
    assert first.isascii() and first.isprintable()


@pytest.mark.parametrize(
    ("body", "exact"),
    [
        ({"temperature": 0}, True),
        ({}, True),
        ({"temperature": 0.7}, False),
        ({"temperature": 0.7, "seed": 0}, True),
        ({"temperature": 0.7, "seed": None}, False),
    ],
)
def test_a_sampled_request_without_a_seed_is_marked(tmp_path: Path, body: dict[str, Any], exact: bool) -> None:
    [request] = read_traffic(write(tmp_path / "t", batch(0, **body))).requests
    assert request.exact is exact


def test_what_the_server_refuses_is_rejected_whatever_log_it_comes_from(tmp_path: Path) -> None:
    told = test_vllm_log.params(top_k=5, temperature=1.0)
    lines = [test_vllm_log.received("a"), test_vllm_log.received("b", told=told).replace("cmpl", "x")]
    [rejected] = read_traffic(write(tmp_path / "t", *lines)).rejected
    assert rejected.line == 2
    assert "unknown field 'top_k'" in rejected.reason


def test_times_count_from_the_first_request(tmp_path: Path) -> None:
    times = ("2025-05-30T03:17:09Z", "2025-05-30T03:17:06Z", "2025-05-30T03:17:06.5Z")
    rows = [test_litellm.spent(request_id=str(number), startTime=time) for number, time in enumerate(times)]
    requests = read_traffic(write(tmp_path / "t", *rows)).requests
    assert [(r.custom_id, r.t_s) for r in requests] == [("1", 0.0), ("2", 0.5), ("0", 3.0)]


@pytest.mark.parametrize("divisor", [1, 3, 16, 1000])
def test_a_length_only_request_is_played_at_exactly_its_length_and_shares_what_it_shared(
    tmp_path: Path, divisor: int
) -> None:
    lines = [mooncake(0, 1, 2, 3, short_by=100), mooncake(0, 1, 2, 7, 8), mooncake(0, 9), mooncake(5)]
    traffic = read_traffic(write(tmp_path / "t", *lines))
    played = scale(traffic, TrafficScale(requests_per_s=1, max_in_flight=1, divide_lengths_by=divisor), Words())
    measured = [one.prompt_tokens for one in lengths(played, Words())]
    assert measured == [max(8, length // divisor) for length in (1948, 2560, 1024, 512)]
    assert [r.body.max_tokens for r in played] == [max(2, 64 // divisor)] * 4
    texts = [(r.body.prompt or "").split() for r in played]
    common = [len(list(takewhile(lambda p: p[0] == p[1], zip(texts[0], t, strict=False)))) for t in texts[1:]]
    block = max(1, 512 // divisor)
    if divisor < 1000:
        assert 3 * block <= common[0] < 4 * block
        assert block <= common[1] < 2 * block
        assert common[2] < block


def test_requests_go_to_the_model_under_test_whatever_their_log_called_its_own(tmp_path: Path) -> None:
    requests = read_traffic(write(tmp_path / "t", batch(0, top_p=0.5), batch(1, model="other"))).requests
    sent = [request.payload() for request in addressed(requests, "smollm2")]
    assert sent == [{**request.payload(), "model": "smollm2"} for request in requests]


def test_a_synthetic_prompt_outside_of_scaling_has_the_recorded_length(tmp_path: Path) -> None:
    traffic = read_traffic(write(tmp_path / "t", mooncake(1, 2), mooncake(3)))
    made = with_texts(traffic.requests, Words())
    assert [one.prompt_tokens for one in lengths(made, Words())] == [1024, 512]
    with pytest.raises(AssertionError):
        lengths(traffic.requests, Words())


def test_a_sample_is_drawn_over_lengths_languages_and_features_and_says_what_it_stands_for(tmp_path: Path) -> None:
    draws = random.Random(7)
    lines: list[Any] = [b"{", batch(1000, n=2)]
    for number in range(300):
        text = ("注意" if number % 10 == 0 else "word ") * draws.choice((5, 200, 900))
        lines.append(batch(number, text, stream=number % 3 == 0))
    lines.insert(100, batch(0))
    path = write(tmp_path / "t", *lines)
    traffic = read_traffic(path, max_requests=40)
    assert len(traffic.requests) == 40 == len({r.custom_id for r in traffic.requests})
    assert traffic.sample is not None
    assert (traffic.sample.requests, traffic.sample.rejected) == (300, 3)
    assert {s.language for s in traffic.sample.strata} == {"zh", "und"}
    assert {s.features for s in traffic.sample.strata} == {"plain", "stream"}
    assert len({s.prompt_bucket for s in traffic.sample.strata}) >= 3
    assert all(s.sampled for s in traffic.sample.strata)
    assert traffic.sample.request_share == pytest.approx(300 / 303)
    assert read_traffic(path, max_requests=40) == traffic
    whole = {r.custom_id: r for r in read_traffic(path).requests}
    assert all(whole[r.custom_id] == r for r in traffic.requests)


def test_a_log_is_never_held_whole_when_a_sample_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    with path.open("w") as file:
        for number in range(200):
            file.write(json.dumps(batch(number, "word " * 5_000)) + "\n")
    size = path.stat().st_size
    tracemalloc.start()
    try:
        traffic = read_traffic(path, max_requests=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(traffic.requests) == 2
    assert peak < size / 5


def test_every_known_format_says_so_when_its_file_holds_no_request(tmp_path: Path) -> None:
    for name in FORMATS:
        with pytest.raises(UserError, match="no usable line") as caught:
            read_traffic(write(tmp_path / "t", "nothing of note"), format=name)
        assert "\n" not in str(caught.value)
