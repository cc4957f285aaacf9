"""Make data/golden/golden.jsonl: the golden set, short tasks by worked examples and look-ups in long texts.

    python -m data.golden.make_golden [FILE]

Short prompts come from families.yaml, long ones from long_prompts.py. Every
text was written for this project. The same seed gives the same file, byte for byte. Which prompts a model
passes is measured, not assumed: `python -m tasks.golden_table` (data/golden/README.md).
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from data.golden.long_prompts import long_tasks

FOLDER = Path(__file__).parent
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}

# Answer tokens by category: enough for the longest right answer. The tokenizer of SmolLM2 splits numbers
# into digits and other scripts into bytes.
MAX_TOKENS = {"copy": 20, "answer": 10, "json": 28, "tool_call": 24, "format": 14, "refusal": 10}


def golden_text() -> str:
    """The whole file."""
    return "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in [*short_prompts(), *long_prompts()])


def short_prompts() -> Iterator[dict[str, Any]]:
    families = yaml.safe_load((FOLDER / "families.yaml").read_text("utf-8"))
    for family in families:
        shots = [_turns(family, shot) for shot in family["shots"]]
        for number, item in enumerate(family["items"], start=1):
            asked, answer = _turns(family, item)
            name, contains = f"{family['name']}-{number}", family.get("contains", False)
            yield prompt(family["category"], family["language"], name, shots, asked, answer, contains)


def long_prompts() -> Iterator[dict[str, Any]]:
    for task in long_tasks():
        yield prompt(task.category, task.language, task.name, task.shots, task.asked, task.answer, task.contains)


def prompt(
    category: str, language: str, name: str, shots: list[tuple[str, Any]], asked: str, answer: Any, contains: bool
) -> dict[str, Any]:
    """One line of the file; the grader follows from the category and the right answer."""
    messages = []
    for question, reply in [*shots, (asked, None)]:
        messages.append({"role": "user", "content": question})
        if reply is not None:
            messages.append({"role": "assistant", "content": str(reply)})
    return {
        "prompt_id": f"{category}-{name.replace('_', '-')}",
        "category": category,
        "language": language,
        "messages": messages,
        "max_tokens": MAX_TOKENS[category],
        "grader": {"kind": "contains", "values": [str(answer)]} if contains else grader(category, answer),
    }


def grader(category: str, answer: Any) -> dict[str, Any]:
    """What judges the answer: an expected value of the category's own kind."""
    if category == "json":
        value = json.loads(answer)
        return {"kind": "json_schema", "schema": schema_of(value), "equals": value}
    if category == "tool_call":
        return call_of(answer)
    if category == "refusal":
        return {"kind": "refusal", "expected": answer == "refuse"}
    if category == "format":
        pattern = re.fullmatch(r"/(.+)/", answer)
        return {"kind": "regex", "pattern": pattern[1] if pattern else re.escape(answer)}
    if isinstance(answer, list):
        return {"kind": "one_of", "values": answer}
    return {"kind": "exact", "value": answer}


def schema_of(value: Any) -> dict[str, Any]:
    """The JSON schema of a value: its types, its keys, and nothing beside them."""
    kind = TYPES[type(value)]
    if isinstance(value, dict):
        properties = {key: schema_of(item) for key, item in value.items()}
        return {"type": kind, "properties": properties, "required": list(value), "additionalProperties": False}
    if isinstance(value, list):
        return {"type": kind, "items": schema_of(value[0]), "minItems": len(value), "maxItems": len(value)}
    return {"type": kind}


def call_of(text: str) -> dict[str, Any]:
    """The grader of a call that is written in either notation."""
    if text.startswith("{"):
        call = json.loads(text)
        name, arguments = call["name"], call["arguments"]
    else:
        node = ast.parse(text, mode="eval").body
        assert isinstance(node, ast.Call)
        name, arguments = ast.unparse(node.func), {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
    wanted = {key: {"type": TYPES[type(value)], "accept": [value]} for key, value in arguments.items()}
    return {"kind": "tool_call", "name": name, "arguments": wanted}


def _turns(family: dict[str, Any], turn: Any) -> tuple[str, Any]:
    """The user's text and the answer of a shot or an item; a text alone is its own answer."""
    text, answer = turn if isinstance(turn, list) else (turn, turn)
    return family.get("ask", "{}").replace("{}", str(text)), answer


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / "golden.jsonl"
    target.write_text(golden_text(), encoding="utf-8")
