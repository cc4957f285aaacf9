"""The compatibility matrix: declared rules as data (`*.yaml` here), evaluated for one case.

A rule names one dimension of a case or machine and what is allowed there, with its source. Every
failing rule becomes a Reason; nothing stops at the first. A backend without rules for the platform
has no cell, so it is `unknown`, which never lets anything pass.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from attention.cases import AttentionCase
from attention.errors import UserError
from attention.reasons import Code, Reason


class Rule(BaseModel):
    """`dimension` must be in `allowed`, or between `minimum` and `maximum`, or a multiple of `multiple_of`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dimension: str
    code: Code
    allowed: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    multiple_of: int | None = None
    source: str
    message: str

    def permits(self, value: Any) -> bool:
        if self.allowed is not None and value not in self.allowed:
            return False
        if self.minimum is not None and value < self.minimum:
            return False
        if self.maximum is not None and value > self.maximum:
            return False
        return self.multiple_of is None or value % self.multiple_of == 0

    def allowed_text(self) -> str:
        parts = []
        if self.allowed is not None:
            parts.append(", ".join(map(str, self.allowed)))
        if self.minimum is not None:
            parts.append(f">= {self.minimum:g}")
        if self.maximum is not None:
            parts.append(f"<= {self.maximum:g}")
        if self.multiple_of is not None:
            parts.append(f"multiple of {self.multiple_of}")
        return " and ".join(parts)


class Declared(BaseModel):
    """Rules of one backend on one platform."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    package: str  # import name that must be there
    remedy: str  # what to do when it is not
    rules: tuple[Rule, ...] = ()


class _Sheet(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    definitions: dict[str, Rule] = Field(default_factory=dict, description="rules that several backends share")
    backends: dict[str, dict[str, Declared]] = Field(description="backend -> platform (cpu, cuda) -> rules")


@cache
def declared() -> dict[str, dict[str, Declared]]:
    """All sheets of this folder: backend -> platform -> rules."""
    merged: dict[str, dict[str, Declared]] = {}
    for path in sorted(Path(__file__).parent.glob("*.yaml")):
        sheet = _Sheet.model_validate(yaml.safe_load(path.read_text()))
        for backend, platforms in sheet.backends.items():
            if backend in merged:
                raise UserError(f"{path}: {backend} is declared twice")
            merged[backend] = platforms
    return merged


def _dimensions(case: AttentionCase, device: str) -> dict[str, Any]:
    left, right = case.window
    values = case.model_dump(exclude={"batch", "window"})
    values |= {
        "device": device.split(":")[0],
        "sliding_window": left is not None or right is not None,
        "softcap_on": case.softcap is not None,
        "gqa": case.gqa_ratio > 1,
        "gqa_ratio": case.gqa_ratio,
        "same_head_dims": case.head_dim_qk == case.head_dim_vo,
        "min_kv_len": min((m.kv_len for m in case.members), default=0),
        "mask_free": all(m.q_len in (1, m.kv_len) for m in case.members) and left is None,
        "triton_interpreter": os.environ.get("TRITON_INTERPRET") == "1",
        "kv_dtype_effective": case.dtype if case.kv_dtype == "auto" else case.kv_dtype,
    }
    if values["device"] == "cuda":
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        values["compute_capability"] = major * 10 + minor
    return values


def _importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a parent of a dotted name is missing
        return False


def _missing(sheet: Declared) -> list[Reason]:
    """The reason of a package that is not there; empty when it is."""
    if _importable(sheet.package):
        return []
    return [
        Reason(
            code=Code.IMPORT_FAILED,
            dimension="package",
            observed="not installed",
            allowed=sheet.package,
            source="attention/matrix",
            message=f"{sheet.package} cannot be imported: {sheet.remedy}",
        )
    ]


def declared_reasons(backend: str, case: AttentionCase, *, device: str) -> list[Reason]:
    """Every declared rule of `backend` that the case breaks on this device; empty when none does.

    Without a declaration for the platform the answer is ARCH_UNSUPPORTED; without the package (as any
    platform's declaration names it), IMPORT_FAILED with the remedy.
    """
    platform = device.split(":")[0]
    platforms = declared().get(backend, {})
    if platform not in platforms:
        known = ", ".join(sorted(platforms)) or "none"
        undeclared = Reason(
            code=Code.ARCH_UNSUPPORTED,
            dimension="device",
            observed=platform,
            allowed=known,
            source="attention/matrix",
            message=f"{backend} has no declared rules for {platform}",
        )
        return [undeclared, *(_missing(next(iter(platforms.values()))) if platforms else ())]
    sheet = platforms[platform]
    reasons = _missing(sheet)
    values = _dimensions(case, device)
    for rule in sheet.rules:
        value = values[rule.dimension]
        if not rule.permits(value):
            reasons.append(
                Reason(
                    code=rule.code,
                    dimension=rule.dimension,
                    observed=str(value),
                    allowed=rule.allowed_text(),
                    source=rule.source,
                    message=rule.message,
                )
            )
    return reasons
