"""A seeded stratified sample of recorded requests, and what of production it stands for.

A stratum is a bucket of prompt lengths (upper end, a power of two) x language x features. Every stratum gives
one request as far as `wanted` reaches, the most frequent first; the rest is shared out in proportion to what
each has left, by largest remainder. Within a stratum the requests are drawn by the hash of seed and number, so
that the same file, `wanted` and seed give the same sample on every machine. DuckDB draws it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa

# $wanted requests at most, $seed: any text. Table `entries`: one row a request, numbered from 0.
_DRAW = """
with
    strata as (
        select prompt_bucket, language, features, count(*) as n,
            row_number() over (order by count(*) desc, prompt_bucket, language, features) as rank
        from entries group by prompt_bucket, language, features
    ),
    first as (
        select *, (rank <= $wanted)::bigint as base,
            (n - 1) * greatest(0, least($wanted, sum(n) over ()) - count(*) over ()) as dividend,
            greatest(1, sum(n) over () - count(*) over ()) as divisor
        from strata
    ),
    shared as (
        select *, base + dividend // divisor as whole,
            row_number() over (order by dividend % divisor desc, rank) as turn,
            greatest(0, least($wanted, sum(n) over ()) - sum(base + dividend // divisor) over ()) as left_over
        from first
    ),
    quotas as (select *, whole + (turn <= left_over)::bigint as quota from shared),
    drawn as (
        select e.number, q.rank, e.tokens, q.quota >= row_number() over (
            partition by q.rank order by md5(concat($seed, '/', e.number)), e.number) as kept
        from entries e join quotas q using (prompt_bucket, language, features)
    )
select q.prompt_bucket, q.language, q.features, q.n, q.quota, sum(d.tokens),
    coalesce(list(d.number) filter (d.kept), [])
from drawn d join quotas q using (rank) group by all order by q.prompt_bucket, q.language, q.features
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is kept of a request to draw it: a few numbers, while its text stays in the file."""

    prompt_tokens: int
    output_tokens: int
    prompt_bucket: int  # upper end of the range of prompt lengths, tokens
    language: str  # ISO 639-1, or `und`
    features: str  # joined by `+`; `plain` for none


@dataclass(frozen=True)
class Stratum:
    """Requests that are alike, and how many of them are in the sample."""

    prompt_bucket: int
    language: str
    features: str
    requests: int
    tokens: int  # prompt and output
    sampled: int


@dataclass(frozen=True)
class SampleReport:
    """How many of how many. A share is of all that was recorded: what had to be rejected is not stood for."""

    strata: tuple[Stratum, ...]
    rejected: int  # recorded requests that cannot be replayed

    @property
    def requests(self) -> int:
        return sum(stratum.requests for stratum in self.strata)

    @property
    def sampled(self) -> int:
        return sum(stratum.sampled for stratum in self.strata)

    @property
    def request_share(self) -> float:
        """Share of the recorded requests that are alike to at least one of the sample, 0..1."""
        stood_for = sum(stratum.requests for stratum in self.strata if stratum.sampled)
        return stood_for / max(1, self.requests + self.rejected)

    @property
    def token_share(self) -> float:
        """The same of prompt and output tokens, over the usable requests: a rejected line has no known length."""
        stood_for = sum(stratum.tokens for stratum in self.strata if stratum.sampled)
        return stood_for / max(1, sum(stratum.tokens for stratum in self.strata))

    def __str__(self) -> str:
        covered = sum(stratum.sampled > 0 for stratum in self.strata)
        return (
            f"{self.sampled} of {self.requests} requests drawn, {covered} of {len(self.strata)} strata; they stand "
            f"for {self.request_share:.1%} of the recorded requests and {self.token_share:.1%} of their tokens"
        )


def draw(entries: Sequence[Entry], wanted: int, seed: str, *, rejected: int = 0) -> tuple[frozenset[int], SampleReport]:
    """Positions of the drawn entries, `min(wanted, len(entries))` of them, and the report."""
    table = pa.table(
        {
            "number": pa.array(range(len(entries)), pa.int64()),
            "tokens": pa.array([e.prompt_tokens + e.output_tokens for e in entries], pa.int64()),
            "prompt_bucket": pa.array([e.prompt_bucket for e in entries], pa.int64()),
            "language": pa.array([e.language for e in entries], pa.string()),
            "features": pa.array([e.features for e in entries], pa.string()),
        }
    )
    config = {"threads": "2", "autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    with duckdb.connect(":memory:", config=config) as connection:
        connection.execute("set enable_progress_bar = false")
        connection.execute("set enable_external_access = false")
        connection.register("entries", table)
        rows = connection.execute(_DRAW, {"wanted": wanted, "seed": seed}).fetchall()
    strata = tuple(
        Stratum(bucket, language, features, requests=n, tokens=int(tokens), sampled=int(quota))
        for bucket, language, features, n, quota, tokens, _ in rows
    )
    return frozenset(number for row in rows for number in row[-1]), SampleReport(strata, rejected)
