"""The lake is read with DuckDB: nothing written is an empty table, and nothing else can be read."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attention.errors import EvidenceError
from attention.schemas import SCHEMAS, write_rows
from data.lake import Lake

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def test_a_table_that_nobody_wrote_is_an_empty_view_with_the_right_columns(tmp_path: Path) -> None:
    with Lake(tmp_path / "nothing here") as lake:
        for table, schema in SCHEMAS.items():
            frame = lake.frame(f"select * from {table}")
            assert list(frame.columns) == schema.names
            assert frame.empty


def test_rows_of_several_processes_are_read_together_and_a_release_id_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "it's a=lake"
    write_rows(path, "requests", [{"request_id": "a", "time": NOW}], release_id="20261129")
    write_rows(path, "requests", [{"request_id": "b", "token_ids": [1, 2]}], release_id="r2")
    with Lake(path) as lake:
        rows = lake.rows("select release_id, request_id, token_ids from requests order by request_id")
        assert rows == [("20261129", "a", None), ("r2", "b", [1, 2])]
        assert lake.rows("select request_id from requests where release_id = $release", release="r2") == [("b",)]
        at = lake.rows("select count(*) from requests where time >= to_timestamp($at)", at=NOW.timestamp())
        assert at == [(1,)]


def test_an_unfinished_file_is_not_seen(tmp_path: Path) -> None:
    write_rows(tmp_path, "events", [{"kind": "x"}], release_id="r")
    (tmp_path / "events" / "release_id=r" / ".half.tmp").write_bytes(b"PAR1")
    with Lake(tmp_path) as lake:
        assert lake.rows("select count(*) from events") == [(1,)]


def test_a_column_that_an_old_file_lacks_is_null(tmp_path: Path) -> None:
    folder = tmp_path / "events" / "release_id=old"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"release_id": ["old"], "kind": ["share_changed"]}), folder / "a.parquet")
    with Lake(tmp_path) as lake:
        assert lake.rows("select release_id, kind, severity from events") == [("old", "share_changed", None)]


def test_a_strict_aggregate_is_null_when_one_row_lacks_the_figure_and_nan_stays(tmp_path: Path) -> None:
    values = {"whole": [1.0, 2.0], "lacking": [1.0, None], "broken": [1.0, math.nan]}
    for name, column in values.items():
        write_rows(tmp_path, "perf_samples", [{"family": name, "seconds": v} for v in column], release_id="r")
    with Lake(tmp_path) as lake:
        found = dict(lake.rows("select family, strict_max(seconds) from perf_samples group by family"))
    assert found["whole"] == 2.0
    assert found["lacking"] is None
    assert math.isnan(found["broken"])


@pytest.mark.parametrize(
    "statement",
    [
        "drop view requests",
        "copy (select 1) to '/tmp/x.csv'",
        "select 1; select 2",
        "install httpfs",
        "set threads = 8",
    ],
)
def test_only_a_select_is_accepted(tmp_path: Path, statement: str) -> None:
    with Lake(tmp_path) as lake, pytest.raises(ValueError, match="read only"):
        lake.rows(statement)


def test_nothing_outside_the_lake_and_no_extension_can_be_read(tmp_path: Path) -> None:
    outside = tmp_path / "secret.csv"
    outside.write_text("a\n1\n")
    with Lake(tmp_path / "lake") as lake:
        with pytest.raises(EvidenceError, match="disabled by configuration"):
            lake.rows(f"select * from read_csv('{outside}')")
        with pytest.raises(EvidenceError):
            lake.rows("select * from read_parquet('https://example.invalid/a.parquet')")


def test_a_broken_file_is_one_line_that_names_it_and_breaks_no_other_release(tmp_path: Path) -> None:
    write_rows(tmp_path, "events", [{"kind": "x"}], release_id="new")
    broken = tmp_path / "events" / "release_id=old" / "a.parquet"
    broken.parent.mkdir()
    broken.write_bytes(b"no parquet\n")
    with Lake(tmp_path) as lake, pytest.raises(EvidenceError, match=f"{broken}.*move a broken file out") as raised:
        lake.rows("select * from events")
    assert "\n" not in str(raised.value)
    with Lake(tmp_path, release_id="new") as lake:
        assert lake.rows("select kind from events") == [("x",)]


def test_a_release_id_is_no_pattern(tmp_path: Path) -> None:
    write_rows(tmp_path, "events", [{"kind": "x"}], release_id="new")
    with Lake(tmp_path, release_id="*") as lake:
        assert lake.rows("select kind from events") == []
