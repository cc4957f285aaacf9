"""The golden set: prompts whose answers a rule can judge, and the rule of each.

It is the business layer of the replay: what matters is which answers break that were right before, so a
model need not get all of them. A grader is data here; `tasks/grade.py` applies it.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from jsonschema import Draft202012Validator, SchemaError
from pydantic import BaseModel, ConfigDict, Field, field_validator

from data.jsonl import Rejected, read_jsonl
from data.paths import GOLDEN_FILE
from data.requests import Message


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Exact(_Strict):
    """The whole answer equals `value`, but for case, spacing, quotes around it and a final mark."""

    kind: Literal["exact"]
    value: str = Field(min_length=1)


class OneOf(_Strict):
    """The whole answer equals one of `values`, as `exact` compares."""

    kind: Literal["one_of"]
    values: tuple[str, ...] = Field(min_length=1)


class Contains(_Strict):
    """Every one of `values` stands in the answer, case and spacing aside."""

    kind: Literal["contains"]
    values: tuple[str, ...] = Field(min_length=1)


class Regex(_Strict):
    """`pattern` matches the whole answer, spaces around it removed."""

    kind: Literal["regex"]
    pattern: str

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from error
        return value


class JsonSchema(_Strict):
    """The answer is one JSON value that satisfies `schema` (draft 2020-12) and, if given, equals `equals`."""

    kind: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")
    equals: Any = None

    @field_validator("json_schema")
    @classmethod
    def _is_a_schema(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            Draft202012Validator.check_schema(value)
        except SchemaError as error:
            raise ValueError(f"no JSON schema: {error.message}") from error
        return value


class Argument(_Strict):
    """What a call may pass for one parameter."""

    type: Literal["string", "integer", "number", "boolean", "array", "object"]
    accept: tuple[Any, ...] = Field(min_length=1)
    required: bool = True


class ToolCall(_Strict):
    """The answer is one call of `name`: JSON `{"name", "arguments"}` or `name(argument=value, ...)`."""

    kind: Literal["tool_call"]
    name: str
    arguments: dict[str, Argument]


class Refusal(_Strict):
    """The answer refuses, or, with `expected: false`, does not."""

    kind: Literal["refusal"]
    expected: bool


Grader = Annotated[Exact | OneOf | Contains | Regex | JsonSchema | ToolCall | Refusal, Field(discriminator="kind")]


class GoldenPrompt(_Strict):
    """One prompt of the set."""

    prompt_id: str = Field(min_length=1)
    category: Literal["copy", "answer", "json", "tool_call", "format", "refusal"]
    language: str  # ISO 639-1
    messages: tuple[Message, ...] = Field(min_length=1)
    max_tokens: int = Field(ge=1)  # enough for the right answer; generation is greedy
    grader: Grader


@dataclass(frozen=True)
class GoldenSet:
    prompts: list[GoldenPrompt]  # in order of the file
    rejected: list[Rejected]


def load_golden(path: Path = GOLDEN_FILE) -> GoldenSet:
    """The prompts of a golden file, and its lines that could not be used.

    Raises UserError when the file cannot be read or holds no usable line.
    """
    prompts, rejected = read_jsonl(path, GoldenPrompt, lambda prompt: prompt.prompt_id, "golden set")
    return GoldenSet(prompts, rejected)


def sample(golden: Sequence[GoldenPrompt], n: int | None, seed: int) -> list[GoldenPrompt]:
    """At most `n` prompts (None: all), taken from the categories in turn, in the order of the set.

    The same seed gives the same prompts, and a larger `n` keeps those of a smaller one.
    """
    if n is None or n >= len(golden):
        return list(golden)
    rng = random.Random(seed)  # noqa: S311 - a sample, no secret
    pools: dict[str, list[GoldenPrompt]] = defaultdict(list)
    for prompt in golden:
        pools[prompt.category].append(prompt)
    for pool in pools.values():
        rng.shuffle(pool)
    rounds = range(max(len(pool) for pool in pools.values()))
    dealt = [pool[turn].prompt_id for turn in rounds for pool in pools.values() if turn < len(pool)]
    chosen = set(dealt[:n])
    return [prompt for prompt in golden if prompt.prompt_id in chosen]
