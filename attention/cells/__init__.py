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

import json
from itertools import product
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from attention.cases import AttentionCase
from attention.checks import CHECKS
from attention.errors import UserError, nearest
from attention.probe import Probe


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
    """Probes of a cell file (YAML or JSON). UserError names the file, the key and the problem."""
    try:
        text = path.read_text()
        cells = Cells.model_validate(json.loads(text) if path.suffix == ".json" else yaml.safe_load(text))
        for group in cells.groups:
            for one in group.checks:
                for field in one.when:
                    _known(path, "field", field, AttentionCase.model_fields)
                for name in () if one.run == "all" else one.run:
                    _known(path, "check", name, CHECKS)
        return cells.probes()
    except OSError as error:
        raise UserError(f"cells {path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"cells {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise UserError(f"cells {path}: neither YAML nor JSON ({' '.join(str(error).split())})") from error


def _known(path: Path, what: str, name: str, known: dict[str, Any]) -> None:
    if name not in known:
        raise UserError(f"cells {path}: {what} {name!r} is unknown; {nearest(name, known)}")
