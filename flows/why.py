"""`python -m flows why RELEASE`: why it passed or failed, down to the rows of evidence; a qualification too.

Every gate's verdict, each check that did not pass with its figure, limit and owner, the events, and
the worst rows behind the first failing check. Prompts, outputs and tokens are not shown: a row names
its prompt or request, and the lake has the text.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from attention.errors import UserError
from attention.reasons import Reason
from data.paths import cell_dir, cells, lake_dir
from gates.report import figure, table
from gates.verdict import Check, GateReport, Verdict
from tasks import qualified
from tasks.record import RecordStore
from tasks.story import Event, Story, tell, with_evidence

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_ROWS = 8
_BEGAN = re.compile(r"\d{8}-\d{6}$")  # at the end of an id: tasks.context.new_release_id
MAX_EVENTS = 15


class Evidence(BaseModel):
    """Rows of one table of the lake, worst first, every value ready to print."""

    table: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Why(BaseModel):
    """The answer. `first_failing` and `evidence` are None for a release whose gates all passed."""

    release_id: str
    headline: str
    state: str
    reason: str
    champion: str | None
    confirmed_backend: str | None
    gates: tuple[GateReport, ...]
    first_failing: Check | None
    evidence: Evidence | None
    events: tuple[Event, ...]


def why(release_id: str) -> Why:
    """Raises UserError, naming the nearest ids, for a release that no record, no qualification and no lake knows."""
    story = _story(release_id)
    gate = next((gate for gate in story.gates if gate.verdict is not Verdict.PASS), None)
    check = gate.decisive[0] if gate is not None and gate.decisive else None
    return Why(
        release_id=release_id,
        headline=story.headline,
        state=story.state,
        reason=story.reason,
        champion=story.champion,
        confirmed_backend=story.confirmed_backend,
        gates=story.gates,
        first_failing=check,
        evidence=_evidence(release_id, gate.stage, check) if gate and check else None,
        events=story.events,
    )


def _story(release_id: str) -> Story:
    lake = lake_dir()
    for gpu, family in cells():
        try:
            return tell(RecordStore(cell_dir(gpu, family) / "record.json").load(), lake, release_id)
        except (KeyError, UserError):  # another cell's release; `status` and `doctor` tell of a broken record
            continue
    if (kept := qualified.find(release_id)) is not None:
        return with_evidence(kept, lake)
    known = known_releases(lake)
    if release_id not in known:
        close = difflib.get_close_matches(release_id, known, n=3, cutoff=0.3) or known[-3:]
        hint = f"nearest: {', '.join(close)}" if close else "nothing has been released yet"
        raise UserError(f"release {release_id!r} is not known: {hint}")
    return with_evidence(
        Story(
            release_id=release_id,
            candidate=release_id,
            gpu="?",
            family="?",
            state="unknown",
            reason="no record tells of it: its record is gone, or an earlier version qualified it",
        ),
        lake,
    )


def newest() -> str:
    """The id that began last, by the time in it. Raises UserError where there is none."""
    known = known_releases(lake_dir())
    if not known:
        raise UserError("nothing has been released yet: `make release` does it")
    return max(known, key=lambda one: (found.group() if (found := _BEGAN.search(one)) else "", one))


def known_releases(lake: Path) -> list[str]:
    """Ids with evidence in the lake, and of qualifications, sorted; from folder names, without reading a file."""
    return sorted({folder.name.partition("=")[2] for folder in lake.glob("*/release_id=*")} | set(qualified.known()))


# ---------------------------------------------------------------------------- evidence

_CASES = "backend, confirmed_backend, case_id, inputs, seed, r_rms, r_max, r_row, lse_max_abs, worst_row_at, error"
_TOKENS = "prompt_id, mode, position, kl, next_token_equal, flip_margin, nll_champion, nll_candidate"
_WINDOWS = 'share, "window", side, num_requests, num_errors, ttft_p50_s, ttft_p95_s, tpot_p50_s, tpot_p95_s'
_REQUESTS = """
select request_id, role, shadow, status, finish_reason, num_nonfinite, resolved_prefill, confirmed_prefill,
  resolved_decode, confirmed_decode, coalesce(error, fallback_reason) as error
from requests
where release_id = $id and side = 'candidate' and (status is distinct from 200 or fallback
  or finish_reason in ('error', 'cancelled') or error is not null
  or num_nonfinite is distinct from 0 or confirmed_prefill is distinct from resolved_prefill
  or (output_tokens > 1 and confirmed_decode is distinct from resolved_decode))
order by time
"""
# A breach ends its step at once, so the step began with the last change of shares.
_SLOWEST = """
with step as (
  select * from requests where release_id = $id
    and time >= (select max(time) from events where release_id = $id and kind = 'share_changed')
)
select epoch(time) as time, request_id, output_tokens, batch_size_mean, ttft_s, tpot_s,
  (select median(tpot_s) from step where side = 'control') as control_p50_tpot_s
from step where side = 'candidate' and shadow is not true and tpot_s is not null order by tpot_s desc
"""
# Whoever's: the champion's requests stand under the release that it was started by, so theirs are told by time.
_LOST = """
with span as (select min(time) as first, max(time) as last from events where release_id = $id)
select epoch(time) as time, request_id, role, status, finish_reason, output_tokens, e2e_s, error
from requests, span
where (release_id = $id or (role = 'champion' and time between span.first and span.last)) and shadow is not true
  and not coalesce(status < 400 and finish_reason not in ('error', 'cancelled'), false)
order by requests.time
"""
_PARTED = (
    "select request_id, len(theirs.token_ids) as champion_tokens, len(ours.token_ids) as shadow_tokens,"
    " list_position([pair[1] is not distinct from pair[2]"
    " for pair in list_zip(theirs.token_ids, ours.token_ids)], false) as first_difference"
    " from requests ours join requests theirs using (request_id)"
    " where ours.release_id = $id and ours.side = 'candidate' and ours.shadow"
    " and theirs.role = 'champion' and not theirs.shadow and theirs.token_ids <> ours.token_ids"
    " order by first_difference nulls last"
)

_NO_ROWS = "what a process did not live to write, nothing can show"
_STEP = re.compile(r"^(\d+)%\.")  # before the checks of a canary step
_TEXT = ("error", "reasons")  # columns that may wrap; they come last


def _evidence(release_id: str, stage: str, check: Check) -> Evidence | None:
    """The worst rows of the table that the check summed up; None where there are none."""
    from data.lake import Lake

    name, sql, parameters = _source(stage, check)
    # A row as a struct keeps its column names.
    whole = f"select evidence_row from ({sql} limit {MAX_ROWS}) evidence_row"  # noqa: S608 - our own SQL
    # The champion's rows stand under the release that it was started by.
    with Lake(lake_dir(), release_id=None if sql in (_PARTED, _LOST) else release_id) as lake:
        rows = [row for (row,) in lake.rows(whole, id=release_id, **parameters)]
    if not rows:
        return None
    columns = tuple(column.removesuffix("_json") for column in rows[0])
    texts = tuple(tuple(_cell(column, value) for column, value in row.items()) for row in rows)
    return Evidence(table=name, columns=columns, rows=texts)


def _source(stage: str, check: Check) -> tuple[str, str, dict[str, Any]]:
    """Table, query and its parameters for one check, by the names that the gates give their checks."""
    step = _STEP.match(check.check)
    name = check.check[step.end() :] if step else check.check
    layer, _, rest = name.partition(".")
    last = name.rpartition(".")[2]
    if stage == "probe":
        columns = "backend, probe, level, status, confirmed_backend, max_abs_error, reasons_json"
        return _select("probes", columns, "status <> 'pass'", "backend, probe")
    if stage == "replay" and layer == "model":
        mode = "mode = 'decode'" if rest.startswith("decode.") else "mode = 'prefill'"
        mode = f"side = 'candidate' and {mode}"  # the champion's rows are its floor
        order = "flip_margin desc nulls last" if "flip" in last else "kl desc nulls first"
        return _select("model_replay", _TOKENS, mode, order)
    if stage == "replay" and layer == "business":
        columns = "prompt_id, category, side, passed, grader"
        condition, category = "passed is not true", {}
        if "." in rest:  # a check of one category
            condition, category = f"{condition} and category = $category", {"category": rest.partition(".")[0]}
        return _select("business_replay", columns, condition, "prompt_id, side", **category)
    if stage == "replay":
        order = last if last in ("r_rms", "r_max", "r_row") else "lse_max_abs" if last == "lse" else "r_rms"
        order = f"error nulls last, {order} desc nulls first"
        if "." not in rest:  # a check of all cases
            return _select("tensor_replay", _CASES, "side = 'candidate'", order)
        condition = "side = 'candidate' and dtype_class = $dtype_class"
        return _select("tensor_replay", _CASES, condition, order, dtype_class=rest.partition(".")[0])
    if stage == "baseline" and layer == "history":
        columns = "family, metric, backend, case_id, weight, p50_s, limit_ratio, outcome, error"
        order = "contains($named, case_id) desc, weight desc"  # the message names the worst cells, and earlier figures
        return _select("perf_backends", columns, "side = 'candidate'", order, named=check.message)
    if stage == "baseline" and layer == "stress":
        columns = "side, max_running, level, rate_per_s, num_offered, num_good, num_failed, ttft_p95_s, tpot_p95_s"
        return _select("perf_stress", columns, "true", "max_running, level, side")
    if stage == "baseline" and layer in _LOSSES:
        columns = "side, family, metric, backend, case_id, outcome, error"
        return _select("perf_backends", columns, "outcome is distinct from 'measured'", "side, family, case_id")
    if stage == "baseline":
        columns = "family, metric, shape_bucket, case_id, weight, ratio, ratio_low, ratio_high, verdict, num_blocks"
        family = f"family = '{layer}'" if layer in ("prefill", "decode", "extend") else "true"
        return _select("perf_cells", columns, family, "ratio desc nulls first")
    if stage in ("canary", "expand") and name.startswith(("ttft", "tpot", "memory")):
        condition, share = f"stage = '{stage}'", {}
        if step:
            condition, share = f"{condition} and share = $share", {"share": int(step[1])}
        return _select("canary_windows", _WINDOWS, condition, 'share, "window", side', **share)
    if stage == "shadow" and "divergence" in name:
        return "requests", _PARTED, {}
    if name == "breach" and "TPOT" in check.message:
        return "requests", _SLOWEST, {}
    if name == "lost_requests" or (name == "breach" and "users lost" in check.message):
        return "requests", _LOST, {}
    if stage in ("shadow", "canary", "expand"):
        return "requests", _REQUESTS, {}
    return _select("fingerprints", "side, fingerprint_id, node, gpu, model", "true", "side")


#: Checks of the baseline gate that count what was lost.
_LOSSES = (
    "possible",
    "lost",
    "comparable",
    "paired",
    "out_of_memory",
    "illegal_access",
    "compile_failed",
    "capture_failed",
)


def _select(name: str, columns: str, condition: str, order: str, **parameters: Any) -> tuple[str, str, dict[str, Any]]:
    sql = f"select {columns} from {name} where release_id = $id and {condition} order by {order}"  # noqa: S608
    return name, sql, parameters


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column == "time":  # seconds since 1970; a person reads the local clock, as in the events
        return datetime.fromtimestamp(value).astimezone().strftime("%H:%M:%S")
    if column == "reasons_json":
        return "; ".join(str(Reason.model_validate(reason)) for reason in json.loads(value))
    if isinstance(value, float):
        return figure(value) if math.isfinite(value) else str(value)
    return str(value)


# ---------------------------------------------------------------------------- terminal


def render(answer: Why) -> RenderableType:
    """For a terminal: verdicts, what did not pass, the evidence, the last events."""
    from rich.console import Group
    from rich.text import Text

    from flows.tables import Rows

    parts: list[RenderableType] = [Text(answer.headline, style="bold")]
    if answer.reason:
        parts.append(Text(answer.reason))
    facts = {"id": answer.release_id, "compared with": answer.champion, "confirmed": answer.confirmed_backend}
    for label, value in facts.items():
        if value:
            parts.append(Text(f"{label}: {value}", style="dim"))
    parts.append(_gate_table(answer))
    if answer.evidence is not None and answer.first_failing is not None:
        parts.append(Text(f"\n{answer.evidence.table} behind {answer.first_failing.check}", style="bold"))
        rows = Rows(*answer.evidence.columns, text=answer.evidence.columns[-1] in _TEXT)
        for row in answer.evidence.rows:
            rows.add(*row)
        parts.append(rows)
    elif answer.first_failing is not None:
        parts.append(Text(f"\nno row of the lake is behind {answer.first_failing.check}: {_NO_ROWS}"))
    if answer.events:
        parts.append(Text("\nevents", style="bold"))
        rows = Rows("time", "severity", "event", "subject", "what happened")
        for event in answer.events[-MAX_EVENTS:]:
            clock = event.time.strftime("%H:%M:%S") if event.time else ""
            rows.add(clock, event.severity, event.kind, event.subject, event.message)
        parts.append(rows)
    return Group(*parts)


def _gate_table(answer: Why) -> RenderableType:
    """A line a gate; under it the checks that did not pass."""
    from rich.text import Text

    from flows.tables import Rows, word

    if not answer.gates:
        unknown = answer.state == "unknown"
        return Text("the lake has no verdict of a gate on it" if unknown else "no gate has judged it yet")
    rows = Rows("gate", "verdict", "observed", "limit", "owner", "why")
    for gate in answer.gates:
        rows.add(gate.stage, word(gate.verdict.value, gate.verdict.value), "", "", "", gate.reason)
        for row in table(gate):
            if row.verdict != "pass":
                reason = f"{row.message}\nlimit: {row.reason}" if row.reason else row.message
                rows.add(f"  {row.check}", word(row.verdict, row.verdict), row.observed, row.limit, row.owner, reason)
    return rows
