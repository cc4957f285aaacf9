"""Log-probabilities as clients get them: OpenAI's two forms and vLLM's of prompts, whole and streamed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.serve.detokenize import Vocabulary
from tests.attention.fake_runner import FakeRunner, FakeTokenizer, expected_tokens
from tests.attention.serve.fake_instance import Running, serving

PROMPT = "hello"
PLAIN = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, "temperature": 0}
NUM_PROMPT = len(PROMPT)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("lake"), FakeRunner(num_pages=512, eos_token_ids=frozenset())) as running:
        yield running


def choice_of(running: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = running.post(path, body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def chunks_of(running: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with running.client.stream("POST", path, json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [json.loads(line)["choices"][0] for line in lines[:-2]]  # the usage and the end


def peak_logprob() -> float:
    """Of the fake's likeliest token: a peak of 3 on a slope from 0 to 1."""
    logits = torch.linspace(0, 1, 300)
    logits[100] = 3.0
    return float(torch.log_softmax(logits, -1)[100])


def test_a_chat_tells_each_token_with_its_bytes_and_alternatives(shared: Running) -> None:
    choice = choice_of(shared, "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 3})
    content = choice["logprobs"]["content"]
    assert len(content) == 40
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["logprob"] == pytest.approx(peak_logprob(), abs=0.02)
        assert entry["top_logprobs"][0] == {name: entry[name] for name in ("token", "logprob", "bytes")}
        assert len(entry["top_logprobs"]) == 3
    told = bytes(byte for entry in content if not entry["token"].startswith("<special") for byte in entry["bytes"])
    assert told.decode(errors="replace") == choice["message"]["content"]


def test_a_chat_without_top_logprobs_tells_the_tokens_alone(shared: Running) -> None:
    content = choice_of(shared, "/v1/chat/completions", {**CHAT, "logprobs": True})["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * 40


@pytest.mark.parametrize("temperature", [0, 1.7])
def test_logprobs_are_the_models_whatever_the_temperature(shared: Running, temperature: float) -> None:
    body = {**CHAT, "max_tokens": 1, "temperature": temperature, "seed": 1, "logprobs": True, "top_logprobs": 1}
    [entry] = choice_of(shared, "/v1/chat/completions", body)["logprobs"]["content"]
    assert entry["top_logprobs"][0]["logprob"] == pytest.approx(peak_logprob(), abs=0.02)


def test_a_completion_tells_parallel_lists_whose_offsets_lie_in_its_text(shared: Running) -> None:
    choice = choice_of(shared, "/v1/completions", {**PLAIN, "logprobs": 2})
    told, text = choice["logprobs"], choice["text"]
    assert {name: len(values) for name, values in told.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 40
    )
    ids = expected_tokens(PROMPT.encode(), 40, frozenset())
    placed = 0
    for before, token, offset, token_id in zip([0, *ids], told["tokens"], told["text_offset"], ids, strict=False):
        if max(before, token_id) < 128:
            assert token == chr(token_id) == text[offset]
            placed += 1
    assert placed > 3
    assert told["text_offset"] == sorted(told["text_offset"])
    assert all(len(top) >= 2 for top in told["top_logprobs"])
    assert choice_of(shared, "/v1/completions", {**PLAIN, "logprobs": 0})["logprobs"]["top_logprobs"] == [None] * 40


@pytest.mark.parametrize("stop", [False, True])
def test_a_stream_tells_what_the_whole_answer_tells(shared: Running, stop: bool) -> None:
    for path, body in (
        ("/v1/completions", {**PLAIN, "logprobs": 2}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    ):
        if stop:
            choice = choice_of(shared, path, body)
            text = choice["message"]["content"] if "chat" in path else choice["text"]
            body = {**body, "stop": text[12:15]}
        whole = choice_of(shared, path, body)["logprobs"]
        told = [chunk["logprobs"] for chunk in chunks_of(shared, path, body) if chunk["logprobs"]]
        assert len(told) > 3, "as the text comes, not at the end"
        names = ("content",) if "chat" in path else tuple(whole)
        assert {name: [one for part in told for one in part[name]] for name in names} == {
            name: whole[name] for name in names
        }


def test_tokens_cut_off_by_a_stop_string_are_not_told(shared: Running) -> None:
    text = choice_of(shared, "/v1/completions", PLAIN)["text"]
    choice = choice_of(shared, "/v1/completions", {**PLAIN, "logprobs": 0, "stop": text[12:15]})
    assert choice["text"] == text[:12]
    assert all(offset < 12 for offset in choice["logprobs"]["text_offset"])


def test_an_echo_begins_with_the_prompt_and_tells_its_logprobs_the_first_of_them_null(shared: Running) -> None:
    choice = choice_of(shared, "/v1/completions", {**PLAIN, "echo": True, "logprobs": 1})
    told = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert told["tokens"][:NUM_PROMPT] == list(PROMPT)
    assert told["text_offset"][: NUM_PROMPT + 1] == list(range(NUM_PROMPT + 1))
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert all(value < 0 for value in told["token_logprobs"][1:])
    assert {len(values) for values in told.values()} == {NUM_PROMPT + 40}
    chunks = chunks_of(shared, "/v1/completions", {**PLAIN, "echo": True, "logprobs": 1})
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    streamed = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    assert {name: [one for part in streamed for one in part[name]] for name in told} == told


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_an_echo_of_nothing_more_scores_the_prompt(shared: Running, stream: bool, logprobs: int | None) -> None:
    body = {**PLAIN, "max_tokens": 0, "echo": True, "logprobs": logprobs}
    if stream:
        chunks = chunks_of(shared, "/v1/completions", body)
        assert "".join(chunk["text"] for chunk in chunks) == PROMPT
        told, reason = chunks[0]["logprobs"], chunks[-1]["finish_reason"]
    else:
        choice = choice_of(shared, "/v1/completions", body)
        assert choice["text"] == PROMPT
        told, reason = choice["logprobs"], choice["finish_reason"]
    assert reason == "length"
    assert (told and len(told["tokens"])) == (logprobs and NUM_PROMPT)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_come_as_vllm_gives_them(shared: Running, path: str) -> None:
    body = {**(CHAT if "chat" in path else PLAIN), "max_tokens": 2, "prompt_logprobs": 2}
    found = choice_of(shared, path, body)["prompt_logprobs"]
    ids = list(b"<user>hello\n<assistant>" if "chat" in path else PROMPT.encode())
    assert len(found) == len(ids)
    assert found[0] is None
    for token_id, entry in zip(ids[1:], found[1:], strict=True):
        assert entry[str(token_id)]["decoded_token"] == chr(token_id)
        assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"}
        assert len(entry) in (2, 3)
        assert {one["rank"] for one in entry.values()} >= {1, 2}
    assert "prompt_logprobs" not in choice_of(shared, path, {**body, "prompt_logprobs": None})


def test_an_echo_and_prompt_logprobs_each_tell_as_many_as_they_were_asked(shared: Running) -> None:
    body = {**PLAIN, "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 4}
    choice = choice_of(shared, "/v1/completions", body)
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    assert all(len(entry) >= 4 for entry in choice["prompt_logprobs"][1:])


def test_nan_in_the_prompts_logits_is_an_error_and_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(num_pages=256)
    logits = runner.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        if len(found) > 1:
            found[1] = math.nan
        return found

    with serving(tmp_path, runner) as running:
        monkeypatch.setattr(runner, "logits", broken)
        response = running.post("/v1/completions", {**PLAIN, "prompt_logprobs": 0})
        assert response.status_code == 500
        assert "logits of the prompt hold NaN or Inf" in response.json()["error"]["message"]
        assert [row["status"] for row in running.rows()] == [500]
        assert running.post("/v1/completions", PLAIN).status_code == 200


def test_a_part_of_a_character_is_told_by_its_bytes() -> None:
    found = Vocabulary(FakeTokenizer())
    assert (found[0xE6].text, found[0xE6].raw) == ("bytes:\\xe6", b"\xe6")
    assert (found[ord("a")].text, found[ord("a")].raw) == ("a", b"a")
    assert (found[400].text, found[400].raw) == ("token_id:400", None)


def test_tokens_of_a_byte_fallback_and_leading_spaces_are_told_as_they_stand_in_a_text() -> None:
    class SentencePieces:
        pieces = ("\u2581the", "<0xE6>", "ing")

        def convert_ids_to_tokens(self, token_id: int) -> str:
            return self.pieces[token_id]

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return ("the", "\ufffd", "ing")[ids[0]]

    found = Vocabulary(SentencePieces())
    assert [found[i].text for i in range(3)] == [" the", "bytes:\\xe6", "ing"]
    assert [found[i].raw for i in range(3)] == [b" the", b"\xe6", b"ing"]
