"""Tools at the chat endpoint: offered through the template, called in OpenAI's form, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attention.model import Chunk
from tests.attention.fake_runner import EOS, FakeRunner
from tests.attention.serve.fake_instance import Running, serving

ASSISTANT = b"<assistant>"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "temperature": 0}
TAGGED = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
ASK = {"name": "weather", "arguments": '{"city": "Bern"}'}


class ScriptedRunner(FakeRunner):
    """Answers each chat with `script`, a byte a token, then the end token."""

    def __init__(self, template: str) -> None:
        super().__init__(num_pages=256, max_context=512)
        self.script = b""
        self.seen: list[dict[str, Any]] = []
        self.tokenizer.chat_template = template
        render = self.tokenizer.apply_chat_template

        def remember(messages: list[dict[str, Any]], **given: Any) -> str:
            self.seen.append({"messages": messages, "tools": given["tools"]})
            return render(messages, **given)

        self.tokenizer.apply_chat_template = remember  # type: ignore[method-assign]

    def _run(self, chunk: Chunk, backend: str) -> list[float]:
        values = super()._run(chunk, backend)
        end = chunk.start + len(chunk.token_ids)
        read = bytes(self._cache[self._slot(chunk, position)] % 256 for position in range(end))
        begin = read.rfind(ASSISTANT)
        if begin >= 0:
            said = end - begin - len(ASSISTANT)
            values[-1] = self.script[said] if said < len(self.script) else EOS
        return values


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("lake"), ScriptedRunner("{% if tools %}<tool_call>")) as running:
        yield running


@pytest.fixture
def say(tagged: Running) -> Callable[[str], ScriptedRunner]:
    def set_script(text: str) -> ScriptedRunner:
        runner = tagged.runner
        assert isinstance(runner, ScriptedRunner)
        runner.script = text.encode()
        runner.seen.clear()
        return runner

    return set_script


def whole(running: Running, **changes: Any) -> dict[str, Any]:
    response = running.post("/v1/chat/completions", {**CHAT, **changes})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def streamed(running: Running, **changes: Any) -> list[dict[str, Any]]:
    with running.client.stream("POST", "/v1/chat/completions", json={**CHAT, **changes, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [json.loads(line)["choices"][0] for line in lines[:-2]]


def test_a_call_in_the_answer_becomes_a_tool_call(tagged: Running, say: Callable[[str], ScriptedRunner]) -> None:
    say(f"I look.\n{TAGGED}")
    choice = whole(tagged)
    [call] = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", ASK)
    assert call["id"].startswith("call_")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")


def test_an_answer_that_only_calls_has_no_content(tagged: Running, say: Callable[[str], ScriptedRunner]) -> None:
    say(TAGGED + TAGGED)
    message = whole(tagged)["message"]
    assert message["content"] is None
    assert [call["function"] for call in message["tool_calls"]] == [ASK, ASK]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_a_stream_gives_each_call_whole_in_one_delta(tagged: Running, say: Callable[[str], ScriptedRunner]) -> None:
    say(f"I look.\n{TAGGED}\n{TAGGED}")
    chunks = streamed(tagged)
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "I look."
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert [(call["index"], call["function"]) for call in calls] == [(0, ASK), (1, ASK)]
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_one_call_at_a_time_is_kept_on_request(tagged: Running, say: Callable[[str], ScriptedRunner]) -> None:
    say(TAGGED + TAGGED)
    assert len(whole(tagged, parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    chunks = streamed(tagged, parallel_tool_calls=False)
    assert sum("tool_calls" in chunk["delta"] for chunk in chunks) == 1


@pytest.mark.parametrize("changes", [{"tool_choice": "none"}, {"tools": None}, {"tools": []}])
def test_without_tools_or_with_none_chosen_an_answer_is_text(
    tagged: Running, say: Callable[[str], ScriptedRunner], changes: dict[str, Any]
) -> None:
    runner = say(TAGGED)
    choice = whole(tagged, **changes)
    assert (choice["message"]["content"], choice["finish_reason"]) == (TAGGED, "stop")
    assert "tool_calls" not in choice["message"]
    assert [seen["tools"] for seen in runner.seen] == [None]


def test_an_answer_that_was_cut_off_says_length(tagged: Running, say: Callable[[str], ScriptedRunner]) -> None:
    say(f"{TAGGED} more")
    choice = whole(tagged, max_tokens=len(TAGGED) + 2)
    assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "length")
    say(TAGGED)
    choice = whole(tagged, max_tokens=20)
    assert (choice["message"]["content"], choice["finish_reason"]) == (TAGGED[:20], "length")


def test_logprobs_of_a_call_come_with_its_delta(tagged: Running, say: Callable[[str], ScriptedRunner]) -> None:
    say(f"a{TAGGED}b")
    chunks = streamed(tagged, logprobs=True)
    told = [entry["token"] for chunk in chunks for entry in (chunk["logprobs"] or {"content": []})["content"]]
    assert "".join(told) == f"a{TAGGED}b<special {EOS}>", "the end token has no text and is told"


def test_earlier_calls_and_results_reach_the_template(tagged: Running, say: Callable[[str], ScriptedRunner]) -> None:
    runner = say("It rains.")
    call = {"id": "call_1", "type": "function", "function": ASK}
    messages = [
        {"role": "user", "content": "Bern?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    assert whole(tagged, messages=messages)["message"]["content"] == "It rains."
    [seen] = runner.seen
    assert seen["tools"] == TOOLS
    # Templates write arguments as JSON themselves.
    assert seen["messages"][1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Bern"}}
    assert seen["messages"][2] == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_teaches_plain_json_gets_plain_json_read(tmp_path: Path, stream: bool) -> None:
    runner = ScriptedRunner('{% if tools %}Respond with {"name": name, "parameters": {}}')
    runner.script = b'{"name": "weather", "parameters": {"city": "Bern"}}'
    with serving(tmp_path, runner) as running:
        if stream:
            chunks = streamed(running)
            [call] = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
            assert chunks[-1]["finish_reason"] == "tool_calls"
        else:
            [call] = whole(running)["message"]["tool_calls"]
        assert call["function"] == ASK
        runner.script = b"no JSON"
        assert whole(running)["message"] == {"role": "assistant", "content": "no JSON"}
