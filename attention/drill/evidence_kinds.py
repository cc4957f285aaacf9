"""Faults of a release's evidence: what a kernel, an engine or a lost shard leaves in the tables. Free of torch.

Each changes the tables of a sound release; the check that must see it is the replay or the probe gate's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Rows = list[dict[str, Any]]
Tables = dict[str, Rows]


@dataclass(frozen=True)
class EvidenceKind:
    """`change` gives new tables and leaves the old ones as they are."""

    name: str
    what: str
    change: Callable[[Tables], Tables]
    check: str


def _where(table: str, change: Callable[[Rows], Rows], side: str | None = "candidate") -> Callable[[Tables], Tables]:
    """A change of one table's rows of one side, or of both."""

    def changed(tables: Tables) -> Tables:
        mine = [row for row in tables[table] if side in (None, row["side"])]
        others = [row for row in tables[table] if side not in (None, row["side"])]
        return {**tables, table: others + change(mine)}

    return changed


def _each(**columns: Any) -> Callable[[Rows], Rows]:
    return lambda rows: [{**row, **columns} for row in rows]


def _first(**columns: Any) -> Callable[[Rows], Rows]:
    return lambda rows: [{**rows[0], **columns}, *rows[1:]]


def _two_thirds(rows: Rows) -> Rows:
    return rows[: len(rows) * 2 // 3]


def _same_cases(rows: Rows) -> Rows:
    """Two thirds of the cases, of both sides alike."""
    cases = sorted({(row["case_id"], row["inputs"]) for row in rows})
    kept = set(cases[: len(cases) * 2 // 3])
    return [row for row in rows if (row["case_id"], row["inputs"]) in kept]


def _same_prompts(rows: Rows) -> Rows:
    """Two thirds of the prompts, of both sides alike."""
    prompts = sorted({row["prompt_id"] for row in rows})
    return [row for row in rows if row["prompt_id"] in prompts[: len(prompts) * 2 // 3]]


def _crossed(rows: Rows) -> Rows:
    """Every answer is the one of the prompt before."""
    return [{**row, "passed": other["passed"]} for row, other in zip(rows, rows[-1:] + rows[:-1], strict=True)]


_NO_FIGURES = dict.fromkeys(("finite_mask_equal", "r_rms", "r_max", "r_row", "lse_max_abs", "bias_z"))
_ELSE = "torch_sdpa:efficient"

EVIDENCE_KINDS: tuple[EvidenceKind, ...] = (
    EvidenceKind(
        "call_raises",
        "one case ends in an illegal access",
        _where("tensor_replay", _first(error="RuntimeError: illegal access", **_NO_FIGURES)),
        "tensor.errors",
    ),
    EvidenceKind(
        "other_kernel_in_tensors",
        "another kernel ran than was resolved",
        _where("tensor_replay", _first(confirmed_backend=_ELSE)),
        "tensor.confirmed",
    ),
    EvidenceKind(
        "shard_lost", "the candidate's last shard is missing", _where("tensor_replay", _two_thirds), "tensor.lost_cases"
    ),
    EvidenceKind(
        "shard_lost_on_both_sides",
        "a third of the cases is missing",
        _where("tensor_replay", _same_cases, None),
        "tensor.planned_cases",
    ),
    EvidenceKind(
        "few_cases", "a third of the cases is missing", _where("tensor_replay", _same_cases, None), "tensor.cases"
    ),
    EvidenceKind(
        "recording_cut", "the model's recording ends early", _where("model_replay", _two_thirds), "model.positions"
    ),
    EvidenceKind(
        "other_kernel_in_model",
        "another kernel ran than was resolved",
        _where("model_replay", _each(confirmed_backend=_ELSE)),
        "model.confirmed",
    ),
    EvidenceKind(
        "answers_lost",
        "a third of the answers is missing",
        _where("business_replay", _two_thirds),
        "business.lost_prompts",
    ),
    EvidenceKind(
        "golden_set_cut",
        "a third of the prompts is missing",
        _where("business_replay", _same_prompts, None),
        "business.planned_prompts",
    ),
    EvidenceKind(
        "answer_without_grade",
        "one answer ended in an error",
        _where("business_replay", _first(error="timeout", passed=None)),
        "business.errors",
    ),
    EvidenceKind(
        "other_kernel_in_answers",
        "another kernel ran than was resolved",
        _where("business_replay", _each(confirmed_backend=_ELSE)),
        "business.confirmed",
    ),
    EvidenceKind(
        "champion_passes_nothing",
        "the champion solves no prompt, so nothing can be lost",
        _where("business_replay", _each(passed=False), None),
        "business.champion_passes",
    ),
    EvidenceKind(
        "answers_crossed",
        "every answer goes to the next prompt",
        _where("business_replay", _crossed),
        "business.flip_rate",
    ),
    EvidenceKind(
        "foreign_rows",
        "rows of an environment without a fingerprint",
        _where("tensor_replay", _first(fingerprint_id="another")),
        "measured_rows",
    ),
    EvidenceKind(
        "probe_not_run", "a required probe is missing", _where("probes", lambda rows: rows[1:]), "probe.known"
    ),
    EvidenceKind(
        "other_kernel_in_probe",
        "another kernel ran than was probed",
        _where("probes", _first(confirmed_backend=_ELSE)),
        "probe.confirmed",
    ),
)
