"""The form that every reader brings a log into: a row of our own traffic file, with the line it stood on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic_core import from_json

from data.jsonl import Rejected

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
Line = tuple[int, bytes]  # 1-based number, content without its line break


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of a log, not yet checked and not yet redacted.

    `row` has the keys of data.requests.TrafficRequest: custom_id, method, url, body and, where the log has them,
    t_s (seconds from any origin), session_id, category, language, shape (a prompt of which only the length is
    known). `body.max_tokens` is what the answer had, where the log tells it: replayed, it makes the same load.
    """

    line: int
    row: Mapping[str, Any]
    prompt_tokens: int | None = None  # as the log counted them, by the tokenizer of its own model
    complete: bool = False  # our own form: what it lacks is a mistake; of other logs it is derived


Found = Recorded | Rejected


def json_lines(lines: Iterable[Line]) -> Iterator[tuple[int, dict[str, Any]] | Rejected]:
    """The JSON object of every line; a line that is none is rejected."""
    for number, content in lines:
        try:
            value = from_json(content)
        except ValueError as error:
            yield Rejected(number, f"Invalid JSON: {error}")
            continue
        yield (number, value) if isinstance(value, dict) else Rejected(number, "a JSON object is needed")


def object_of(value: Any) -> Any:
    """JSON that some exports write as text inside JSON; text that is no JSON object or array stays text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return from_json(value)
        except ValueError:
            return value
    return value


def first_of(row: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that is set: exports spell one field in several ways and write "" for unset."""
    return next((row[name] for name in names if row.get(name) not in (None, "", {}, [])), None)


def seconds(text: Any) -> float:
    """An ISO 8601 time as seconds since 1970; without an offset it is UTC. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"a time is needed, not {type(text).__name__}")
    moment = datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def count_of(value: Any) -> int | None:
    """A number of tokens, or None for what is none; logs write 0 for a count that they do not have."""
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return count if count > 0 else None


def lengths_only(model: str, prompt_tokens: int, output_tokens: int, **shape: Any) -> dict[str, Any]:
    """url, body and shape of a request without its text."""
    return {
        "url": COMPLETION,
        "body": {"model": model, "max_tokens": output_tokens, "temperature": 0},
        "shape": {"prompt_tokens": prompt_tokens, **shape},
    }


def with_text(
    body: Mapping[str, Any], prompt_tokens: int | None, output_tokens: int | None, model: str
) -> dict[str, Any] | str:
    """url and body of a request as a client sent it, or by its lengths if the log holds no text; else why not."""
    limit = output_tokens or first_of(body, "max_completion_tokens", "max_tokens")
    if limit is None:
        return "neither the tokens of the answer nor max_tokens is recorded"
    if "messages" not in body and "prompt" not in body:
        if prompt_tokens is None or output_tokens is None:
            return "neither a prompt nor its length in tokens is recorded"
        return lengths_only(model, prompt_tokens, output_tokens)
    sent = {key: value for key, value in body.items() if key != "max_completion_tokens" and value is not None}
    return {
        "url": CHAT if "messages" in body else COMPLETION,
        "body": {"model": model, **sent, "max_tokens": limit},
    }
