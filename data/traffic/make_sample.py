"""Make data/traffic/sample.jsonl: 320 requests in OpenAI batch form, shaped like a public trace.

    python -m data.traffic.make_sample [FILE]

Lengths and arrivals follow the Azure LLM inference trace 2023, conversation (Azure/AzurePublicDataset,
CC-BY 4.0; Patel et al., "Splitwise", ISCA 2024): the knots below are quantiles of its columns
ContextTokens and GeneratedTokens and of its gaps. The trace holds no text and none of its rows are here;
every text was written for this project. The same seed gives the same file, byte for byte.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from data.traffic.material import FOLDER, fill, tokens_of

SEED = 2023
NUM_REQUESTS = 320
MULTI_TURN = 80  # requests that belong to a conversation of several turns
SINGLE_ONLY = 150  # prompts shorter than this stand alone

# Share of the trace at or below -> value.
QUANTILES = (0.01, 0.02, 0.05, 0.10, 0.15, 0.25, 0.35, 0.40, 0.45, 0.50, 0.60, 0.70, 0.75, 0.80, 0.85, 0.90,
             0.95, 0.98, 0.99, 0.995)  # fmt: skip
PROMPT_TOKENS = (29, 91, 181, 207, 372, 396, 414, 703, 984, 1020, 1071, 1130, 1189, 1315, 1876, 2734,
                 4083, 4098, 4142, 4831)  # fmt: skip
OUTPUT_TOKENS = (16, 24, 41, 54, 67, 85, 96, 103, 113, 129, 177, 384, 395, 400, 411, 424, 451, 540, 601,
                 643)  # fmt: skip
GAPS_S = (0.0005, 0.0014, 0.0063, 0.0161, 0.0264, 0.0483, 0.0735, 0.0873, 0.1019, 0.1184, 0.1587, 0.2136,
          0.2467, 0.2888, 0.3459, 0.4207, 0.5652, 0.7493, 0.8897, 1.0342)  # fmt: skip

# What the chat template adds: a turn's marks, and the system text it puts where none is given.
TURN_TOKENS = 5
DEFAULT_SYSTEM_TOKENS = 24

ASKS: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "asks.yaml").read_text("utf-8"))
LANGUAGES = ("en",) * 13 + ("de", "de", "fr", "fr", "es", "es", "it", "pt", "zh", "ja")
# Above this many tokens a person reads in the foreign language what the passages hold only in English.
OWN_TEXT_TOKENS = {"de": 800, "fr": 750, "es": 470, "it": 390, "pt": 370, "zh": 520, "ja": 540}
KINDS = ("document",) * 6 + ("listing",) * 5 + ("tool",) * 5 + ("table",) * 2 + ("transcript",) * 2 + ("log",)
CATEGORIES = {"document": "chat", "transcript": "chat", "listing": "code", "log": "code", "table": "json"}

COMPLETIONS = (
    "The three primary colours of light are",
    "def is_even(n: int) -> bool:\n    return",
    "Dear Ms Duarte,\n\nThank you for your letter of 3 May. We are glad to",
    "Q: What is the boiling point of water at sea level?\nA:",
    "Packing list for four days in the mountains:\n- rain jacket\n-",
)

SYSTEMS = (
    "You answer in the language of the question and keep to the text you are given.",
    "You work for a small public library. Be brief, friendly and exact.",
    "You are a senior engineer. Prefer short code to long explanations.",
)


def _tool(name: str, purpose: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": purpose, "parameters": schema}}


TOOLS = (
    _tool("get_weather", "Forecast for a city on a day.", city="string", date="string"),
    _tool("search_trains", "Trains between two stations.", origin="string", to="string", date="string"),
    _tool("book_seat", "Book one seat in a train.", train="string", window="boolean"),
    _tool("convert_currency", "Convert an amount at today's rate.", amount="number", into="string"),
    _tool("create_ticket", "Open a ticket for a customer.", product="string", text="string"),
    _tool("set_reminder", "Remind the user.", minutes="integer", text="string"),
)
TOOL_ASKS = (
    "Will it rain in {city} on the {day}th? Remind me an hour before I leave if so.",
    "Find a train from {city} to Bern on the {day}th and book a window seat.",
    "How much are {day}0 pounds in francs today?",
    "Open a ticket for the label printer in {city}: it prints every page twice.",
)
CITIES = ("Lyon", "Porto", "Leeds", "Graz", "Osaka", "Turin", "Malmo", "Ghent")


@dataclass
class Draft:
    """A request before its place in time is known."""

    session_id: str
    category: str
    language: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None
    material: list[str] = field(default_factory=list)  # what the conversation is about, for replies


def quantile_values(knots: Sequence[float], num: int, rng: random.Random) -> list[float]:
    """`num` values, one for each of `num` equal slices of the distribution, in random order."""
    values = []
    for index in range(num):
        share = (index + 0.5) / num
        above = next((at for at, q in enumerate(QUANTILES) if q >= share), len(QUANTILES) - 1)
        low_q, low = (QUANTILES[above - 1], knots[above - 1]) if above else (0.0, knots[0] * 0.5)
        part = min(1.0, (share - low_q) / (QUANTILES[above] - low_q))
        values.append(low + part * (knots[above] - low))
    rng.shuffle(values)
    return values


def plan_sessions(targets: list[float], rng: random.Random) -> list[list[float]]:
    """Prompt lengths by session: conversations of 2 to 4 growing turns, and the rest on their own."""
    pool, size = sorted(targets), 2
    sessions: list[list[float]] = []
    while len(targets) - len(pool) < MULTI_TURN:
        turns = [rng.choice([t for t in pool if SINGLE_ONLY <= t < 1800])]
        while len(turns) < size and (longer := [t for t in pool if t >= turns[-1] + 110]):
            turns.append(rng.choice(longer[: max(1, len(longer) // 3)]))
        for turn in turns:
            pool.remove(turn)
        sessions.append(turns)
        size = 2 + (size - 1) % 3
    return sessions + [[target] for target in pool]


def estimate(messages: Sequence[dict[str, Any]], language: str) -> float:
    """Tokens of a conversation through the chat template, of short texts in one language."""
    own_system = any(message["role"] == "system" for message in messages)
    text = sum(tokens_of(message["content"], language) for message in messages)
    return text + TURN_TOKENS * (len(messages) + 1) + (0 if own_system else DEFAULT_SYSTEM_TOKENS)


def first_turn(session_id: str, target: float, rng: random.Random) -> Draft:
    """The opening of a conversation of about `target` prompt tokens."""
    language = rng.choice(LANGUAGES)
    if target < 32:
        return Draft(session_id, "chat", "en", [], prompt=rng.choice(COMPLETIONS))
    if target < 130:
        return _short(session_id, language, target, rng)
    kind = rng.choice(KINDS if language == "en" else [kind for kind in KINDS if kind in ASKS[language]])
    if kind == "tool":
        return _with_tools(session_id, target, rng)
    ask = rng.choice(ASKS[language][kind])
    messages = [{"role": "user", "content": ask}]
    if rng.random() < 0.4:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
    material = _material(kind, language, target - estimate(messages, language), rng)
    messages[-1]["content"] = _beside(ask, material, rng)
    draft = Draft(session_id, CATEGORIES[kind], language, messages, material=[material])
    if kind == "document" and rng.random() < 0.2:
        draft.prompt = f"{material}\n\n{ask}\n"
    return draft


def _beside(ask: str, material: str, rng: random.Random) -> str:
    """Most people paste first and ask then."""
    return f"{ask}\n\n{material}" if rng.random() < 0.3 else f"{material}\n\n{ask}"


def _material(kind: str, language: str, tokens: float, rng: random.Random) -> str:
    own = tokens <= OWN_TEXT_TOKENS.get(language, tokens)
    return fill(kind, language if own else "en", tokens, rng)


def _short(session_id: str, language: str, target: float, rng: random.Random) -> Draft:
    if target > 80 and rng.random() < 0.5:
        return _with_tools(session_id, target, rng)
    about = "code" if language == "en" and rng.random() < 0.4 else "plain"
    ask = rng.choice(ASKS[language][about])
    return Draft(session_id, "code" if about == "code" else "chat", language, [{"role": "user", "content": ask}])


def _with_tools(session_id: str, target: float, rng: random.Random) -> Draft:
    """A request that offers functions; what was said before fills it up."""
    tools = rng.sample(TOOLS, rng.randrange(1, 5))
    names = ", ".join(tool["function"]["name"] for tool in tools)
    ask = rng.choice(TOOL_ASKS).format(city=rng.choice(CITIES), day=rng.randrange(4, 20))
    system = {"role": "system", "content": f"You can call these functions: {names}. Call one or answer."}
    messages = [system, {"role": "user", "content": ask}]
    room = target - estimate(messages, "en")
    material = ""
    if room > 60:
        material = fill("transcript", "en", room, rng)
        messages[-1]["content"] = f"This was said before:\n{material}\n\n{ask}"
    return Draft(session_id, "tool_call", "en", messages, tools=tools, material=[material or ask])


def next_turn(before: Draft, before_tokens: float, target: float, rng: random.Random) -> Draft:
    """The conversation one turn on: a reply that quotes the material, then a question or more material."""
    asks = ASKS[before.language]
    excerpt = _excerpt(before.material[-1])
    reply = rng.choice(asks["reply"]).format(excerpt)
    added = [{"role": "assistant", "content": reply}]
    room = target - before_tokens - tokens_of(reply, "en") - 2 * TURN_TOKENS
    material = list(before.material)
    if room > 90:
        kind = {"code": "listing", "json": "table", "tool_call": "transcript"}.get(before.category, "document")
        more = _material(kind, before.language, room - tokens_of(asks["more"], before.language), rng)
        added.append({"role": "user", "content": _beside(asks["more"], more, rng)})
        material.append(more)
    else:
        added.append({"role": "user", "content": rng.choice(asks["follow"])})
    return Draft(
        before.session_id, before.category, before.language, before.messages + added, before.tools,
        material=material,
    )  # fmt: skip


def _excerpt(material: str) -> str:
    """What a reply quotes: two definitions of a listing, the last row of a table, else two sentences."""
    lines = [line for line in material.split("\n") if line.strip() and not line.startswith("# ")] or [material]
    definitions = [line.rstrip(":") for line in lines if line.startswith(("def ", "class "))]
    if definitions:
        return f"`{'` and `'.join(definitions[:2])}`."
    if lines[0].startswith("order,"):
        return lines[-1]
    mark = "。" if "。" in lines[0] else ". "
    return mark.join(lines[0].split(mark)[:2]).rstrip(". ") + ("。" if mark == "。" else ".")


def drafts(rng: random.Random) -> list[list[Draft]]:
    """Every session with its turns."""
    sessions = []
    for number, turns in enumerate(plan_sessions(quantile_values(PROMPT_TOKENS, NUM_REQUESTS, rng), rng)):
        draft = first_turn(f"session-{number:03d}", turns[0], rng)
        if len(turns) > 1:
            draft.prompt = None  # a conversation needs the chat endpoint
        session = [draft]
        for last, target in itertools.pairwise(turns):
            session.append(next_turn(session[-1], last, target, rng))
        sessions.append(session)
    return sessions


def in_order(sessions: list[list[Draft]], rng: random.Random) -> list[Draft]:
    """All requests in order of arrival: sessions interleave, the turns of one keep their order."""
    slots = [index for index, session in enumerate(sessions) for _ in session]
    rng.shuffle(slots)
    upcoming = [iter(session) for session in sessions]
    return [next(upcoming[index]) for index in slots]


def sample_text() -> str:
    """The whole file."""
    rng = random.Random(SEED)  # noqa: S311 - a sample, no secret
    ordered = in_order(drafts(rng), rng)
    outputs = quantile_values(OUTPUT_TOKENS, NUM_REQUESTS, rng)
    gaps = quantile_values(GAPS_S, NUM_REQUESTS, rng)
    lines, t_s = [], 0.0
    for number, (draft, output, gap) in enumerate(zip(ordered, outputs, gaps, strict=True)):
        lines.append(_line(number, draft, round(output), round(t_s, 4), stream=rng.random() < 0.5))
        t_s += gap
    return "".join(lines)


def _line(number: int, draft: Draft, max_tokens: int, t_s: float, stream: bool) -> str:
    text = {"messages": draft.messages} if draft.prompt is None else {"prompt": draft.prompt}
    body = {"model": "smollm2-135m-instruct", **text, "max_tokens": max_tokens, "temperature": 0}
    if draft.tools:
        body["tools"] = draft.tools
    request = {
        "custom_id": f"request-{number:04d}",
        "method": "POST",
        "url": "/v1/chat/completions" if draft.prompt is None else "/v1/completions",
        "body": body | {"stream": stream},
        "t_s": t_s,
        "session_id": draft.session_id,
        "category": draft.category,
        "language": draft.language,
    }
    return json.dumps(request, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / "sample.jsonl"
    target.write_text(sample_text(), encoding="utf-8")
