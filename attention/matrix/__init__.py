"""The compatibility matrix: declared rules as data (`*.yaml` here), evaluated for one case.

A rule names one dimension of a case or machine and what is allowed there, with its source and, where it
holds for some versions only, their range. Every failing rule becomes a Reason; nothing stops at the first. A
backend without rules for the platform has no cell, so it is `unknown`, which never lets anything pass.
Cells that public reports found broken are in `known_bad.yaml`: they are declared to fail, with the report as source.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, get_args

from packaging.specifiers import SpecifierSet
from pydantic import BaseModel, ConfigDict, Field, RootModel, field_validator, model_validator

from attention.cases import AttentionCase, DType
from attention.errors import UserError, nearest
from attention.reasons import Code, Reason
from attention.validated import validated
from attention.yaml_file import read_yaml


class _Versioned(BaseModel):
    """What holds for a range of versions of the backend's distribution (`">=2.8,<3"`); for all without one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    versions: str = ""

    @field_validator("versions")
    @classmethod
    def _is_a_range(cls, value: str) -> str:
        SpecifierSet(value)
        return value

    def holds_for(self, version: str | None) -> bool:
        """Whether `version` is in the range. An unknown version is: what cannot be excluded is told."""
        return version is None or SpecifierSet(self.versions).contains(version, prereleases=True)


class Range(BaseModel):
    """A value in `allowed`, or between `minimum` and `maximum`, or a multiple of `multiple_of`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    allowed: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    multiple_of: int | None = Field(default=None, ge=1)

    @property
    def of_numbers(self) -> bool:
        """Whether only a number can be asked this."""
        return any(limit is not None for limit in (self.minimum, self.maximum, self.multiple_of))

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


class Rule(Range, _Versioned):
    """`dimension` must lie in the range; else the reason has this code.

    With `when` the rule holds only for cases whose named dimensions all have one of the values there.
    """

    dimension: str
    code: Code
    when: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    source: str
    message: str

    @model_validator(mode="after")
    def _fits_its_dimensions(self) -> Rule:
        _check_dimensions({**dict.fromkeys(self.when, Range()), self.dimension: self})
        return self

    def applies(self, values: dict[str, Any]) -> bool:
        return all(values[name] in wanted for name, wanted in self.when.items())

    def allowed_text(self) -> str:
        where = " and ".join(f"{name} is {' or '.join(map(str, wanted))}" for name, wanted in self.when.items())
        return super().allowed_text() + (f" (where {where})" if where else "")


class KnownBad(_Versioned):
    """A cell that a public report found broken: every dimension in `when` lies in its range."""

    backend: str
    platforms: tuple[str, ...] = ("cuda",)
    when: dict[str, Range]
    code: Code
    source: str  # the report
    message: str

    @model_validator(mode="after")
    def _fits_its_dimensions(self) -> KnownBad:
        _check_dimensions(self.when)
        if self.platforms != ("cuda",):
            _check_platform(self.when)
        return self


class Declared(BaseModel):
    """Rules of one backend on one platform."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    package: str  # import name that must be there
    remedy: str  # what to do when it is not
    needs: dict[str, str] = Field(default_factory=dict)  # what the package imports itself, and its remedy
    versions: str = ""  # of the package, for which the rules were read
    index_bits: int = 32  # of the offsets that its kernels compute into the KV cache
    rules: tuple[Rule, ...] = ()


_FOLDER = Path(__file__).parent
_KNOWN_BAD = "known_bad.yaml"


class _Sheet(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    definitions: dict[str, Rule] = Field(default_factory=dict, description="rules that several backends share")
    backends: dict[str, dict[str, Declared]] = Field(description="backend -> platform (cpu, cuda, rocm) -> rules")

    @model_validator(mode="after")
    def _fit_their_platforms(self) -> _Sheet:
        for platforms in self.backends.values():
            for rule in (rule for name, sheet in platforms.items() if name != "cuda" for rule in sheet.rules):
                _check_platform((rule.dimension, *rule.when))
        return self


class _KnownBadSheet(RootModel[tuple[KnownBad, ...]]):
    pass


#: Keys of all sheets, to find what a mistyped one was meant to be.
_KEYS = {key for kind in (_Sheet, Declared, Rule, KnownBad) for key in kind.model_fields}


@cache
def declared() -> dict[str, dict[str, Declared]]:
    """All sheets of this folder: backend -> platform -> rules. UserError names the file, the key and the problem."""
    merged: dict[str, dict[str, Declared]] = {}
    for path in sorted(_FOLDER.glob("*.yaml")):
        if path.name == _KNOWN_BAD:
            continue
        sheet = validated(_Sheet, read_yaml(path), path, _KEYS)
        for backend, platforms in sheet.backends.items():
            if backend in merged:
                raise UserError(f"{path}: {backend} is declared twice")
            merged[backend] = platforms
    return merged


@cache
def known_bad() -> tuple[KnownBad, ...]:
    """All entries of known_bad.yaml. UserError as `declared`."""
    path = _FOLDER / _KNOWN_BAD
    return validated(_KnownBadSheet, read_yaml(path), path, _KEYS).root


def platform_of(device: str) -> str:
    """`cpu`, `cuda` or `rocm`: PyTorch calls an AMD device cuda too."""
    kind = device.split(":")[0]
    if kind == "cuda":
        import torch

        return "rocm" if torch.version.hip else "cuda"
    return kind


def check_device(device: str) -> None:
    """UserError for a device that this PyTorch does not have: it would only say so with a traceback."""
    if device == "cpu":
        return
    import torch

    found = re.fullmatch(r"cuda(?::(0|[1-9][0-9]{0,3}))?", device)
    if found is None:
        raise UserError(f"device {device[:80]}: use cpu, cuda or cuda:N")
    if int(found[1] or 0) >= torch.cuda.device_count():
        raise UserError(f"device {device}: this PyTorch sees {torch.cuda.device_count()} CUDA devices; use cpu")


#: Distributions that are not named like what they let import.
_DISTRIBUTIONS = {
    "flash_attn_2_cuda": "flash-attn",
    "flash_attn.cute": "flash-attn-4",
    "flashinfer": "flashinfer-python",
}


@cache
def version_of(package: str) -> str | None:
    """Installed version of the distribution behind an import name; None when there is none of that name."""
    try:
        return importlib.metadata.version(_DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return None


def index_bits(backend: str, device: str) -> int:
    """Bits of the offsets that a backend computes into the KV cache; 32 when nothing is declared."""
    sheet = declared().get(backend, {}).get(platform_of(device))
    return 32 if sheet is None else sheet.index_bits


def _dimensions(case: AttentionCase, device: str) -> dict[str, Any]:
    left, right = case.window
    if case.causal:
        right = 0 if right is None else min(right, 0)
    values = case.model_dump(exclude={"batch", "window"})
    values |= {
        "device": platform_of(device),
        "sliding_window": case.window != (None, None),
        "window_right": right,  # None: unbounded; 0: causal
        "softcap_on": case.softcap is not None,
        "gqa": case.gqa_ratio > 1,
        "gqa_ratio": case.gqa_ratio,
        "same_head_dims": case.head_dim_qk == case.head_dim_vo,
        "mla_absorbed": (case.heads_kv, case.head_dim_qk, case.head_dim_vo) == (1, 576, 512),
        "single_tokens": all(m.q_len == 1 for m in case.members),
        "queries_fit": all(m.q_len <= m.kv_len for m in case.members),
        "window_left": -1 if left is None else left,
        "right_window": right is not None and right > 0,
        "causal_unequal": case.causal and any(m.q_len != m.kv_len for m in case.members),
        "num_members": len(case.members),
        "min_q_len": min((m.q_len for m in case.members), default=0),
        "max_q_len": max((m.q_len for m in case.members), default=0),
        "max_kv_len": max((m.kv_len for m in case.members), default=0),
        "min_kv_len": min((m.kv_len for m in case.members), default=0),
        "shortest_kv_len": min((m.kv_len for m in case.members if m.kv_len), default=math.inf),
        "contiguous_padding": case.layout == "contiguous" and len({m.kv_len for m in case.members}) > 1,
        "triton_interpreter": os.environ.get("TRITON_INTERPRET") == "1",
        "kv_dtype_effective": _kv_dtype(case),
    }
    if values["device"] == "cuda":
        import torch

        try:
            major, minor = torch.cuda.get_device_capability(device)
        except (AssertionError, RuntimeError):  # PyTorch without CUDA, or without that device
            check_device(device)
            raise
        values["compute_capability"] = major * 10 + minor
    return values


def _kv_dtype(case: AttentionCase) -> str:
    """What K and V are stored in. No kernel takes them in another unquantised dtype than the query's."""
    if case.kv_dtype in ("auto", case.dtype):
        return case.dtype
    return f"{case.kv_dtype} under {case.dtype}" if case.kv_dtype in get_args(DType) else case.kv_dtype


@cache
def _are_numbers() -> dict[str, bool]:
    """Dimension -> whether it is a number in every case; a softcap and a page size may be None."""
    shape: dict[str, Any] = {"heads_q": 1, "heads_kv": 1, "head_dim_qk": 1, "head_dim_vo": 1, "dtype": "float32"}
    plain = AttentionCase(phase="prefill", batch="q1", causal=False, layout="ragged", page_size=None, **shape)
    full = AttentionCase(phase="prefill", batch="q1", window=(1, 0), softcap=1.0, **shape)
    some, others = _dimensions(plain, "cpu"), _dimensions(full, "cpu")
    numbers = {name: _is_number(some[name]) and _is_number(others[name]) for name in some}
    return {**numbers, "compute_capability": True}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_dimensions(limits: dict[str, Range]) -> None:
    """ValueError for a dimension that no case has, and for a minimum, maximum or multiple of one that is no number."""
    known = _are_numbers()
    for name, limit in limits.items():
        if name not in known:
            raise ValueError(f"dimension {name!r} is unknown; {nearest(name, known)}")
        if limit.of_numbers and not known[name]:
            raise ValueError(f"dimension {name!r} is not always a number: name its values in `allowed` instead")


def _check_platform(dimensions: Iterable[str]) -> None:
    """ValueError for a dimension that only CUDA devices have."""
    if "compute_capability" in dimensions:
        raise ValueError("dimension 'compute_capability' is of CUDA devices alone: leave it out of other platforms")


def _importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:  # a parent of a dotted name is missing or broken
        return False


def _missing(sheet: Declared) -> list[Reason]:
    """The reason of a package that is not there, or that lacks what it imports; empty when all is there."""

    def reason(observed: str, message: str) -> Reason:
        return Reason(
            code=Code.IMPORT_FAILED,
            dimension="package",
            observed=observed,
            allowed=sheet.package,
            source="attention/matrix",
            message=f"{sheet.package} cannot be imported: {message}",
        )

    if not _importable(sheet.package):
        return [reason("not installed", sheet.remedy)]
    return [
        reason(f"no module {name}", f"it needs the module {name}, which is not found: {remedy}")
        for name, remedy in sheet.needs.items()
        if not _importable(name)
    ]


def declared_reasons(backend: str, case: AttentionCase, *, device: str) -> list[Reason]:
    """Every declared rule of `backend` that the case breaks on this device; empty when none does.

    Without a declaration for the platform the answer is ARCH_UNSUPPORTED; without the package (as any
    platform's declaration names it), IMPORT_FAILED with the remedy. UserError for a device that is not there.
    """
    platform = platform_of(device)
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
    values, version = _dimensions(case, device), version_of(sheet.package)
    for rule in sheet.rules:
        value = values[rule.dimension]
        if rule.holds_for(version) and rule.applies(values) and not rule.permits(value):
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
    for entry in known_bad():
        if (entry.backend, platform in entry.platforms) != (backend, True) or not entry.holds_for(version):
            continue
        if all(limits.permits(values[name]) for name, limits in entry.when.items()):
            reasons.append(
                Reason(
                    code=entry.code,
                    dimension=", ".join(entry.when),
                    observed=", ".join(str(values[name]) for name in entry.when),
                    allowed="any other combination",
                    source=f"{KNOWN_BAD_SOURCE}{entry.source}",
                    message=entry.message,
                )
            )
    return reasons


KNOWN_BAD_SOURCE = "known_bad: "


def is_known_bad(reasons: list[Reason]) -> bool:
    """Whether public reports alone, and no rule, speak against a cell."""
    return bool(reasons) and all(reason.source.startswith(KNOWN_BAD_SOURCE) for reason in reasons)
