"""`flows nightly`: qualify anew what serves, so that a driver, library or model that changed under it shows.

The schedule runs it (prefect.yaml). It compares the champion of every cell with the declared incumbent
of its GPU model, and with its own accepted baselines of other days (`gates.history`), because what becomes slower
for both shows nowhere else. It moves no traffic; a gate that fails makes the flow run Failed, which alerts hang on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow

from data.candidate import load_candidate
from data.paths import cell_dir, cells
from flows.qualify import Qualified, Say, qualify_cell
from gates.verdict import Verdict
from tasks import lifecycle
from tasks.record import RecordStore


class NightlyFailedError(RuntimeError):
    """What serves would not pass its own gates today."""


@flow(name="nightly", log_prints=True)
def nightly() -> list[dict[str, Any]]:
    """Qualify every cell's champion. Raises NightlyFailedError when one does not pass."""
    found = run(say=print)
    bad = [one for one in found if one.exit_code]
    if bad:
        raise NightlyFailedError("; ".join(f"{one.gpu} {one.family}: {one.reason}" for one in bad))
    return [one.model_dump(mode="json") for one in found]


def run(*, say: Say) -> list[Qualified]:
    """The same without Prefect; an empty list when nothing was released yet."""
    found = []
    for gpu, family in cells():
        champion = RecordStore(cell_dir(gpu, family) / "record.json").load().champion
        if champion is None:
            continue
        loaded = load_candidate(Path(champion.candidate_file))
        cell = next(c for c in loaded.cells if (c.gpu, c.family) == (gpu, family))
        reference = lifecycle.incumbent(gpu, family)
        say(f"nightly: {champion.candidate} on {gpu} {family} against {reference.candidate}")
        one = qualify_cell(loaded, load_candidate(Path(reference.candidate_file)), cell, say, prefix="nightly")
        for line in history(one):
            say(f"nightly: {line}")
        found.append(one)
    if not found:
        say("nightly: nothing was released yet")
    return found


def history(one: Qualified) -> list[str]:
    """What the baseline was compared with, and each check of the history that did not pass; empty where an earlier gate
    ended the night."""
    checks = [check for gate in one.gates for check in gate.checks if check.check.startswith("history.")]
    return [
        check.detectable.removeprefix("recorded: ") if check.verdict is Verdict.PASS else check.message
        for check in checks
        if check.check == "history.baselines" or check.verdict is not Verdict.PASS
    ]
