"""Named checks of a backend on a case: what a start-up probe, a public report and an audit all ask.

    run_check("softcap", create("flashinfer:fa2", "cuda"), case, device="cuda") -> list[Reason]

An empty list is a pass, unless it is a `NotApplicable`: then nothing was tested, which never counts as a pass.
Every failing dimension is a Reason of its own. Reasons whose code is in `RECORDED` describe and do not fail.
"""

from __future__ import annotations

from collections.abc import Callable

from attention.backends.base import Backend
from attention.cases import AttentionCase
from attention.checks import equivalences, features, memory, repeats
from attention.checks.common import MAX_RATIO, Measured, NotApplicable, Skip, raised
from attention.errors import UserError, nearest
from attention.reasons import Code, Reason

__all__ = ["CHECKS", "MAX_RATIO", "RECORDED", "Check", "Measured", "NotApplicable", "fails", "run_check"]

Check = Callable[[Backend, AttentionCase, str], list[Reason]]

CHECKS: dict[str, Check] = {
    "first_call": repeats.first_call,
    "numeric": features.numeric,
    "needles": features.needles,
    "softcap": features.softcap,
    "kv_scales": features.kv_scales,
    "window_edge": features.window_edge,
    "sinks": features.sinks,
    "alibi": features.alibi,
    "causal_alignment": features.causal_alignment,
    "lse": features.lse,
    "pad_poison": memory.pad_poison,
    "strides": memory.strides,
    "expand": memory.expand,
    "empty_members": memory.empty_members,
    "index_range": memory.index_range,
    "call_order": repeats.call_order,
    "repeatability": repeats.repeatability,
    "batch_invariance": repeats.batch_invariance,
    "graph_replay": repeats.graph_replay,
    "equivalences": equivalences.equivalences,
}

#: Codes that are facts about a sound backend, not failures.
RECORDED: frozenset[Code] = frozenset({Code.BATCH_VARIANT})


class _Willing:
    """A backend that is asked for what it declares to refuse."""

    def __init__(self, backend: Backend) -> None:
        self.name, self.plan = backend.name, backend.plan

    def check(self, case: AttentionCase) -> list[Reason]:
        return []


def fails(reasons: list[Reason]) -> bool:
    """Whether any of them is a failure and not only recorded."""
    return any(reason.code not in RECORDED for reason in reasons)


def run_check(
    name: str, backend: Backend, case: AttentionCase, device: str = "cpu", *, try_declared: bool = False
) -> list[Reason]:
    """Reasons that the check finds; empty when it passes, `NotApplicable` when it has nothing to test.

    A case that the backend declares it refuses is not applicable, unless `try_declared`. An exception of the
    backend is a Reason that names the dimension in its text. Raises UserError for an unknown name.
    """
    if name not in CHECKS:
        raise UserError(f"check {name!r} is unknown; {nearest(name, CHECKS)}")
    refused = backend.check(case)
    if refused and not try_declared:
        return NotApplicable(f"{backend.name} declares that it refuses this: {'; '.join(map(str, refused))}")
    if try_declared:
        backend = _Willing(backend)
    try:
        return CHECKS[name](backend, case, device)
    except Skip as why:
        return NotApplicable(str(why))
    except Exception as error:
        return [raised(name, error)]
