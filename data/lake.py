"""Reads the evidence lake: DuckDB over the Parquet files that `attention.schemas` writes.

One view a table, in memory. A table that nobody has written yet is an empty view with the right
columns, and a column that old files lack is null, so a query never fails for want of evidence: it
counts none. DuckDB may read this folder and nothing else, and it never fetches an extension.

    with Lake(lake_dir()) as lake:
        lake.rows("select count(*) from requests where release_id = $release", release=release_id)

`strict_max(x)`, `strict_min(x)` and `strict_avg(x)` are null as soon as one row lacks x; DuckDB's own
aggregates skip nulls, which would let a figure that was never measured pass. NaN stays NaN in all.

Every file costs about a millisecond a query. Where instances write a file each half second, pass
`wanted` to leave out files that cannot matter, and `keep` the rows that several queries need.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import duckdb

from attention.errors import EvidenceError
from attention.schemas import SCHEMAS

if TYPE_CHECKING:
    import pandas as pd

_MACROS = """
create macro strict_max(x) as case when count(x) = count(*) then max(x) end;
create macro strict_min(x) as case when count(x) = count(*) then min(x) end;
create macro strict_avg(x) as case when count(x) = count(*) then avg(x) end;
"""


class Lake:
    """The lake as it is when a table is first named; open a new one to see files that came later.

    `release_id`: read the evidence of that release alone, so that a broken file of another cannot matter.
    `wanted(table, file)` says which files to read; default: all. What cannot be read is an EvidenceError.
    """

    def __init__(
        self, path: Path, wanted: Callable[[str, Path], bool] | None = None, *, release_id: str | None = None
    ) -> None:
        self.path = path.resolve()
        self._release_id = release_id
        self._wanted = wanted or (lambda table, file: True)
        self._viewed: set[str] = set()
        # Extensions would be downloaded from the network on first use.
        config = {
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "threads": "2",
        }
        self._connection = duckdb.connect(":memory:", config=config)
        self._connection.execute("set enable_progress_bar = false")
        self._connection.execute(f"set allowed_directories = [{_quoted(str(self.path) + '/')}]")
        self._connection.execute("set enable_external_access = false")
        self._connection.execute(_MACROS)
        self._connection.execute("set lock_configuration = true")

    def rows(self, sql: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """All rows of one SELECT; `$name` in it is filled from the parameter of that name."""
        self._prepare(sql)
        with self._readable():
            fetched: list[tuple[Any, ...]] = self._connection.execute(sql, parameters).fetchall()
        return fetched

    def frame(self, sql: str, **parameters: Any) -> pd.DataFrame:
        """The result of one SELECT as a pandas frame; SQL null becomes NaN in numeric columns."""
        self._prepare(sql)
        with self._readable():
            result: pd.DataFrame = self._connection.execute(sql, parameters).df()
        return result

    def keep(self, name: str, sql: str, **parameters: Any) -> None:
        """Keep the result of one SELECT in memory as table `name`, for queries that follow."""
        self._prepare(sql)
        with self._readable():
            self._connection.execute(f"create temp table {name} as {sql}", parameters)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """DuckDB's refusal, as one line; it names the file if it got as far as opening one."""
        try:
            yield
        except duckdb.Error as error:
            tables = ", ".join(sorted(self._viewed)) or "no table"
            raise EvidenceError(
                f"lake {self.path} ({tables}): {str(error)[:400]}; move a broken file out of it"
            ) from error

    def _prepare(self, sql: str) -> None:
        kinds = [statement.type for statement in duckdb.extract_statements(sql)]
        if kinds != [duckdb.StatementType.SELECT]:
            raise ValueError(f"the lake is read only: one SELECT, not {[str(kind) for kind in kinds]}")
        for table in SCHEMAS.keys() - self._viewed:
            if re.search(rf"\b{table}\b", sql):
                self._viewed.add(table)
                with self._readable():
                    self._connection.execute(f"create view {table} as {self._select(table)}")

    def _select(self, table: str) -> str:
        """The table's columns in the schema's order, from its files if it has any."""
        empty = f"_empty_{table}"
        self._connection.register(empty, SCHEMAS[table].empty_table())
        folder = "*" if self._release_id is None else glob.escape(self._release_id)
        found = (self.path / table).glob(f"release_id={folder}/*.parquet")
        files = sorted(file for file in found if self._wanted(table, file))
        if not files:
            return f"select * from {empty}"  # noqa: S608 - names come from SCHEMAS
        # hive_types: an id such as 20261129 must stay text. The union gives old files the new columns.
        source = (
            f"read_parquet([{', '.join(_quoted(str(file)) for file in files)}], union_by_name = true, "
            "hive_partitioning = true, hive_types = {'release_id': 'VARCHAR'})"
        )
        columns = ", ".join(f'"{name}"' for name in SCHEMAS[table].names)
        return f"select {columns} from (select * from {source} union all by name select * from {empty})"  # noqa: S608

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Lake:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
