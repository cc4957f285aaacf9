"""Gate of the fingerprint stage: is it known what is judged, and did it stay the same?

Each side must have one fingerprint id, and every row that a side measured so far must carry it. Control
runs the champion's environment and so carries the champion's id. The probe, replay and baseline gates ask
the same of the rows that they judge (`measured_rows`): an environment may change between two stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data.lake import Lake
from data.plan import Plan
from gates.evaluate import Note, evaluate, load_suite
from gates.thresholds import Limits, load_limits
from gates.verdict import Check, fail_closed

MEASURED = ("probes", "tensor_replay", "model_replay", "business_replay", "perf_samples", "perf_cells", "requests")

_SIDES = """
with sides as (select unnest(['champion', 'candidate']) as side),
known as (
  select side, count(distinct fingerprint_id) filter (trim(fingerprint_id) <> '') as num_ids,
    count(*) filter (coalesce(trim(identity_json), '') in ('', '{}')) as num_empty
  from fingerprints where release_id = $release group by side
)
select count(*) filter (coalesce(num_ids, 0) = 0) as missing_sides,
  coalesce(sum(greatest(num_ids - 1, 0)), 0)::double as extra_ids,
  coalesce(sum(num_empty), 0)::double as empty_identities,
  string_agg(side, ', ') filter (coalesce(num_ids, 0) = 0) as named
from sides left join known using (side)
"""

_FOREIGN = """
with measured as ({rows}),
known as (
  select case side when 'champion' then 'champion' else 'candidate' end as side, fingerprint_id
  from fingerprints where release_id = $release and trim(fingerprint_id) <> ''
)
select count(*) as num_rows,
  count(*) filter (not exists (
    select 1 from known where known.fingerprint_id = measured.fingerprint_id
      and known.side = case measured.side when 'candidate' then 'candidate' else 'champion' end
  ))::double as foreign_rows
from measured
"""


@fail_closed("fingerprint")
def judge(lake: Path, release_id: str, plan: Plan) -> list[Check]:
    """Judge the `fingerprints` rows of both sides against every measured row of this release."""
    limits = load_limits("fingerprint", plan.name)
    with Lake(lake, release_id=release_id) as tables:
        frame = tables.frame(_SIDES, release=release_id)
        [(num_fingerprints,)] = tables.rows(
            "select count(*) from fingerprints where release_id = $release", release=release_id
        )
        rows = measured_rows(tables, release_id, limits, MEASURED, num_fingerprints)
    one = Note("1 side without an id", num_fingerprints, f"no fingerprint of {frame['named'][0]}")
    several = Note("1 further id of a side", num_fingerprints, "a side has several environments")
    empty = Note("1 fingerprint without fields", num_fingerprints)
    notes = {"recorded": one, "one_id": several, "identity": empty}
    return [*evaluate(load_suite("fingerprint"), frame, limits, notes), *rows]


def measured_rows(
    tables: Lake, release_id: str, limits: Limits, sources: Sequence[str], num_fingerprints: int = 0
) -> list[Check]:
    """One check: every row of the tables `sources` was measured by its own side's fingerprinted environment.

    Each gate asks this of the tables that it judges: when the fingerprint stage itself is judged, most of
    them are still empty.
    """
    each = (f"select side, fingerprint_id from {table} where release_id = $release" for table in sources)  # noqa: S608
    frame = tables.frame(_FOREIGN.format(rows=" union all ".join(each)), release=release_id)
    num = int(frame["num_rows"][0]) + num_fingerprints
    note = Note(f"1 foreign row of {num}", num, "rows of an environment that was not fingerprinted")
    return evaluate(load_suite("measured_rows"), frame, limits, {"measured_rows": note})
