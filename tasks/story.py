"""What there is to tell of one release: from the record what was decided, from the lake why.

MLflow, report.html and `flows why` all tell the same story, so they read it here. Nothing in it is a
prompt, an output or a token; those columns of the lake are never selected.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from gates.replay_model import Bucket, Divergence, buckets, divergences
from gates.replay_tensor import Beside, beside
from gates.thresholds import load_limits
from gates.verdict import Check, GateReport, Verdict
from tasks.record import Record

if TYPE_CHECKING:
    from data.lake import Lake

STAGES = ("fingerprint", "probe", "replay", "baseline", "shadow", "canary", "expand")
NUM_TENSOR = 30  # cases of the tensor replay that a report lists
DRILL = "drill"  # tag of a candidate that is meant to fail: it never becomes champion or previous

# First word of a headline; a state that is in none of these has no verdict yet.
_WORDS = {
    "promoted": "PASS",
    "superseded": "PASS",
    "qualified": "PASS",  # no state of a record: a qualification touches none
    "rejected": "FAIL",
    "rolling_back": "FAIL",
    "rolled_back": "FAIL",
    "held": "HOLD",
}


class Event(BaseModel):
    """One row of the lake's `events`, without its free-form detail."""

    model_config = ConfigDict(frozen=True)

    time: datetime | None
    kind: str
    severity: str
    subject: str
    message: str


class Story(BaseModel):
    """One release: who, how far, why, and the evidence in short."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    release_id: str
    candidate: str
    gpu: str
    family: str
    state: str  # a state of the record, `registered` before the first stage; or `qualified`
    failed_gate: str | None = None
    reason: str = ""
    champion: str | None = None  # candidate that served when this one was compared with it
    tags: tuple[str, ...] = ()
    fingerprint_id: str | None = None
    fingerprint_json: str | None = None  # identity and attestation, indented
    policy_yaml: str | None = None
    confirmed_backend: str | None = None  # prefill=torch_sdpa:flash, decode=torch_sdpa:flash
    tensor: tuple[Beside, ...] = ()  # worst cases of the tensor replay, the champion's ratios beside the candidate's
    buckets: tuple[Bucket, ...] = ()  # model replay by language, length and position, beside its floor
    divergences: tuple[Divergence, ...] = ()  # where the most likely tokens first part, by mode
    gates: tuple[GateReport, ...] = ()  # in the order of the stages
    events: tuple[Event, ...] = ()  # oldest first

    @property
    def verdict(self) -> str:
        """PASS, FAIL, HOLD, or OPEN while nothing is decided."""
        return _WORDS.get(self.state, "OPEN")

    @property
    def headline(self) -> str:
        """`PASS torch-flash-cpu`, `FAIL wrong-scale: replay`, `OPEN torch-flash-cpu: baselined`."""
        detail = self.failed_gate or (None if self.state == "promoted" else self.state.replace("_", " "))
        return f"{self.verdict} {self.candidate}" + (f": {detail}" if detail else "")

    @property
    def drill(self) -> bool:
        return DRILL in self.tags


def tell(record: Record, lake_dir: Path, release_id: str, *, policy_yaml: str | None = None) -> Story:
    """The story of a release of this cell. Raises KeyError if the record knows nothing of it."""
    known = _of_record(record, release_id)
    told = with_evidence(known.model_copy(update={"policy_yaml": policy_yaml}), lake_dir)
    if told.failed_gate is None and told.verdict in ("FAIL", "HOLD"):
        bad = [gate.stage for gate in told.gates if gate.verdict is not Verdict.PASS]
        return told.model_copy(update={"failed_gate": bad[-1] if bad else None})
    return told


def with_evidence(story: Story, lake_dir: Path) -> Story:
    """The story with what the lake holds of its release: gates, events, fingerprint, confirmed backend."""
    from data.lake import Lake

    with Lake(lake_dir, release_id=story.release_id) as lake:
        fingerprint_id, fingerprint_json = _fingerprint(lake, story.release_id)
        return story.model_copy(
            update={
                "tensor": beside(lake, story.release_id, NUM_TENSOR),
                "buckets": buckets(lake, story.release_id, load_limits("replay", "default")),
                "divergences": divergences(lake, story.release_id),
                "gates": gate_reports(lake, story.release_id),
                "events": events(lake, story.release_id),
                "fingerprint_id": fingerprint_id,
                "fingerprint_json": fingerprint_json,
                "confirmed_backend": confirmed_backend(lake, story.release_id),
            }
        )


def _of_record(record: Record, release_id: str) -> Story:
    """What the record says: the running release first, then how it ended, then what it serves as."""
    serving = [one for one in (record.champion, record.previous) if one is not None]
    others = [one.candidate for one in serving if one.release_id != release_id]
    attempt = next((one for one in reversed(record.attempts) if one.release_id == release_id), None)
    if record.release_id == release_id:
        return Story(
            release_id=release_id,
            candidate=record.candidate or "?",
            gpu=record.gpu,
            family=record.family,
            state=record.state or "registered",
            failed_gate=attempt.failed_gate if attempt and attempt.state == record.state else None,
            reason=record.reason or (attempt.reason if attempt else ""),
            champion=others[0] if others else None,
            tags=tuple(record.tags),
        )
    if attempt is not None and record.champion is not None and record.champion.release_id == release_id:
        # Taken out once, and given all traffic again by a person.
        return Story(
            release_id=release_id,
            candidate=attempt.candidate,
            gpu=record.gpu,
            family=record.family,
            state="promoted",
            reason=f"serves again, after it was {attempt.state.replace('_', ' ')}: {attempt.reason}",
            champion=others[0] if others else None,
        )
    if attempt is not None:
        return Story(
            release_id=release_id,
            candidate=attempt.candidate,
            gpu=record.gpu,
            family=record.family,
            state=attempt.state,
            failed_gate=attempt.failed_gate,
            reason=attempt.reason,
        )
    deployed = next((one for one in serving if one.release_id == release_id), None)
    if deployed is None:
        raise KeyError(release_id)
    return Story(
        release_id=release_id,
        candidate=deployed.candidate,
        gpu=record.gpu,
        family=record.family,
        state="promoted" if deployed is record.champion else "superseded",
    )


def gate_reports(lake: Lake, release_id: str) -> tuple[GateReport, ...]:
    """The latest report of each gate: a stage that was resumed wrote more than one."""
    found = lake.rows(
        'select stage, "check", verdict, observed, "limit", direction, detectable, num_evidence, owner,'
        " reason, message from gate_results where release_id = $id"
        " qualify time is not distinct from max(time) over (partition by stage)",
        id=release_id,
    )
    checks: dict[str, list[Check]] = {}
    names = (
        "verdict",
        "observed",
        "limit",
        "direction",
        "detectable",
        "num_evidence",
        "owner",
        "reason",
        "message",
    )
    for stage, check, *values in found:
        given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        checks.setdefault(stage, []).append(Check(check=check, **given))
    order = [stage for stage in STAGES if stage in checks] + sorted(set(checks) - set(STAGES))
    return tuple(GateReport(stage=stage, checks=tuple(checks[stage])) for stage in order)


def events(lake: Lake, release_id: str) -> tuple[Event, ...]:
    found = lake.rows(
        "select epoch(time), kind, severity, subject, message from events where release_id = $id order by time",
        id=release_id,
    )
    return tuple(
        Event(
            time=None if seconds is None else datetime.fromtimestamp(seconds).astimezone(),
            kind=kind or "",
            severity=severity or "info",
            subject=subject or "",
            message=message or "",
        )
        for seconds, kind, severity, subject, message in found
    )


def confirmed_backend(lake: Lake, release_id: str) -> str | None:
    """The confirmed backends of most of the candidate's own requests, else of its replay."""
    found = lake.rows(
        "select confirmed_prefill, confirmed_decode from requests"
        " where release_id = $id and side = 'candidate'"
        " and coalesce(confirmed_prefill, confirmed_decode) is not null"
        " group by all order by count(*) desc limit 1",
        id=release_id,
    )
    if found:
        prefill, decode = found[0]
        return f"prefill={prefill}, decode={decode}"
    found = lake.rows(
        "select split_part(case_id, '-', 1) as phase, mode(confirmed_backend) from tensor_replay"
        " where release_id = $id and side = 'candidate' and confirmed_backend is not null"
        " group by phase order by phase",
        id=release_id,
    )
    return ", ".join(f"{phase}={backend}" for phase, backend in found) or None


def _fingerprint(lake: Lake, release_id: str) -> tuple[str | None, str | None]:
    found = lake.rows(
        "select fingerprint_id, identity_json, attestation_json from fingerprints"
        " where release_id = $id and side = 'candidate' order by time desc limit 1",
        id=release_id,
    )
    if not found:
        return None, None
    fingerprint_id, identity, attestation = found[0]
    whole = {
        "fingerprint_id": fingerprint_id,
        "identity": json.loads(identity or "{}"),
        "attestation": json.loads(attestation or "{}"),
    }
    return fingerprint_id, json.dumps(whole, indent=2)
