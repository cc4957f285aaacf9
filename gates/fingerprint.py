"""Gate of the fingerprint stage: is it known what is judged, and did it stay the same?

Each side must have one fingerprint id, and every row that a side measured so far must carry it. Control
runs the champion's environment and so carries the champion's id. Called again after a resume, the gate
finds an environment that changed between two shards.
"""

from __future__ import annotations

from pathlib import Path

from data.lake import Lake
from data.plan import Plan
from gates.evaluate import Note, evaluate, load_suite
from gates.thresholds import load_limits
from gates.verdict import Check, fail_closed

_MEASURED = ("probes", "tensor_replay", "model_replay", "business_replay", "perf_samples", "requests")

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

_ROWS = " union all ".join(
    f"select '{table}' as source, side, fingerprint_id from {table} where release_id = $release"  # noqa: S608
    for table in _MEASURED
)

_FOREIGN = f"""
with measured as ({_ROWS}),
known as (
  select case side when 'champion' then 'champion' else 'candidate' end as side, fingerprint_id
  from fingerprints where release_id = $release and trim(fingerprint_id) <> ''
)
select count(*) as num_rows,
  count(*) filter (not exists (
    select 1 from known where known.fingerprint_id = measured.fingerprint_id
      and known.side = case measured.side when 'candidate' then 'candidate' else 'champion' end
  )) as foreign_rows
from measured
"""  # noqa: S608 - table names are constants


@fail_closed("fingerprint")
def judge(lake: Path, release_id: str, plan: Plan) -> list[Check]:
    """Judge the `fingerprints` rows of both sides against every measured row of this release."""
    limits = load_limits("fingerprint", plan.name)
    with Lake(lake, release_id=release_id) as tables:
        frame = tables.frame(_SIDES, release=release_id)
        [(num_rows, num_foreign)] = tables.rows(_FOREIGN, release=release_id)
        [(num_fingerprints,)] = tables.rows(
            "select count(*) from fingerprints where release_id = $release", release=release_id
        )
    frame["foreign_rows"] = float(num_foreign)
    one = Note("1 side without an id", num_fingerprints, f"no fingerprint of {frame['named'][0]}")
    several = Note("1 further id of a side", num_fingerprints, "a side has several environments")
    empty = Note("1 fingerprint without fields", num_fingerprints)
    rows = num_rows + num_fingerprints
    foreign = Note(f"1 foreign row of {rows}", rows, "rows of an environment that was not fingerprinted")
    notes = {"recorded": one, "one_id": several, "identity": empty, "measured_rows": foreign}
    return evaluate(load_suite("fingerprint"), frame, limits, notes)
