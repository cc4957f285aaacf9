"""A measured selection as a policy file: a proposal that a person reviews, never the candidate under test.

    write_policy(path, selection.services[0], load_policy(candidate.policy), note=selection.sentence)

What was measured decides `preferred`, the backends that have every cell, best first, and `overrides`, one for each
range of KV lengths where another was best. All else is the candidate's own: fallback, fail-closed features, budget. A
bucket `kv<=1024` stands for 513 to 1024 keys; neighbours with one choice share an override; lengths that were not
measured keep `preferred`. Comments name the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol, get_args

import yaml

from attention.backends import expand
from attention.cases import Phase
from attention.errors import UserError
from attention.policy import Override, Policy
from attention.replaced import replaced

MARK = "# Proposed from measured baselines by data/proposed_policy.py; review it before a candidate names it."
_SMALLEST = 16  # upper end of the first bucket, attention.cases.shape_bucket


class Choice(Protocol):
    """What is used of a choice of gates/selection.py."""

    @property
    def family(self) -> str: ...

    @property
    def kv_len(self) -> int: ...

    @property
    def backend(self) -> str: ...

    @property
    def evidence(self) -> str: ...


class Service(Protocol):
    """What is used of a service of gates/selection.py."""

    @property
    def preferred(self) -> Sequence[str]: ...

    @property
    def choices(self) -> Sequence[Choice]: ...


@dataclass(frozen=True)
class _Run:
    """Neighbouring buckets of one phase with one choice, shortest first."""

    choices: tuple[Choice, ...]

    @property
    def override(self) -> Override:
        first, last = self.choices[0], self.choices[-1]
        low = None if first.kv_len <= _SMALLEST else first.kv_len // 2 + 1
        return Override.model_validate(
            {"phase": first.family, "kv_len": (low, last.kv_len + 1), "preferred": (first.backend,)}
        )

    @property
    def lines(self) -> list[str]:
        content = self.override.model_dump(mode="json")
        text = yaml.safe_dump(content, sort_keys=False, default_flow_style=True, width=math.inf).rstrip()
        return [*(f"    {_comment(choice.evidence)}" for choice in self.choices), f"    - {text}"]


def propose(service: Service, base: Policy) -> Policy:
    """`base` with the preferred backends and overrides that the service's measurements ask for.

    A pinned policy becomes one with a preference, since a selection is none. When no backend has every cell, the
    preferred ones of `base` stay, and the overrides are against those.
    """
    preferred = tuple(service.preferred) or base.preferred
    content = base.model_dump() | {
        "mode": "preferred-with-fallback" if base.mode == "pinned" else base.mode,
        "preferred": preferred,
        "overrides": tuple(run.override for run in _runs(service.choices, expand(preferred[0])[0])),
    }
    return Policy.model_validate(content)


def write_policy(path: Path, service: Service, base: Policy, note: str) -> Policy:
    """Write the proposal and return it; `note` becomes its second line.

    Raises UserError for a file that this module did not write: it may be what is under test.
    """
    check_ours(path)
    policy = propose(service, base)
    runs = _runs(service.choices, expand(policy.preferred[0])[0])
    content = {"attention_policy": policy.model_dump(mode="json", exclude={"overrides"})}
    lines = [MARK, _comment(note), yaml.safe_dump(content, sort_keys=False, default_flow_style=None).rstrip()]
    if runs:
        lines += ["  overrides:", *(line for run in runs for line in run.lines)]
    with replaced(path) as fresh:
        fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return policy


def _runs(choices: Sequence[Choice], usual: str) -> list[_Run]:
    """Where the choice is not the usual backend, neighbours merged; phases in their order."""
    found: list[_Run] = []
    for choice in sorted(choices, key=lambda c: (get_args(Phase).index(c.family), c.kv_len)):
        last = found[-1].choices[-1] if found else None
        if choice.backend == usual:
            continue
        if last and (last.family, last.backend, 2 * last.kv_len) == (choice.family, choice.backend, choice.kv_len):
            found[-1] = _Run((*found[-1].choices, choice))
        else:
            found.append(_Run((choice,)))
    return found


def _comment(text: str) -> str:
    """One line, whatever a name in it holds."""
    return "# " + " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def check_ours(path: Path) -> None:
    """Raises UserError for a file that is there and that this module did not write, and for a place where none can be
    written: asked before a measurement, neither costs it."""
    try:
        with TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise UserError(f"{path}: nothing can be written there ({error.strerror}); name another file") from error
    try:
        with path.open(encoding="utf-8") as file:
            ours = file.readline().rstrip("\n") == MARK
    except FileNotFoundError:
        return
    except (OSError, ValueError):  # a folder, or bytes that are no text
        ours = False
    if not ours:
        raise UserError(f"{path}: is there and was not proposed from baselines; name another file for the proposal")
