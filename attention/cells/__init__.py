"""Cells to probe as data: groups of cases, each the product of its axes, with the checks that run on them.

groups:
  - base: {heads_q: 32, heads_kv: 8, dtype: bfloat16}      # fields of AttentionCase
    axes:                                                  # one entry of every axis makes a case
      - [{phase: decode, batch: q1s512}, {phase: prefill, batch: q257}]
      - [{execution: eager}, {execution: cuda_graph}]
    checks:                                                # besides the plain probe of every cell
      - {when: {execution: [cuda_graph]}, run: [graph_replay]}
      - {when: {execution: [eager]}, run: all}
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from attention.cases import AttentionCase
from attention.checks import CHECKS
from attention.errors import UserError, nearest
from attention.probe import Probe
from attention.validated import problem
from attention.yaml_file import read_json, read_yaml


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CellChecks(_Strict):
    """Checks that run on the cells whose fields have one of the values in `when`."""

    when: dict[str, tuple[Any, ...]] = {}
    run: tuple[str, ...] | Literal["all"]

    def names(self, case: AttentionCase) -> tuple[str, ...]:
        if any(getattr(case, field) not in values for field, values in self.when.items()):
            return ()
        return tuple(CHECKS) if self.run == "all" else self.run


class CellGroup(_Strict):
    """The cases that share a base."""

    base: dict[str, Any]
    axes: tuple[tuple[dict[str, Any], ...], ...] = ()
    checks: tuple[CellChecks, ...] = ()

    def cases(self) -> list[AttentionCase]:
        """One case for each combination of the axes, in their order."""
        found = []
        for combination in product(*self.axes):
            fields = dict(self.base)
            for changes in combination:
                fields |= changes
            found.append(AttentionCase(**fields))
        return found


class Cells(_Strict):
    groups: tuple[CellGroup, ...]

    def probes(self) -> list[Probe]:
        """The plain probe of every cell, then its checks; each once."""
        found: dict[tuple[str, AttentionCase], Probe] = {}
        for group in self.groups:
            for case in group.cases():
                checks = [name for one in group.checks for name in one.names(case)]
                for check in (None, *checks):
                    probe = Probe(name=check or "cell", feature=case.phase, case=case, required=False, check=check)
                    found.setdefault((probe.name, case), probe)
        return list(found.values())


def load_cells(path: Path) -> list[Probe]:
    """Probes of a cell file (YAML or JSON), at least one. UserError names the file, the key and the problem."""
    document = read_json(path) if path.suffix == ".json" else read_yaml(path)
    try:
        cells = Cells.model_validate(document)
    except ValidationError as error:
        names = {*Cells.model_fields, *CellGroup.model_fields, *CellChecks.model_fields}
        raise UserError(f"cells {path}: {problem(error, names)}") from error
    for num, group in enumerate(cells.groups):
        for one in group.checks:
            for field in one.when:
                _known(path, "field", field, AttentionCase.model_fields)
            for name in () if one.run == "all" else one.run:
                _known(path, "check", name, CHECKS)
        if not all(group.axes):
            raise UserError(f"cells {path}: groups.{num}.axes: an axis is empty, which leaves no case; name an entry")
        try:
            group.cases()
        except ValidationError as error:
            raise UserError(f"cells {path}: groups.{num}: {problem(error, AttentionCase.model_fields)}") from error
    if not cells.groups:
        raise UserError(f"cells {path}: groups: there is none, so no case to probe; name one")
    return cells.probes()


def _known(path: Path, what: str, name: str, known: dict[str, Any]) -> None:
    if name not in known:
        raise UserError(f"cells {path}: {what} {name!r} is unknown; {nearest(name, known)}")
