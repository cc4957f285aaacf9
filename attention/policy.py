"""Policy: which backends a deployment wants, which may stand in, and when none may.

The policy is data. `resolve` turns it into an ordered chain for one case: every backend that the
matrix and the probes allow, and for each one left out, all its reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from attention.backends import expand
from attention.cases import AttentionCase, Phase
from attention.errors import UserError, is_dir, is_file, nearest
from attention.reasons import Code, Reason
from attention.validated import validated
from attention.yaml_file import read_yaml

Mode = Literal["auto", "preferred-with-fallback", "pinned"]
Feature = Literal["causal", "sliding_window", "softcap", "alibi", "custom_mask", "sinks"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Budget(_Strict):
    """How much request-level fallback is bearable before the policy's `on_exceeded` happens."""

    max_share: float = Field(ge=0, le=1)
    window_s: float = Field(gt=0)
    max_duration_s: float = Field(gt=0)
    #: `reject`: a request that would fall back is answered with 503; `drain`: the instance is ready no more.
    on_exceeded: Literal["reject", "drain"] = "reject"


class Override(_Strict):
    """Other preferred backends for one phase and a range of KV lengths [low, high), null for open."""

    phase: Phase
    kv_len: tuple[int | None, int | None] = (None, None)
    preferred: tuple[str, ...] = Field(min_length=1)

    @field_validator("kv_len")
    @classmethod
    def _not_empty(cls, kv_len: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
        low, high = kv_len
        if (low or 0) < 0 or (high is not None and high <= (low or 0)):
            raise ValueError("[low, high) holds no length: 0 <= low < high, null for open")
        return kv_len

    def covers(self, phase: str, kv_len: int) -> bool:
        low, high = self.kv_len
        return self.phase == phase and (low is None or kv_len >= low) and (high is None or kv_len < high)


class Policy(_Strict):
    """`attention_policy` of the document; unset fields are the safe ones."""

    mode: Mode = "preferred-with-fallback"
    preferred: tuple[str, ...] = Field(min_length=1)
    fallback: tuple[str, ...] = ()
    fail_closed_features: tuple[Feature, ...] = ()
    reject_on: tuple[Literal["numerical_gate_failed", "capability_probe_failed"], ...] = (
        "numerical_gate_failed",
        "capability_probe_failed",
    )
    allow_runtime_fallback: bool = False
    emit_fallback_event: bool = True
    runtime_fallback_budget: Budget = Budget(max_share=0.01, window_s=300, max_duration_s=3600)
    overrides: tuple[Override, ...] = ()

    @field_validator("preferred", "fallback")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            expand(name)
        return names

    @model_validator(mode="after")
    def _pinned_is_one(self) -> Policy:
        if self.mode == "pinned" and (len(self.preferred) != 1 or self.fallback):
            raise ValueError("mode pinned takes exactly one preferred backend and no fallback")
        if self.mode == "pinned" and len(expand(self.preferred[0])) != 1:
            kernels = ", ".join(expand(self.preferred[0]))
            raise ValueError(f"mode pinned takes one kernel, not a family: name one of {kernels}")
        if self.mode == "pinned" and self.overrides:
            raise ValueError("mode pinned takes no overrides: they would choose another backend")
        for override in self.overrides:
            for name in override.preferred:
                expand(name)
        return self

    def rejects(self, reason: Reason) -> bool:
        """Whether a backend that showed this when it was probed or replayed may not serve: `reject_on`."""
        gate = "numerical_gate_failed" if reason.code is Code.NUMERIC_DRIFT else "capability_probe_failed"
        return gate in self.reject_on

    def backends(self) -> tuple[str, ...]:
        """Every kernel that the policy names, in order, without repeats."""
        names = [*self.preferred, *self.fallback, *(n for o in self.overrides for n in o.preferred)]
        return tuple(dict.fromkeys(kernel for name in names for kernel in expand(name)))

    def ordered(self, phase: str, kv_len: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(preferred kernels, fallback kernels) for a phase and KV length; the last matching override wins."""
        names = self.preferred
        for override in self.overrides:
            if override.covers(phase, kv_len):
                names = (*override.preferred, *self.preferred)
        preferred = tuple(dict.fromkeys(kernel for name in names for kernel in expand(name)))
        fallback = tuple(dict.fromkeys(kernel for name in self.fallback for kernel in expand(name)))
        return preferred, tuple(kernel for kernel in fallback if kernel not in preferred)


class Resolution(BaseModel):
    """The chain for one case: `chain[0]` runs, the rest may stand in; who was left out, and why."""

    model_config = ConfigDict(frozen=True)

    phase: str
    requested: str
    chain: tuple[str, ...]
    excluded: dict[str, tuple[Reason, ...]]

    @property
    def resolved(self) -> str | None:
        return self.chain[0] if self.chain else None

    @property
    def fell_back(self) -> bool:
        return self.resolved != self.requested

    def explain(self) -> str:
        """Every backend left out with all its reasons, in one line."""
        return " | ".join(
            f"{name}: " + "; ".join(str(reason) for reason in reasons) for name, reasons in self.excluded.items()
        )


def resolve(
    policy: Policy,
    case: AttentionCase,
    reasons_of: Callable[[str, AttentionCase], list[Reason]],
    observed: Mapping[str, list[Reason]] | None = None,
) -> Resolution:
    """Chain of the policy for one case.

    `reasons_of(backend, case)` gives the declared reasons; `observed` the failed probes by backend.
    A feature in `fail_closed_features` takes every fallback out: such a request never changes
    backend unnoticed.
    """
    kv_len = max((m.kv_len for m in case.members), default=0)
    preferred, fallback = policy.ordered(case.phase, kv_len)
    closed = sorted(set(policy.fail_closed_features) & set(case.features))
    chain: list[str] = []
    excluded: dict[str, tuple[Reason, ...]] = {}
    for name in (*preferred, *fallback):
        reasons = [*reasons_of(name, case), *(observed or {}).get(name, [])]
        if closed and name not in preferred:
            reasons.append(_closed(name, closed))
        if reasons:
            excluded[name] = tuple(reasons)
        else:
            chain.append(name)
    return Resolution(phase=case.phase, requested=preferred[0], chain=tuple(chain), excluded=excluded)


def _closed(name: str, features: Sequence[str]) -> Reason:
    return Reason(
        code=Code.POLICY_EXCLUDED,
        dimension="features",
        observed=", ".join(features),
        allowed="preferred backends only",
        source="policy fail_closed_features",
        message=f"{name} may not stand in for a fail-closed feature",
    )


class _File(_Strict):
    attention_policy: Policy


def load_policy(path: Path) -> Policy:
    """The policy of a YAML file. UserError names the file, the key and what is wrong with it."""
    if not is_file(path):
        near = nearest(path.name, (p.name for p in path.parent.glob("*.yaml"))) if is_dir(path.parent) else ""
        raise UserError(f"policy {path}: no such file; {near}".rstrip("; "))
    known = {*_File.model_fields, *Policy.model_fields, *Budget.model_fields, *Override.model_fields}
    return validated(_File, read_yaml(path), path, known).attention_policy
