"""Rows of perf_backends as the pictures of a baseline read them: the last of each side, backend and case."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

from attention.cases import AttentionCase
from data.requests import Family
from tasks.figures.canvas import Evidence, Row

FAMILIES: tuple[str, ...] = get_args(Family)


@dataclass(frozen=True)
class Measured:
    """What one backend did on one case, or why there is no figure."""

    side: str
    backend: str
    name: str  # the backend, and beside other sides whose
    family: str
    case_id: str
    case: AttentionCase
    kv_len: int  # upper end of the bucket, tokens
    weight: float  # share of the family's work in the bucket
    outcome: str
    p50_s: float | None  # null unless the outcome is `measured`: what is no measurement has no place in a picture
    p95_s: float | None
    limit_s: float | None

    @property
    def num_sequences(self) -> int:
        return len(self.case.members)

    @property
    def q_len(self) -> int:
        return max(member.q_len for member in self.case.members)

    @property
    def setting(self) -> str:
        """What a service has one of: `paged_nhd/16, eager, 32/8 heads of 128, bfloat16`."""
        case = self.case
        pages = "" if case.page_size is None else f"/{case.page_size}"
        dims = (
            f"{case.head_dim_qk}" if case.head_dim_qk == case.head_dim_vo else f"{case.head_dim_qk}/{case.head_dim_vo}"
        )
        kv = "" if case.kv_dtype == "auto" else f" with {case.kv_dtype} KV"
        heads = f"{case.heads_q}/{case.heads_kv} heads of {dims}"
        return f"{case.layout}{pages}, {case.execution}, {heads}, {case.dtype}{kv}"


def kernels(evidence: Evidence) -> list[Measured]:
    """Kernel times: one a (side, backend, case), the last that was measured; families, backends in their order."""
    found = evidence.rows(
        "select * from perf_backends where release_id = $id and metric = 'kernel_s'"
        " qualify row_number() over (partition by side, backend, case_id order by time desc) = 1"
    )
    with_side = len({row["side"] for row in found}) > 1
    read = [_measured(row, with_side=with_side) for row in found if row["case_json"]]
    return sorted(read, key=lambda one: (_family(one), one.side, one.backend, one.num_sequences, one.kv_len))


def is_compared(evidence: Evidence) -> bool:
    """Whether a champion was measured too, and a candidate is judged by it."""
    return "champion" in _sides(evidence)


def is_survey(evidence: Evidence) -> bool:
    """Whether backends were measured and nobody was to be compared."""
    return bool(_sides(evidence)) and not is_compared(evidence)


def _sides(evidence: Evidence) -> set[str]:
    found = evidence.rows("select distinct side from perf_backends where release_id = $id")
    return {row["side"] for row in found}


def fastest(found: Iterable[Measured]) -> dict[str, float]:
    """Least P50 by case id; a case that nobody was measured on is not there."""
    least: dict[str, float] = {}
    for one in found:
        if one.p50_s:
            least[one.case_id] = min(one.p50_s, least.get(one.case_id, one.p50_s))
    return least


def _measured(row: Row, *, with_side: bool) -> Measured:
    def figure(name: str) -> Any:
        return row[name] if row["outcome"] == "measured" else None

    return Measured(
        side=row["side"],
        backend=row["backend"],
        name=f"{row['side']} {row['backend']}" if with_side else row["backend"],
        family=row["family"],
        case_id=row["case_id"],
        case=AttentionCase.model_validate_json(row["case_json"]),
        kv_len=row["kv_len"] or 0,
        weight=row["weight"] or 0.0,
        outcome=row["outcome"] or "failed",
        p50_s=figure("p50_s"),
        p95_s=figure("p95_s"),
        limit_s=figure("limit_s"),
    )


def _family(one: Measured) -> int:
    return FAMILIES.index(one.family)
