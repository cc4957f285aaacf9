"""The offline stages by name, in their order: what a release and a qualification share."""

from __future__ import annotations

from collections.abc import Callable

from tasks import baseline, fingerprint, probe, replay
from tasks.context import Context, StageOutcome

OFFLINE_STAGES: dict[str, Callable[[Context], StageOutcome]] = {
    "fingerprint": fingerprint.run,
    "probe": probe.run,
    "replay": replay.run,
    "baseline": baseline.run,
}


def run_stage(name: str, context: Context) -> StageOutcome:
    """Run one offline stage: it measures in the environments, writes evidence and judges it."""
    return OFFLINE_STAGES[name](context)
