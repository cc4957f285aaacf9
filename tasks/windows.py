"""Windows: what candidate and control served in a stretch of time, one row an arm, for figures and reports."""

from __future__ import annotations

from gates.served import Span
from tasks.context import Context


def write_windows(context: Context, stage: str, share: int, span: Span, window: int) -> None:
    """Rows of `canary_windows`: what each arm of the release served in the span, summed up."""
    from data.lake import Lake

    with Lake(context.lake, release_id=context.release_id) as lake:
        frame = lake.frame(
            "select side, max(fingerprint_id) as fingerprint_id, count(*) as num_requests,"
            " count(*) filter (status <> 200 or finish_reason = 'error') as num_errors,"
            " sum(num_nonfinite)::bigint as num_nonfinite, count(*) filter (fallback) as num_fallbacks,"
            " count(*) filter (confirmed_decode like 'unconfirmed%') as num_unconfirmed,"
            " quantile_cont(ttft_s, 0.5) as ttft_p50_s, quantile_cont(ttft_s, 0.95) as ttft_p95_s,"
            " quantile_cont(tpot_s, 0.5) as tpot_p50_s, quantile_cont(tpot_s, 0.95) as tpot_p95_s,"
            " max(peak_memory_bytes) as peak_memory_bytes"
            " from requests where release_id = $release and side in ('candidate', 'control')"
            " and epoch(time) >= $start and epoch(time) < $end group by side",
            release=context.release_id,
            start=span.start.timestamp(),
            end=span.end.timestamp(),
        )
    records = frame.astype(object).where(frame.notna(), None).to_dict("records")
    where = {"stage": stage, "share": share, "window": window}
    rows = [{**{str(name): value for name, value in row.items()}, **where} for row in records]
    context.write("canary_windows", rows)
