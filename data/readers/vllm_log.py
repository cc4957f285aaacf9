"""vLLM's text log with `--enable-log-requests`.

Source of the form: `RequestLogger.log_inputs` of vLLM (entrypoints/logger.py, later request_logger.py). Up to
0.11 or so one line tells all:

    INFO 08-06 10:19:36 [logger.py:41] Received request cmpl-1: prompt: 'text', params: SamplingParams(n=1, ...),
    prompt_token_ids: None, prompt_embeds shape: None, lora_request: None.

Later versions write `Request cmpl-1 details: prompt: 'text', prompt_token_ids: [...]` at level DEBUG and then
`Received request cmpl-1: params: SamplingParams(...), lora_request: None.`; the two are joined by the id. Times
have seconds and no year. The prompt is what the chat template made, as a Python string, so it is replayed as a
completion. `--max-log-len` cuts it without a mark: logs for replay must be written without that option.
Lines that are about no request are passed over.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from data.jsonl import Rejected
from data.readers.record import COMPLETION, Found, Line, Recorded, lengths_only

_RECEIVED = re.compile(r"Received request (?P<id>\S+): (?P<rest>.*)", re.S)
_DETAILS = re.compile(r"Request (?P<id>\S+) details: (?P<rest>.*)", re.S)
_TIME = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_TEXT = r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\""""
_PROMPT = re.compile(rf"prompt: (?P<text>{_TEXT}|None)", re.S)
_TOKEN_IDS = re.compile(r"prompt_token_ids: \[(?P<ids>[\d, ]*)\]")
_PARAMS = re.compile(r"params: (?P<kind>\w+)\(")
_STOP = re.compile(rf"\bstop=(\[(?:{_TEXT}|, )*+\])", re.S)
_STRUCTURED = re.compile(r"\b(?:guided_decoding|structured_outputs)=(?!None)")
_NUMBER = re.compile(r"\b(\w+)=(-?\d+(?:\.\d+)?(?:e-?\d+)?)\b")

# Values that ask for nothing; any other goes into the body, where our server takes it or refuses it by name.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
}
_WANTED = {"temperature", "seed", "max_tokens"}
_DAYS_S = 366 * 86_400.0
_BASE_YEAR = 2000  # a leap year, so that every day of a log without a year exists


def recognises(line: bytes) -> bool:
    text = line.decode("utf-8", "replace")
    return bool((_RECEIVED.search(text) and _PARAMS.search(text)) or _DETAILS.search(text))


def read(lines: Iterable[Line]) -> Iterator[Found]:
    details: dict[str, tuple[int, str]] = {}
    years, previous_s = 0.0, 0.0
    for number, content in lines:
        if b"equest " not in content:
            continue
        line = content.decode("utf-8", "replace")
        if found := _DETAILS.search(line):
            details[found["id"]] = (number, found["rest"])
        elif found := _RECEIVED.search(line):
            t_s = _time_s(line[: found.start()])
            if t_s is not None and t_s < previous_s - _DAYS_S / 2:
                years += _DAYS_S  # the log runs over New Year
            previous_s = previous_s if t_s is None else t_s
            _, told = details.pop(found["id"], (0, ""))
            yield _request(number, found["id"], years + previous_s, told, found["rest"])
    for request_id, (number, _) in details.items():
        yield Rejected(number, f"request {request_id} has no line with its parameters")


def _time_s(text: str) -> float | None:
    found = _TIME.search(text)
    if not found:
        return None
    try:
        moment = datetime(_BASE_YEAR, *map(int, found.groups()), tzinfo=UTC)  # type: ignore[misc,arg-type]
    except ValueError:
        return None
    return (moment - datetime(_BASE_YEAR, 1, 1, tzinfo=UTC)).total_seconds()


def _request(number: int, request_id: str, t_s: float, details: str, received: str) -> Found:
    # A prompt may hold the words that mark what follows it: what stands behind it is searched alone.
    where = details or received
    prompt = _PROMPT.match(where)
    behind = where[prompt.end() :] if prompt else where
    params = received if details or not prompt else behind
    kind = _PARAMS.search(params)
    if not kind or kind["kind"] != "SamplingParams":
        return Rejected(number, f"{kind['kind'] if kind else 'no SamplingParams'}: no request to generate text")
    if _STRUCTURED.search(params):
        return Rejected(number, "structured output is not supported")
    body = _body(params)
    if "max_tokens" not in body:
        return Rejected(number, "max_tokens is not recorded")
    ids = _TOKEN_IDS.search(behind)
    prompt_tokens = (ids["ids"].count(",") + 1 if ids["ids"].strip() else None) if ids else None
    row = {"custom_id": request_id, "t_s": t_s}
    if prompt and prompt["text"] != "None":
        try:
            text = ast.literal_eval(prompt["text"])
        except (SyntaxError, ValueError, SyntaxWarning, DeprecationWarning):
            return Rejected(number, "prompt: no Python string")
        return Recorded(number, {**row, "url": COMPLETION, "body": {**body, "prompt": text}}, prompt_tokens)
    if prompt_tokens is None:
        return Rejected(number, "the prompt is not recorded; vLLM writes it with VLLM_LOGGING_LEVEL=DEBUG")
    return Recorded(number, {**row, **lengths_only("vllm", prompt_tokens, body["max_tokens"])}, prompt_tokens)


def _body(params: str) -> dict[str, Any]:
    given = {name: _value(text) for name, text in _NUMBER.findall(params)}
    body = {name: value for name, value in given.items() if name in _WANTED}
    body |= {name: given[name] for name, none in _NEUTRAL.items() if name in given and given[name] not in none}
    if stop := _STOP.search(params):
        body |= {"stop": ast.literal_eval(stop[1])} if stop[1] != "[]" else {}
    return {"model": "vllm", **body}


def _value(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() else float(text)
