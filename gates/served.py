"""What the gates under traffic read from `requests`: one arm's rows between two moments, summarised.

Who served a row: the candidate and its control are processes that this release started, so their rows
carry its id and their `side`. The champion was started by an earlier release, perhaps as a candidate,
so its rows are found by `role`, the cluster that the router sent the request to.

A row is *ok* (answered to its end), a *fault* (the server's doing: status 5xx or none, finish reason
`error` or none, `cancelled` with an error), or neither (4xx, or the client left). Latency and backends
are judged on ok rows, faults on all.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pandas as pd

from data.lake import Lake
from gates import statistics
from gates.evaluate import Note

CANDIDATE = "release_id = $release and side = 'candidate' and shadow is false"
CANDIDATE_SHADOW = "release_id = $release and side = 'candidate' and shadow is true"
CONTROL = "release_id = $release and side = 'control' and shadow is false"
CONTROL_SHADOW = "release_id = $release and side = 'control' and shadow is true"
CHAMPION = """role = 'champion' and shadow is false and (gpu, model) in (
  select (gpu, model) from served where release_id = $release and side = 'candidate')"""
LIVE = f"({CANDIDATE} or {CONTROL} or ({CHAMPION}))"

# Without prompts and outputs, which are most of the bytes.
_SERVED = """
select release_id, fingerprint_id, gpu, model, time, side, request_id, session_id, role, shadow,
  output_tokens, ttft_s, tpot_s, e2e_s, batch_size_mean, fallback, num_nonfinite, peak_memory_bytes, token_ids, error,
  confirmed_prefill, confirmed_decode,
  (status is null or status >= 500 or (status < 400 and (
    finish_reason is null or finish_reason = 'error'
    or (finish_reason = 'cancelled' and error is not null)))) as fault,
  coalesce(status < 400 and finish_reason not in ('error', 'cancelled'), false) as ok,
  -- A fallback runs another backend than the resolved one, and must still say which.
  (coalesce(confirmed_prefill = resolved_prefill, false)
    or (fallback is true and confirmed_prefill is not null))
  and (coalesce(output_tokens < 2, false) or coalesce(confirmed_decode = resolved_decode, false)
    or (fallback is true and confirmed_decode is not null)) as confirmed
from requests
where time >= to_timestamp($start) and time < to_timestamp($end)
  and (release_id = $release or role = 'champion')
"""

_SUMMARY = """
with arm as (select * from served where {arm})
select count(*) as num_requests,
  count(*) filter (ok) as num_ok,
  count(*) filter (fault) as num_faults,
  case when count(*) filter (ok and num_nonfinite is null) = 0
    then count(*) filter (num_nonfinite > 0) end::double as nonfinite,
  count(*) filter (ok and not confirmed) as wrong_backend,
  case when count(*) filter (ok and fallback is null) = 0
    then count(*) filter (fallback) end::double as fallbacks,
  count(distinct coalesce(fingerprint_id, '')) as num_ids,
  count(*) filter (coalesce(fingerprint_id, '') not in (
    select fingerprint_id from fingerprints
    where release_id = $release and side = 'candidate' and fingerprint_id is not null)) as foreign_rows,
  case when count(*) filter (ok and peak_memory_bytes is null) = 0
    then max(peak_memory_bytes) end::double as peak_memory,
  string_agg(distinct concat_ws(' ', confirmed_prefill, confirmed_decode), '; ')
    filter (ok and not confirmed) as wrong_named,
  string_agg(distinct error, '; ') filter (fault) as errors
from arm
"""

# A file that was last written this long before a span holds no row of it, clocks of two nodes allowed for.
_SLACK_S = 60.0


@dataclass(frozen=True)
class Span:
    """Half-open time: start <= a row's time < end; both need a time zone."""

    start: datetime
    end: datetime

    def __post_init__(self) -> None:
        if self.start.tzinfo is None or self.end.tzinfo is None:
            raise ValueError("a span needs times with a time zone")


@dataclass(frozen=True)
class ClientOutcome:
    """What the side that sends traffic saw: requests sent, answered to the end, lost or cut off.

    `elsewhere`: of the lost ones, how many champion, control and router had, by role. The rest counts against the
    candidate.
    """

    sent: int
    ok: int
    lost: int
    elsewhere: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Arm:
    """Rows of one arm, counted. A figure that some ok row lacks is NaN."""

    num_requests: int
    num_ok: int
    num_faults: int
    nonfinite: float
    wrong_backend: int
    fallbacks: float
    num_ids: int
    foreign_rows: int  # rows whose fingerprint is not one of the candidate's
    peak_memory: float
    wrong_named: str
    errors: str


@contextmanager
def served_rows(lake: Path, release_id: str, span: Span, only: Container[Path] | None = None) -> Iterator[Lake]:
    """The lake with a table `served`: this release's and the champion's rows inside the span.

    `only` limits it to these files of `requests`.
    """

    def wanted(table: str, file: Path) -> bool:
        if table != "requests":
            return True
        # A row is written after it was served, so an older file cannot hold it.
        recent = file.stat().st_mtime >= span.start.timestamp() - _SLACK_S
        return recent and (only is None or file in only)

    with Lake(lake, wanted) as tables:
        start, end = span.start.timestamp(), span.end.timestamp()
        tables.keep("served", _SERVED, release=release_id, start=start, end=end)
        yield tables


def arm(tables: Lake, release_id: str, which: str) -> Arm:
    """Summary of the served rows that the condition `which` (CANDIDATE, CONTROL, ...) selects."""
    [row] = tables.rows(_SUMMARY.format(arm=which), release=release_id)
    num, num_ok, faults, nonfinite, wrong, fallbacks, num_ids, foreign, memory, named, errors = row
    return Arm(
        num_requests=num,
        num_ok=num_ok,
        num_faults=faults,
        nonfinite=_or_nan(nonfinite),
        wrong_backend=wrong,
        fallbacks=_or_nan(fallbacks),
        num_ids=num_ids,
        foreign_rows=foreign,
        peak_memory=_or_nan(memory),
        wrong_named=named or "",
        errors=(errors or "")[:300],
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def rows_of(tables: Lake, release_id: str, which: str, columns: str) -> pd.DataFrame:
    """Columns of an arm's rows in the order of time; `ok`, `fault`, `confirmed` are columns too."""
    sql = f"select {columns} from served where {which} order by time"  # noqa: S608 - our constants
    return tables.frame(sql, release=release_id)


def candidate_figures(served: Arm) -> dict[str, float]:
    """Columns of the suites for one arm: what is deterministic, and the two rates with their bounds."""
    known = math.isfinite(served.fallbacks)
    errors = statistics.rate(served.num_faults, served.num_requests)
    fallbacks = statistics.rate(int(served.fallbacks) if known else 0, served.num_requests)
    rates = {
        "error_rate": errors.value,
        "error_rate_low": errors.low,
        "error_rate_high": errors.high,
        "fallback_rate": fallbacks.value if known else math.nan,
        "fallback_rate_low": fallbacks.low if known else math.nan,
        "fallback_rate_high": fallbacks.high if known else math.nan,
    }
    return {
        "num_candidate": served.num_requests,
        "nonfinite": served.nonfinite,
        "wrong_backend": served.wrong_backend,
        "foreign": served.foreign_rows,
        **rates,
    }


def candidate_notes(served: Arm) -> dict[str, Note]:
    """Notes of the checks that `candidate_figures` feeds."""
    num = served.num_requests
    fallbacks = int(served.fallbacks) if math.isfinite(served.fallbacks) else 0
    one = f"1 request of {num}"
    return {
        "nonfinite": Note(one, num, "requests whose logits held NaN or Inf"),
        "confirmed": Note(one, num, f"ran {served.wrong_named or 'what nothing confirmed'}"),
        "fingerprint": Note(one, num, "requests served by another environment than the fingerprinted one"),
        "error_rate": Note(statistics.rate_phrase("error rate", served.num_faults, num), num, served.errors),
        "fallback_rate": Note(statistics.rate_phrase("fallback rate", fallbacks, num), num),
    }


def client_figures(client: ClientOutcome, num_recorded: int) -> dict[str, float]:
    """Columns that compare what the client saw with what the instances recorded."""
    return {
        "lost": client.lost - sum(client.elsewhere.values()),
        "lost_elsewhere": sum(client.elsewhere.values()),
        "unaccounted": client.sent - client.ok - client.lost,
        "recorded_share": num_recorded / client.ok if client.ok else math.nan,
    }


def client_notes(client: ClientOutcome, num_recorded: int) -> dict[str, Note]:
    one = f"1 request of {client.sent}"
    named = ", ".join(f"{role} lost {num}" for role, num in sorted(client.elsewhere.items()))
    return {
        "lost_requests": Note(one, client.sent, "requests that the client never saw answered to the end"),
        "lost_elsewhere": Note(one, client.sent, f"{named}: nothing about the candidate shows on such a machine"),
        "unaccounted_requests": Note(one, client.sent, "neither answered nor lost: the client lost count"),
        "recorded": Note(one, client.sent, f"{num_recorded} rows for {client.ok} answered requests"),
    }


def recorded(tables: Lake, release_id: str) -> int:
    """Live rows of all arms."""
    return arm(tables, release_id, LIVE).num_requests
