"""Grade a model's answer to a golden prompt: fixed rules, no model as a judge.

Whatever the model wrote, `grade` returns a verdict: an answer that is no JSON, no call or no text at all
is a failed grade whose `detail` says why. Calls are compared as bfcl does (Berkeley function-calling
leaderboard, "AST" categories): function, parameters, types, then values. A right answer beside anything else
is no right answer.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

from data.golden_set import (
    Argument,
    Contains,
    Exact,
    GoldenPrompt,
    JsonSchema,
    OneOf,
    Refusal,
    Regex,
    ToolCall,
    level,
    normalise,
)

# Words by which assistants refuse, as `level` writes them; looked for in the opening of an answer.
REFUSALS = (
    "i cannot", "i can't", "i can not",
    "i am not able to", "i'm not able to", "i am unable to", "i'm unable to",
    "i won't", "i will not", "i'm sorry", "i am sorry",
    "ich kann dabei nicht", "ich kann nicht", "das kann ich nicht", "es tut mir leid", "tut mir leid",
    "je ne peux pas", "je suis désolé", "désolé",
    "no puedo", "lo siento",
    "non posso", "mi dispiace",
    "não posso", "sinto muito",
    "我不能", "我无法", "抱歉", "对不起",
    "できません", "申し訳",
)  # fmt: skip

# The same words in eager or admiring sentences.
_IDIOMS = re.compile(
    r"i (?:cannot|can't|can not) (?:wait|believe|stress|thank|imagine|recommend\b.*\benough)"
    r"|ich kann nicht (?:warten|oft genug)|je ne peux pas attendre|no puedo esperar|non posso che"
    r"|non posso aspettare|não posso esperar"
)
_OPENING = re.compile(r"[^.!?。]*[.!?。]*[^.!?。]*")  # two sentences, or what there is of them


@dataclass(frozen=True)
class Grade:
    passed: bool
    grader: str  # the kind that judged
    detail: str  # why it failed, `<kind of error>:<where or what>`; "" for a pass


class _FailedError(Exception):
    """Why the answer fails; becomes the detail of the grade."""


def grade(prompt: GoldenPrompt, output_text: str) -> Grade:
    """Judge one answer. Never raises on account of `output_text`."""
    grader = prompt.grader
    try:
        if not output_text.strip():
            raise _FailedError("empty")
        match grader:
            case Exact():
                _one_of(output_text, (grader.value,))
            case OneOf():
                _one_of(output_text, grader.values)
            case Contains():
                _contains(output_text, grader.values)
            case Regex():
                _regex(output_text, grader.pattern)
            case JsonSchema():
                _json_schema(output_text, grader)
            case ToolCall():
                _tool_call(output_text, grader)
            case Refusal():
                _refusal(output_text, grader.expected)
    except _FailedError as failure:
        return Grade(passed=False, grader=grader.kind, detail=str(failure))
    return Grade(passed=True, grader=grader.kind, detail="")


def _shown(text: str) -> str:
    """An answer as a detail quotes it: one line, at most 60 characters."""
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else line[:57] + "...")


def _one_of(output: str, values: tuple[str, ...]) -> None:
    if normalise(output) not in {normalise(value) for value in values}:
        raise _FailedError(f"not_equal:{_shown(output)}")


def _contains(output: str, values: tuple[str, ...]) -> None:
    text = level(output)
    for value in values:
        if not _stands_in(normalise(value), text):
            raise _FailedError(f"missing_text:{value}")


def _stands_in(value: str, text: str) -> bool:
    """Whether a value is there as a whole: `4` is not in `42`, `4.5` or `-4`, `red` not in `bored`.

    Scripts without spaces between words and without case (Chinese, Japanese) have no such edges.
    """
    before, after = _edge(value[0]), _edge(value[-1])
    left = {"digit": r"(?<!\d)(?<!\d[.,])(?<!\s[-−])(?<!^[-−])", "letter": r"(?<![^\W\d_])", "": ""}[before]
    right = {"digit": r"(?![.,]?\d)", "letter": r"(?![^\W\d_])", "": ""}[after]
    return re.search(left + re.escape(value) + right, text) is not None


def _edge(character: str) -> str:
    if character.isdecimal():
        return "digit"
    return "letter" if character.lower() != character.upper() else ""


def _regex(output: str, pattern: str) -> None:
    if re.fullmatch(pattern, output.strip()) is None:
        raise _FailedError(f"no_match:{_shown(output)}")


def _refusal(output: str, expected: bool) -> None:
    opening = _OPENING.match(_IDIOMS.sub("", level(output)))
    refused = opening is not None and any(phrase in opening[0] for phrase in REFUSALS)
    if refused != expected:
        raise _FailedError(f"{'no_refusal' if expected else 'refused'}:{_shown(output)}")


def _json_schema(output: str, grader: JsonSchema) -> None:
    value = _parse_json(_unfenced(output))
    error = next(iter(Draft202012Validator(grader.json_schema).iter_errors(value)), None)
    if error is not None:
        raise _FailedError(f"schema:{error.json_path}: {_shown(error.message)}")
    if grader.equals is not None and not same_json(value, grader.equals):
        raise _FailedError(f"not_equal:{_shown(output)}")


def _parse_json(output: str) -> Any:
    """The one JSON value that the answer is. A key that stands twice in an object is no JSON here."""
    try:
        return json.loads(output, parse_constant=_not_json, parse_float=_finite, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise _FailedError(f"parse_error:{_shown(output)}") from error


def _unfenced(output: str) -> str:
    """The answer without the one Markdown fence around it."""
    fenced = re.fullmatch(r"```(?:[A-Za-z_]+(?=[\s{\[]))?\s*(.*?)\s*```", output.strip(), re.DOTALL)
    return fenced[1] if fenced else output.strip()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def _not_json(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _not_json(text)


def same_json(left: Any, right: Any) -> bool:
    """Equal as JSON: order of keys aside, 1 equals 1.0, and true is not 1 as it is in Python."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_json(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_json, left, right))
    return bool(left == right)


def _tool_call(output: str, grader: ToolCall) -> None:
    name, arguments = _parse_call(output)
    if name != grader.name:
        raise _FailedError(f"wrong_function:{name}")
    for parameter, wanted in grader.arguments.items():
        if wanted.required and parameter not in arguments:
            raise _FailedError(f"missing_argument:{parameter}")
    for parameter, value in arguments.items():
        if parameter not in grader.arguments:
            raise _FailedError(f"unexpected_argument:{parameter}")
        _check_argument(parameter, value, grader.arguments[parameter])


def _check_argument(parameter: str, value: Any, wanted: Argument) -> None:
    if not wanted.is_of_type(value):
        raise _FailedError(f"type_error:{parameter}")
    if not any(same_json(_levelled(value), _levelled(accepted)) for accepted in wanted.accept):
        raise _FailedError(f"value_error:{parameter}")


def _levelled(value: Any) -> Any:
    """Strings compare by `level`, inside lists and objects too. Quotes and marks are part of an argument."""
    if isinstance(value, str):
        return level(value)
    if isinstance(value, dict):
        return {key: _levelled(item) for key, item in value.items()}
    return [_levelled(item) for item in value] if isinstance(value, list | tuple) else value


def _parse_call(output: str) -> tuple[str, dict[str, Any]]:
    text = _unfenced(output).removeprefix("<tool_call>").removesuffix("</tool_call>").strip()
    if not text.startswith("{"):
        return _parse_python_call(text)
    call = _parse_json(text)
    match call:
        case {"name": str(name), "arguments": dict(arguments)} if len(call) == 2:
            return name, arguments
    raise _FailedError("parse_error:not an object of name and arguments")


def _parse_python_call(text: str) -> tuple[str, dict[str, Any]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model's escapes are no concern of ours
            node = ast.parse(text, mode="eval").body
            # A comment after the call, or brackets round it, are something else beside it.
            if not isinstance(node, ast.Call) or node.args or ast.get_source_segment(text, node) != text:
                raise ValueError("not one call of named arguments")
            pairs = [(_name(word), _literal(word.value)) for word in node.keywords]
            return ast.unparse(node.func), _object(pairs)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise _FailedError(f"parse_error:{_shown(text)}") from error


def _name(word: ast.keyword) -> str:
    if word.arg is None:
        raise ValueError("** is no argument")
    return word.arg


def _literal(node: ast.expr) -> Any:
    """The literal's value. A dict that names a key twice is refused, as in JSON."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Dict):
            _object([(ast.dump(key), None) for key in inner.keys if key is not None])
    return ast.literal_eval(node)
