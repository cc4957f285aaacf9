"""Reading, scaling and weighing traffic; the committed sample."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from attention.errors import UserError
from data.plan import TrafficScale
from data.recorded import read_traffic
from data.requests import Bucket, RequestLength, Tokenizer, lengths, scale, shape_weights
from data.traffic import make_sample
from tests.data.words import Words

SAMPLE = Path(make_sample.__file__).with_name("sample.jsonl")


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Words()


def request(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "custom_id": f"r{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 8},
        "t_s": float(number),
        "session_id": f"s{number}",
        "category": "chat",
        "language": "en",
    } | changes


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8} | changes


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return body(messages=[{"role": role, "content": content} for role, content in turns])


def write(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(texts) + b"\n")
    return path


def words(prefix: str, num: int) -> str:
    return " ".join(f"{prefix}{index}" for index in range(num))


def plan(**changes: Any) -> TrafficScale:
    return TrafficScale.model_validate({"requests_per_s": 2.0, "max_in_flight": 4} | changes)


def test_a_corrupt_line_is_reported_with_its_number_and_the_rest_goes_on(tmp_path: Path) -> None:
    lines = [request(0), b'{"custom_id": "r1", "method"', b"", request(2), b"\xff\xfe", b"[]", request(3)]
    traffic = read_traffic(write(tmp_path / "t.jsonl", *lines))
    assert [r.custom_id for r in traffic.requests] == ["r0", "r2", "r3"]
    assert [r.line for r in traffic.rejected] == [2, 5, 6]
    assert all(r.reason and "\n" not in r.reason for r in traffic.rejected)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (request(body=body(max_tokens="8")), "body.max_tokens"),
        (request(body=body(max_tokens=True)), "body.max_tokens"),
        (request(body=body(max_tokens=0)), "body.max_tokens"),
        (request(body={"model": "m", "messages": [{"role": "user", "content": "x"}]}), "body.max_tokens: Field"),
        (request(body=body(messages=[])), "body.messages is missing or empty"),
        (request(url="/v1/completions"), "body.prompt is missing or empty"),
        (request(url="/v1/embeddings"), "url"),
        (request(method="GET"), "method"),
        (request(t_s=-1), "t_s"),
        (request(t_s="soon"), "t_s"),
        (json.dumps(request()).replace("0.0", "NaN").encode(), "t_s"),
        (request(sesion_id="s"), "sesion_id: Extra"),
        (request(body=body(messages=[{"role": "robot", "content": "x"}])), "body.messages.0.role"),
        (request(body=body(messages=[{"role": "user", "content": [{"type": "image_url"}]}])), "only text"),
        (request(body=body(n=2)), "the server refuses it: n=2 is not supported"),
        (request(body=body(presence_penalty=1)), "presence_penalty=1 is not supported"),
        (request(body=body(max_token=3)), "unknown field 'max_token'; did you mean max_tokens"),
        (request(body=body(temperature=3)), "temperature: Input should be less than or equal to 2"),
        (request(body=body(max_completion_tokens=4)), "send max_tokens or max_completion_tokens, not both"),
        (request(body=body(seed="1")), "seed"),
        (request(body=body(messages=[{"role": "user", "content": "x", "mood": "good"}])), "mood"),
        (
            request(url="/v1/completions", body={"model": "m", "prompt": "a", "max_tokens": 2, "best_of": 2}),
            "best_of=2",
        ),
        (b'{"custom_id": "\\ud800"}', "Invalid JSON"),
        (b"[" * 100_000, "Invalid JSON"),
    ],
)
def test_a_line_that_is_no_usable_request_says_which_field_and_why(tmp_path: Path, line: object, reason: str) -> None:
    traffic = read_traffic(write(tmp_path / "t.jsonl", request(7), line))
    [rejected] = traffic.rejected
    assert rejected.line == 2
    assert reason in rejected.reason


def test_a_second_use_of_a_custom_id_is_rejected(tmp_path: Path) -> None:
    traffic = read_traffic(write(tmp_path / "t.jsonl", request(0), request(1), request(0, t_s=9.0)))
    assert [r.t_s for r in traffic.requests] == [0.0, 1.0]
    assert [(r.line, "'r0'" in r.reason) for r in traffic.rejected] == [(3, True)]


def test_a_missing_file_a_folder_and_a_file_without_a_usable_line_are_one_line_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    write(tmp_path / "bad.jsonl", b"{", b"nope")
    for name, why in [
        ("absent.jsonl", "No such file"),
        ("", "Is a directory"),
        ("empty.jsonl", "it is empty"),
        ("bad.jsonl", "line 1: Invalid JSON"),
    ]:
        with pytest.raises(UserError, match=why) as caught:
            read_traffic(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_requests_come_in_order_of_arrival(tmp_path: Path) -> None:
    traffic = read_traffic(write(tmp_path / "t.jsonl", request(3), request(1), request(2)))
    assert [r.custom_id for r in traffic.requests] == ["r1", "r2", "r3"]


def test_what_a_client_sent_beyond_our_fields_is_sent_again(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    sent = body(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ],
        top_p=0.5,
        max_completion_tokens=9,
    )
    del sent["max_tokens"]
    [only] = read_traffic(
        write(tmp_path / "t.jsonl", b"\xef\xbb\xbf" + json.dumps(request(body=sent)).encode())
    ).requests
    payload = only.payload()
    assert payload["max_tokens"] == 9
    assert payload["top_p"] == 0.5
    assert [message["content"] for message in payload["messages"]] == ["ab", "", "ok"]
    assert payload["messages"][1]["tool_calls"] == [call]


def test_a_developer_is_rendered_as_the_server_renders_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    told = request(body=chat(("developer", "be brief"), ("user", "hello")))
    [only] = read_traffic(write(tmp_path / "t.jsonl", told)).requests
    assert only.payload()["messages"][0]["role"] == "developer"
    assert only.render(tokenizer).startswith("<system> be brief <end>\n<user> hello")


def test_scaling_divides_the_rendered_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    long = chat(("system", words("s", 400)), ("user", words("u", 1200)))
    [shrunk] = scale(
        read_traffic(write(tmp_path / "t.jsonl", request(body=long))), plan(divide_lengths_by=16), tokenizer
    )
    [length] = lengths([shrunk], tokenizer)
    assert 98 <= length.prompt_tokens <= 1605 // 16 == 100
    system, user = shrunk.body.messages or ()
    assert system.content.startswith("s0 s1 s2")
    assert user.content.endswith("u1198 u1199")


def test_scaling_drops_the_earliest_turns_before_a_text_gets_too_short(tmp_path: Path, tokenizer: Tokenizer) -> None:
    turns = [(("user", "assistant")[i % 2], words(f"t{i}-", 100)) for i in range(9)]
    traffic = read_traffic(write(tmp_path / "t.jsonl", request(body=chat(("system", "be brief"), *turns))))
    [shrunk] = scale(traffic, plan(divide_lengths_by=16), tokenizer)
    kept = shrunk.body.messages or ()
    assert [message.role for message in kept] == ["system", "user", "assistant", "user"]
    assert kept[0].content == "be brief"
    assert kept[-1].content.endswith("t8-99")
    assert min(len(message.content.split()) for message in kept[1:]) >= 8


def test_a_short_text_survives_scaling_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = [request(0, body=chat(("user", "hello there"))), request(1, body=chat(("user", words("u", 20))))]
    short, cut = scale(read_traffic(write(tmp_path / "t.jsonl", *texts)), plan(divide_lengths_by=1000), tokenizer)
    assert [m.content for m in short.body.messages or ()] == ["hello there"]
    assert [m.content for m in cut.body.messages or ()] == [words("u", 20).split(" ", 12)[12]]


def test_a_plain_prompt_keeps_its_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plain = request(url="/v1/completions", body={"model": "m", "prompt": words("p", 160), "max_tokens": 100})
    [shrunk] = scale(read_traffic(write(tmp_path / "t.jsonl", plain)), plan(divide_lengths_by=16), tokenizer)
    assert shrunk.body.prompt == "p150 p151 p152 p153 p154 p155 p156 p157 p158 p159"
    assert shrunk.body.max_tokens == 6


@pytest.mark.parametrize(
    ("divisor", "cap", "wanted"), [(1, None, [3, 400]), (16, None, [2, 25]), (16, 16, [2, 16]), (1, 16, [3, 16])]
)
def test_output_is_divided_then_capped_and_leaves_two_tokens(
    tmp_path: Path, tokenizer: Tokenizer, divisor: int, cap: int | None, wanted: list[int]
) -> None:
    lines = [request(i, body=body(max_tokens=m)) for i, m in enumerate((3, 400))]
    scaled = scale(
        read_traffic(write(tmp_path / "t.jsonl", *lines)),
        plan(divide_lengths_by=divisor, max_output_tokens=cap),
        tokenizer,
    )
    assert [r.body.max_tokens for r in scaled] == wanted


def test_gaps_keep_their_pattern_at_the_rate_of_the_plan(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [request(i, t_s=t) for i, t in enumerate((10.0, 11.0, 14.0, 20.0))]
    scaled = scale(read_traffic(write(tmp_path / "t.jsonl", *lines)), plan(requests_per_s=3.0), tokenizer)
    assert [r.t_s for r in scaled] == pytest.approx([0.0, 0.1, 0.4, 1.0])
    together = [request(i, t_s=5.0) for i in range(3)]
    scaled = scale(read_traffic(write(tmp_path / "t.jsonl", *together)), plan(requests_per_s=2.0), tokenizer)
    assert [r.t_s for r in scaled] == [0.0, 0.5, 1.0]


def test_weights_are_causal_pairs_for_prefill_and_steps_by_kv_length_for_decode() -> None:
    buckets = shape_weights([RequestLength("a", 30, 6), RequestLength("b", 100, 2), RequestLength("c", 5, 1)])
    pairs = {length: length * (length + 1) / 2 for length in (30, 100, 5)}
    total = sum(pairs.values())
    # a decodes over 31, 32 | 33, 34, 35 keys, b over 101, c not at all.
    per_thousand = 1000 / 3
    assert buckets == [
        Bucket("prefill", 128, "prefill/kv<=128", pairs[100] / total, 128, pairs[100] * per_thousand),
        Bucket("prefill", 32, "prefill/kv<=32", pairs[30] / total, 32, pairs[30] * per_thousand),
        Bucket("prefill", 16, "prefill/kv<=16", pairs[5] / total, 16, pairs[5] * per_thousand),
        Bucket("decode", 64, "decode/kv<=64", 3 / 6, 1, 3 * per_thousand),
        Bucket("decode", 32, "decode/kv<=32", 2 / 6, 1, 2 * per_thousand),
        Bucket("decode", 128, "decode/kv<=128", 1 / 6, 1, 1 * per_thousand),
    ]


def test_a_prompt_with_a_cached_prefix_is_an_extend_over_the_whole_prompt() -> None:
    [extend] = shape_weights([RequestLength("a", 1000, 1, cached_tokens=900)])
    # 100 new rows see 901 .. 1000 keys.
    assert extend == Bucket("extend", 1024, "extend/kv<=1024", 1.0, 128, 1000.0 * sum(range(901, 1001)))


@pytest.mark.parametrize(("prompt", "cached", "q_len"), [(1024, 1023, 2), (1024, 1, 512), (1024, 900, 128), (9, 8, 2)])
def test_the_typical_extend_has_at_least_two_queries_and_at_most_half_of_the_keys(
    prompt: int, cached: int, q_len: int
) -> None:
    [extend] = shape_weights([RequestLength("a", prompt, 1, cached)])
    assert extend.q_len == q_len


def test_a_request_that_stands_for_many_weighs_as_many() -> None:
    many = [RequestLength("a", 300, 9, count=3), RequestLength("b", 2000, 70, 512, count=2)]
    single = [RequestLength("a", 300, 9)] * 3 + [RequestLength("b", 2000, 70, 512)] * 2
    assert shape_weights(many) == shape_weights(single)


def test_decode_steps_over_many_buckets_are_counted_without_a_loop_over_tokens() -> None:
    buckets = shape_weights([RequestLength("a", 1, 10**12)])
    steps = {b.kv_len: b.units for b in buckets if b.family == "decode"}
    assert (steps[16], steps[32], steps[64]) == (15_000, 16_000, 32_000)
    assert sum(steps.values()) == 1000 * (10**12 - 1)


def test_traffic_without_requests_has_no_buckets() -> None:
    assert shape_weights([]) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cached_tokens": 30}, "cached_tokens 30 of a prompt of 30"),
        ({"cached_tokens": -1}, "cached_tokens -1"),
        ({"count": 0.0}, "count 0"),
        ({"count": float("nan")}, "count nan"),
    ],
)
def test_a_length_that_cannot_be_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=f"request a: {told}"):
        RequestLength("a", 30, 6, **changes)


def test_the_sample_is_made_again_byte_for_byte() -> None:
    assert make_sample.sample_text().encode() == SAMPLE.read_bytes()


def test_the_sample_holds_the_mix_that_the_project_promises() -> None:
    traffic = read_traffic(SAMPLE)
    assert traffic.rejected == []
    assert len(traffic.requests) >= 300
    assert SAMPLE.stat().st_size < 3_000_000
    assert {r.category for r in traffic.requests} == {"chat", "code", "json", "tool_call"}
    assert {r.language for r in traffic.requests} == {"en", "de", "fr", "es", "it", "pt", "zh", "ja"}
    assert {r.endpoint for r in traffic.requests} == {"/v1/chat/completions", "/v1/completions"}
    assert all(r.body.tools for r in traffic.requests if r.category == "tool_call")
    assert 0.4 < sum(r.body.stream for r in traffic.requests) / len(traffic.requests) < 0.6
    turns = Counter(r.session_id for r in traffic.requests)
    assert 0.2 < sum(n for n in turns.values() if n > 1) / len(traffic.requests) < 0.3


def test_a_later_turn_of_the_sample_repeats_the_conversation_so_far() -> None:
    sessions: dict[str, tuple[Any, ...]] = {}
    for one in read_traffic(SAMPLE).requests:
        messages = one.body.messages or ()
        before = sessions.get(one.session_id, ())
        assert messages[: len(before)] == before
        sessions[one.session_id] = messages


def test_the_sample_has_the_outputs_and_the_arrivals_of_the_trace() -> None:
    requests = read_traffic(SAMPLE).requests
    assert median(r.body.max_tokens for r in requests) == pytest.approx(129, rel=0.1)
    assert (len(requests) - 1) / requests[-1].t_s == pytest.approx(5.53, rel=0.05)
