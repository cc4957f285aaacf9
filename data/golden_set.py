"""The golden set: prompts whose answers a rule can judge, and the rule of each.

It is the business layer of the replay: what matters is which answers break that were right before, so a
model need not get all of them. A grader is data here; `tasks/grade.py` applies it.
"""

from __future__ import annotations

import math
import random
import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from jsonschema import Draft202012Validator, SchemaError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from attention.errors import UserError
from data.jsonl import Rejected, read_jsonl
from data.paths import GOLDEN_FILE
from data.plan import ReplayPlan
from data.requests import Message

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


def _says_something(value: str) -> str:
    """A value of nothing but quotes, spaces and final marks would equal every other of its kind."""
    if not normalise(value):
        raise ValueError(f"{value!r} has nothing to compare beside quotes, spaces and final marks")
    return value


def normalise(text: str) -> str:
    """`level`, then quotes around the text and final marks removed: how `exact` compares."""
    return level(text).strip("\"' ").rstrip(".!。।۔").strip("\"' ")


def level(text: str) -> str:
    """Case, full and half width, spacing and typographic quotes levelled. Superscripts stay what they are."""
    narrow = "".join(unicodedata.normalize("NFKC", c) if c in _WIDE else c for c in text)
    return " ".join(unicodedata.normalize("NFC", narrow).translate(_QUOTES).casefold().split())


_WIDE = frozenset(map(chr, (0x3000, *range(0xFF01, 0xFFEF))))
_QUOTES = str.maketrans(dict.fromkeys("’‘‚`´‹›", "'") | dict.fromkeys("“”„«»", '"'))

Text = Annotated[str, AfterValidator(_says_something)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Exact(_Strict):
    """The whole answer equals `value`, but for case, width, spacing, quotes around it and a final mark."""

    kind: Literal["exact"]
    value: Text


class OneOf(_Strict):
    """The whole answer equals one of `values`, as `exact` compares."""

    kind: Literal["one_of"]
    values: tuple[Text, ...] = Field(min_length=1)


class Contains(_Strict):
    """Every one of `values` stands in the answer as whole words and whole numbers, case and spacing aside."""

    kind: Literal["contains"]
    values: tuple[Text, ...] = Field(min_length=1)


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

    @model_validator(mode="after")
    def _accepts_its_own_type(self) -> Argument:
        for value in self.accept:
            if not self.is_of_type(value):
                raise ValueError(f"accept: {value!r} is no {self.type}, so it could never pass")
        return self

    def is_of_type(self, value: Any) -> bool:
        """Whether a value has the type: 4.0 is no integer, "4" no number, true neither; 4 is a number."""
        return isinstance(value, _TYPES[self.type]) and isinstance(value, bool) == (self.type == "boolean")


class ToolCall(_Strict):
    """The answer is one call of `name` and nothing else: JSON `{"name", "arguments"}` or `name(argument=value)`."""

    kind: Literal["tool_call"]
    name: str
    arguments: dict[str, Argument]


class Refusal(_Strict):
    """The answer opens with a refusal, or, with `expected: false`, does not."""

    kind: Literal["refusal"]
    expected: bool


SAMPLE_SEED = 20261129  # the same choice in every release of a plan

Grader = Annotated[Exact | OneOf | Contains | Regex | JsonSchema | ToolCall | Refusal, Field(discriminator="kind")]


class GoldenPrompt(_Strict):
    """One prompt of the set."""

    prompt_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$")  # reports and MLflow show it
    category: str = Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")  # judged apart; a check is named by it
    language: str = Field(pattern=r"^[a-z]{2,3}$")  # ISO 639
    messages: tuple[Message, ...] = Field(min_length=1)
    tools: tuple[dict[str, Any], ...] | None = None  # offered through the chat template, where it knows tools
    max_tokens: int = Field(ge=1)  # enough for the right answer; generation is greedy
    grader: Grader

    @property
    def num_chars(self) -> int:
        return sum(len(message.content) for message in self.messages)


@dataclass(frozen=True)
class GoldenSet:
    prompts: list[GoldenPrompt]  # in order of the file
    rejected: list[Rejected]


@dataclass(frozen=True)
class Drawn(GoldenSet):
    """What a plan asks of a set."""

    num_usable: int  # prompts of the whole set
    num_unfit: int  # of these, longer than the plan allows


def load_golden(path: Path = GOLDEN_FILE) -> GoldenSet:
    """The prompts of a golden file, and its lines that could not be used.

    Raises UserError when the file cannot be read or holds no usable line.
    """
    prompts, rejected = read_jsonl(path, GoldenPrompt, lambda prompt: prompt.prompt_id, "golden set")
    return GoldenSet(prompts, rejected)


def draw(path: Path, plan: ReplayPlan) -> Drawn:
    """The prompts that a plan asks of a golden file: a sample of those whose length fits it.

    Raises UserError as `load_golden` does, and when no prompt fits.
    """
    golden = load_golden(path)
    longest = plan.golden_max_chars or math.inf
    fitting = [p for p in golden.prompts if p.max_tokens <= plan.golden_max_tokens and p.num_chars <= longest]
    if not fitting:
        raise UserError(
            f"golden set {path}: none of its {len(golden.prompts)} prompts fits the plan's "
            f"{plan.golden_lengths}; raise them or shorten a prompt"
        )
    return Drawn(
        prompts=sample(fitting, plan.golden_prompts, SAMPLE_SEED),
        rejected=golden.rejected,
        num_usable=len(golden.prompts),
        num_unfit=len(golden.prompts) - len(fitting),
    )


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
