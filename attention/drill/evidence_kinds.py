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


def _none(rows: Rows) -> Rows:
    return []


def _every(step: int, **columns: Any) -> Callable[[Rows], Rows]:
    return lambda rows: [{**row, **columns} if i % step == 0 else row for i, row in enumerate(rows)]


def _half(step: int, **columns: Any) -> Callable[[Tables], Tables]:
    """Half of the texts are of a language of their own, and the candidate is wrong there, every `step` positions."""

    def changed(tables: Tables) -> Tables:
        ids = sorted({row["prompt_id"] for row in tables["model_replay"]})
        theirs = set(ids[::2])
        rows = [{**row, "language": "pl" if row["prompt_id"] in theirs else "en"} for row in tables["model_replay"]]
        mine = [row for row in rows if row["language"] == "pl" and row["side"] == "candidate"]
        others = [row for row in rows if row["language"] != "pl" or row["side"] != "candidate"]
        return {**tables, "model_replay": others + _every(step, **columns)(mine)}

    return changed


def _crossed(rows: Rows) -> Rows:
    """Every answer is the one of the prompt before."""
    return [{**row, "passed": other["passed"]} for row, other in zip(rows, rows[-1:] + rows[:-1], strict=True)]


_NO_FIGURES = dict.fromkeys(("finite_mask_equal", "r_rms", "r_max", "r_row", "lse_max_abs", "bias_z"))
_ELSE = "torch_sdpa:efficient"
#: A flip at a tie. Figures of the model are those of float32: a limit of the floor is far below a fixed one there.
_TIE = {"next_token_equal": False, "flip_margin": 1e-4}

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
        "no_floor",
        "the champion was executed one way only",
        _where("model_replay", _none, "champion"),
        "model.kl_mean_times",
    ),
    EvidenceKind(
        "floor_cut",
        "the champion's second recording ends early",
        _where("model_replay", _two_thirds, "champion"),
        "model.floor_positions",
    ),
    EvidenceKind(
        "one_token_off",
        "one position is off, by less than a fixed limit",
        _where("model_replay", _first(kl=2e-7)),
        "model.kl_p999_times",
    ),
    EvidenceKind(
        "ties_flip",
        "every hundredth token flips, where sound executions flip none",
        _where("model_replay", _every(100, **_TIE)),
        "model.flip_rate_times",
    ),
    EvidenceKind(
        "clear_flip",
        "one token flips that no sound execution would",
        _where("model_replay", _first(next_token_equal=False, flip_margin=0.1)),
        "model.flip_margin_times",
    ),
    EvidenceKind("language_wrong", "one language is wrong", _half(1, kl=3e-3), "model.bucket.kl_mean"),
    EvidenceKind("language_drifts", "one language is off", _half(1, kl=3e-9), "model.bucket.kl_mean_times"),
    EvidenceKind("language_flips", "one language flips ties", _half(80, **_TIE), "model.bucket.flip_rate_times"),
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
        "category_not_solved",
        "the champion solves no prompt of a category",
        _where("business_replay", _each(passed=False), None),
        "business.category.champion_passes",
    ),
    EvidenceKind(
        "category_lost",
        "the candidate solves no prompt of a category",
        _where("business_replay", _each(passed=False)),
        "business.category.mcnemar_p",
    ),
    EvidenceKind(
        "category_crossed",
        "every answer of a category goes to the next prompt",
        _where("business_replay", _crossed),
        "business.category.flip_rate",
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
