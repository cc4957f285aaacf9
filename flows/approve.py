"""`flows approve`: a person's yes to a release that is held, by the release's id."""

from __future__ import annotations

import getpass
import time

from attention.errors import UserError, nearest, readable
from data.paths import cell_dir, cells
from tasks.record import Approval, Record, RecordStore


def approve(release_id: str, note: str = "") -> Record:
    """Write the approval into the record of the cell whose release that is; the release sees it within a second.

    Raises UserError when no cell holds that release, or it waits for nothing.
    """
    held: list[str] = []
    for gpu, family in cells():
        store = RecordStore(cell_dir(gpu, family) / "record.json")
        record = store.load()
        if record.state == "held" and record.release_id:
            held.append(record.release_id)
        if record.release_id == release_id:
            if record.state != "held":
                raise UserError(f"{release_id} is {record.state}, not held: there is nothing to approve")
            return store.update(lambda r: _approve(r, release_id, note), over_lease=True)
    raise UserError(f"no release {release_id} is held; {nearest(release_id, held) if held else 'nothing is held'}")


def _approve(record: Record, release_id: str, note: str) -> None:
    if record.held_stage is None:
        raise UserError(f"{release_id} is held, but by no gate ({record.reason}): there is nothing to approve")
    verdict = next((s.verdict for s in record.stages if s.stage == record.held_stage), "inconclusive")
    if verdict == "error":
        raise UserError(
            f"{release_id}: {record.held_stage} ended in an error: mend it and release again; {record.reason}"
        )
    by, now = readable(getpass.getuser()), time.time()
    record.approval = Approval(release_id=release_id, stage=record.held_stage, by=by, time=now, note=note)
