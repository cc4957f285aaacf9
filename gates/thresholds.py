"""Limits as data: every figure that a gate compares with has a value, an owner and a reason.

gates/thresholds.yaml holds one section a plan over `default`; a plan's section replaces the value and
the reason of a limit that `default` has, never adds one. The least evidence comes from the plan itself
(data/plans/), and joins the limits under the plan's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from attention.errors import UserError, nearest
from attention.yaml_file import read_yaml

THRESHOLDS_FILE = Path(__file__).parent / "thresholds.yaml"


class Threshold(BaseModel):
    """One limit; `owner` may change it, `reason` says why it is what it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float = Field(allow_inf_nan=False)
    owner: str = Field(min_length=1)
    reason: str = Field(min_length=1)


class _Override(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float = Field(allow_inf_nan=False)
    reason: str = Field(min_length=1)


T = TypeVar("T")
_Defaults = TypeAdapter(dict[str, dict[str, Threshold]])
_Overrides = TypeAdapter(dict[str, dict[str, _Override]])


@dataclass(frozen=True)
class Limits:
    """The limits of one gate under one plan."""

    stage: str
    plan: str
    thresholds: tuple[tuple[str, Threshold], ...]

    def __getitem__(self, name: str) -> Threshold:
        """Raises KeyError for a limit that neither thresholds.yaml nor the plan states."""
        for known, threshold in self.thresholds:
            if known == name:
                return threshold
        raise KeyError(f"no limit {name!r} for gate {self.stage}")

    def __contains__(self, name: str) -> bool:
        return any(known == name for known, _ in self.thresholds)

    def value(self, name: str) -> float:
        return self[name].value

    def least(self, **minimums: float) -> Limits:
        """With the plan's own minimums of evidence added."""
        reason = "least evidence that this plan accepts"
        added = tuple(
            (name, Threshold(value=value, owner=f"plan {self.plan}", reason=reason)) for name, value in minimums.items()
        )
        return Limits(self.stage, self.plan, self.thresholds + added)

    def of_class(self, name: str) -> Limits:
        """Limits for one class of evidence: `r_rms.float32`, where it is stated, replaces `r_rms`."""
        own = {known.removesuffix(f".{name}"): limit for known, limit in self.thresholds if known.endswith(f".{name}")}
        chosen = tuple((known, own.get(known, limit)) for known, limit in self.thresholds)
        return Limits(self.stage, self.plan, chosen)


def load_limits(stage: str, plan: str, path: Path = THRESHOLDS_FILE) -> Limits:
    """Limits of a gate for a plan by name; a plan without a section of its own gets `default`.

    Raises UserError that names the file, the key and the remedy.
    """
    defaults, overrides = _load(path)
    if stage not in defaults:
        raise UserError(f"{path}: no limits for gate {stage!r}; {nearest(stage, defaults)}")
    chosen = dict(defaults[stage])
    for name, override in overrides.get(plan, {}).get(stage, {}).items():
        chosen[name] = Threshold(value=override.value, owner=chosen[name].owner, reason=override.reason)
    return Limits(stage, plan, tuple(chosen.items()))


@lru_cache
def _load(path: Path) -> tuple[dict[str, dict[str, Threshold]], dict[str, dict[str, dict[str, _Override]]]]:
    document = read_yaml(path)
    if not isinstance(document, dict) or "default" not in document:
        raise UserError(f"{path}: has no section `default`; add the limits that hold for every plan")
    defaults = _validated(_Defaults, document.pop("default"), path, "default")
    overrides = {plan: _validated(_Overrides, section, path, plan) for plan, section in document.items()}
    for plan, stages in overrides.items():
        for stage, limits in stages.items():
            if stage not in defaults:
                raise UserError(f"{path}: {plan}.{stage}: unknown gate; {nearest(stage, defaults)}")
            for name in limits.keys() - defaults[stage].keys():
                known = nearest(name, defaults[stage])
                raise UserError(f"{path}: {plan}.{stage}.{name}: no such limit under `default`; {known}")
    return defaults, overrides


def _validated(adapter: TypeAdapter[T], section: object, path: Path, name: str) -> T:
    try:
        return adapter.validate_python(section)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join([name, *map(str, first['loc'])])}: {first['msg']}") from error
