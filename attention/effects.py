"""What a difference between two fingerprints is known to change: sentences with their sources, as data.

    for change, known in explain(old_identity, new_identity): ...

`effects.yaml` holds the knowledge. A difference that it does not know is shown all the same: that nothing is
known of it is not that nothing happens.
"""

from __future__ import annotations

import re
import textwrap
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from attention.difference import ABSENT, Change, changes, short
from attention.validated import validated
from attention.yaml_file import read_yaml

_PACKAGES = "distributions."


class Effect(BaseModel):
    """One sentence, with its source and the conditions under which it holds (see effects.yaml)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    old: str | None = None
    new: str | None = None
    part: int | None = None
    crosses: str | None = None
    exceeds: str | None = None
    effect: str
    source: str

    def holds(self, change: Change) -> bool:
        """Whether this effect is known of that change."""
        if not fnmatchcase(change.path, self.path):
            return False
        for pattern, value in ((self.old, change.old), (self.new, change.new)):
            if pattern is not None and not re.fullmatch(pattern, short(value)):
                return False
        old, new = _version(change.old), _version(change.new)
        if (self.part or self.crosses or self.exceeds) and not (old and new):
            return False  # installed or removed: no version was crossed
        if self.part is not None and old[: self.part] == new[: self.part]:
            return False
        if self.crosses is not None and (old >= _version(self.crosses)) == (new >= _version(self.crosses)):
            return False
        return self.exceeds is None or (old > _version(self.exceeds)) != (new > _version(self.exceeds))


class Explained(BaseModel):
    """A changed field, and what that is known to change; no effects where nothing is known."""

    model_config = ConfigDict(frozen=True)

    path: str
    old: Any
    new: Any
    effects: tuple[Effect, ...]

    def document(self) -> dict[str, Any]:
        """As JSON for machines; `old` or `new` is left out where only the other side has the field."""
        known = [{"effect": one.effect, "source": one.source} for one in self.effects]
        sides = {name: value for name, value in (("old", self.old), ("new", self.new)) if value is not ABSENT}
        return {"field": self.path, **sides, "effects": known}


class _Sheet(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    effects: tuple[Effect, ...]


@cache
def known_effects() -> tuple[Effect, ...]:
    """All of effects.yaml, in its order. UserError names the key and the problem."""
    path = Path(__file__).parent / "effects.yaml"
    return validated(_Sheet, read_yaml(path), path, Effect.model_fields).effects


def explain(old: dict[str, Any], new: dict[str, Any]) -> list[Explained]:
    """Every changed field of two identities (as JSON documents), with its known effects."""
    return [
        Explained(
            path=change.path,
            old=change.old,
            new=change.new,
            effects=tuple(effect for effect in known_effects() if effect.holds(change)),
        )
        for change in changes(old, new)
    ]


def lines(found: list[Explained]) -> list[str]:
    """The same for a person: fields, old and new values in columns, and below each what is known.

    Fields with known effects come first, packages without one last and together.
    """
    if not found:
        return ["no difference"]
    others = [one for one in found if one.path.startswith(_PACKAGES) and not one.effects]
    found = sorted((one for one in found if one not in others), key=lambda one: not one.effects)
    widths = [max((len(row[i]) for row in map(_row, found)), default=0) for i in range(2)]
    text = []
    for one in found:
        path, old, new = _row(one)
        text.append(f"{path:{widths[0]}}  {old:{widths[1]}}  -> {new}")
        text += [f"    {effect.effect}  [{effect.source}]" for effect in one.effects]
        if not one.effects:
            text.append("    no known effect; probes and replay decide")
    if others:
        names = ", ".join(one.path.removeprefix(_PACKAGES) for one in others)
        text.append(f"{len(others)} packages of which this sheet says nothing by name:")
        text += textwrap.wrap(names, 80, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return text


def _row(one: Explained) -> tuple[str, str, str]:
    return one.path, short(one.old), short(one.new)


def _version(value: Any) -> tuple[int, ...]:
    """Numbers of a version up to a local part or a hash: `2.11.0+cu130` is (2, 11, 0); () for none.

    Python makes no number of more than 4300 digits: what is that long is no version.
    """
    if len(str(value or "")) > 1000:
        return ()
    return tuple(int(digits) for digits in re.findall(r"\d+", str(value or "").split("+")[0]))
