"""Reads a log of recorded requests: whatever its form, what comes out is safe to keep and can be replayed.

Our own form is JSON Lines in OpenAI's batch form (`custom_id`, `method`, `url`, `body`) with four columns
beside it: `t_s` (arrival, seconds), `session_id`, `category`, `language`. `data/readers` brings other logs into
it. Credentials and addresses are taken out first (data/redact.py). A line that cannot be used is counted with
its number and the reason, and the rest goes on: no line vanishes silently. What the server would answer with
400 (`n=2`, `logprobs`, an unknown field) is such a line: played, it would count as a request that the candidate
lost.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from attention.errors import UserError
from data import readers
from data.features import UNDETERMINED, language_of
from data.jsonl import Rejected, first_error
from data.readers import Recorded
from data.redact import redact, redact_all
from data.requests import Traffic, TrafficRequest, bucket_end
from data.sample import Entry, draw

SAMPLE_SEED = "attention-release"  # one file gives one sample: every stage of a release reads it anew
BYTES_PER_TOKEN = 4  # of UTF-8, roughly; where a log counts no tokens, for the strata of the sample alone

_ABOUT_THE_CLIENT = ("user", "metadata", "store")  # no bearing on the result, and they name people
_PLAIN_ID = re.compile(r"[!-~]{1,200}")  # what a header can carry


def read_traffic(path: Path, *, format: str | None = None, max_requests: int | None = None) -> Traffic:
    """Requests of a log in order of arrival, and the lines that could not be used.

    `format` is a name of data.readers.FORMATS; without, the content tells. With `max_requests` that many are
    drawn (data/sample.py) in two passes, and only they are ever held. Raises UserError when the file cannot be
    read, its format is unknown, or it holds no usable line.
    """
    name = format or readers.format_of(path)
    rejected: list[Rejected] = []
    requests: list[TrafficRequest] = []
    positions, entries = [], []
    for position, found, request in _checked(path, name, rejected):
        if max_requests is None:
            requests.append(request)
        else:
            positions.append(position)
            entries.append(_entry(found, request))
    report = None
    if max_requests is not None:
        drawn, report = draw(entries, max_requests, SAMPLE_SEED, rejected=len(rejected))
        kept = {positions[index] for index in drawn}
        requests = [_request(found) for position, found in _recorded(path, name) if position in kept]
    if not requests:
        why = f"; line {rejected[0].line}: {rejected[0].reason}" if rejected else ", it holds no request"
        raise UserError(f"traffic {path}: no usable line{why}")
    requests.sort(key=lambda request: request.t_s)
    return Traffic(requests if name == readers.BATCH else _from_zero(requests), rejected, name, report)


def _checked(path: Path, name: str, rejected: list[Rejected]) -> Iterator[tuple[int, Recorded, TrafficRequest]]:
    """Usable requests with their position in the log; what is not usable goes to `rejected`."""
    used: set[str] = set()
    for position, found in enumerate(readers.read(path, name)):
        if isinstance(found, Rejected):
            rejected.append(Rejected(found.line, redact(found.reason)))
            continue
        try:
            request = _request(found)
        except ValidationError as error:
            rejected.append(Rejected(found.line, redact(first_error(error))))
            continue
        if request.custom_id in used:
            rejected.append(Rejected(found.line, f"{request.custom_id!r} was used by an earlier line"))
            continue
        used.add(request.custom_id)
        yield position, found, request


def _recorded(path: Path, name: str) -> Iterator[tuple[int, Recorded]]:
    for position, found in enumerate(readers.read(path, name)):
        if isinstance(found, Recorded):
            yield position, found


def _request(found: Recorded) -> TrafficRequest:
    """The request without credentials and addresses; what its log does not tell is derived. Raises ValidationError."""
    row = redact_all(dict(found.row))
    if isinstance(row.get("body"), dict):
        row["body"] = {key: value for key, value in row["body"].items() if key not in _ABOUT_THE_CLIENT}
    for name in ("custom_id", "session_id"):
        if name in row:
            row[name] = _identifier(found.row[name])
    if not found.complete:
        row = {"method": "POST", "session_id": row.get("custom_id"), "category": "", "language": UNDETERMINED, **row}
    request = TrafficRequest.model_validate_json(json.dumps(row))
    if found.complete:
        return request
    return request.model_copy(update={"category": _category(request), "language": language_of(_question(request))})


def _identifier(value: Any) -> Any:
    """An id as it is, or a hash of it where it holds an address, a credential or what no header can carry."""
    if not isinstance(value, str) or not value or (_PLAIN_ID.fullmatch(value) and redact(value) == value):
        return value
    return "id-" + hashlib.sha256(value.encode("utf-8", "replace")).hexdigest()[:16]


def _category(request: TrafficRequest) -> str:
    if request.shape is not None:
        return "synthetic"
    for feature, category in (("tools", "tool_call"), ("json", "json")):
        if feature in request.features:
            return category
    return "chat" if request.body.messages else "completion"


def _question(request: TrafficRequest) -> str:
    """The text whose language counts: the last of the user, or the prompt."""
    asked = [message.content for message in request.body.messages or () if message.role == "user"]
    return asked[-1] if asked else request.body.prompt or ""


def _entry(found: Recorded, request: TrafficRequest) -> Entry:
    texts = [request.body.prompt or "", *(message.content for message in request.body.messages or ())]
    estimate = max(1, sum(len(text.encode()) for text in texts) // BYTES_PER_TOKEN)
    prompt_tokens = found.prompt_tokens or estimate
    return Entry(
        prompt_tokens=prompt_tokens,
        output_tokens=request.body.max_tokens,
        prompt_bucket=bucket_end(prompt_tokens),
        language=request.language,
        features="+".join(request.features) or "plain",
    )


def _from_zero(requests: list[TrafficRequest]) -> list[TrafficRequest]:
    """Arrivals since the first one: logs count from 1970, from New Year or from their own start."""
    return [request.model_copy(update={"t_s": request.t_s - requests[0].t_s}) for request in requests]
