"""Schemas of the evidence lake: one pyarrow schema a table, with a version.

They live here, beside the runtime, because the processes that measure and serve write evidence
without DuckDB, MLflow or Prefect. Every row carries `COMMON`: who measured what, where, when.

`write_rows` writes under a temporary name and renames, so a reader never sees half a file and any
number of processes may write at once.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from attention.private import private_folder

SCHEMA_VERSION = 1

#: Tables whose columns have changed since version 1. Columns are only ever added, so a reader of old files sees nulls.
TABLE_VERSIONS: dict[str, int] = {"tensor_replay": 2, "model_replay": 2, "perf_samples": 2, "perf_cells": 2}

_STR, _INT, _REAL, _BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()

COMMON: dict[str, pa.DataType] = {
    "release_id": _STR,
    "fingerprint_id": _STR,  # of the environment that produced the row
    "node": _STR,
    "gpu": _STR,  # "cpu" without one
    "model": _STR,
    "time": pa.timestamp("us", tz="UTC"),
    "side": _STR,  # champion | control | candidate: whose figure this is
}

_TABLES: dict[str, dict[str, pa.DataType]] = {
    "fingerprints": {"identity_json": _STR, "attestation_json": _STR},
    # One row a (backend, cell, probe, level).
    "probes": {
        "backend": _STR,
        "probe": _STR,  # short_prefill, long_prefill, single_decode, ...
        "level": _STR,  # static | construct | execute
        "feature": _STR,
        "case_json": _STR,
        "status": _STR,  # pass | fail | unknown | known_bad
        "reasons_json": _STR,  # list of Reason
        "confirmed_backend": _STR,
        "max_abs_error": _REAL,
        "seconds": _REAL,
    },
    # One row a (case, seed, backend); figures against the fp64 oracle.
    "tensor_replay": {
        "backend": _STR,
        "confirmed_backend": _STR,
        "case_id": _STR,
        "case_json": _STR,
        "inputs": _STR,  # normal | needle | large_logit | window_edge | sink | activations
        "seed": _INT,
        "dtype_class": _STR,
        "finite_mask_equal": _BOOL,
        "num_finite_differ": _INT,  # numbers that are finite on one side only
        "first_finite_differ": _STR,  # the first of them: member, token, head, dim and what stands there; else null
        "max_abs": _REAL,
        "mean_abs": _REAL,
        "rel_l2": _REAL,
        "worst_row": _REAL,
        "worst_row_index": _INT,
        "worst_row_at": _STR,  # the same row as "member 0 token 12 head 3"
        "ulp_p50": _REAL,  # quantiles of |error| in ulps of the output's dtype at the exact value
        "ulp_p99": _REAL,
        "ulp_max": _REAL,
        "cosine": _REAL,
        "bias_z": _REAL,  # mean signed error / its standard error
        "lse_max_abs": _REAL,
        "r_max": _REAL,  # ratios to the dtype class's own error, see attention/replay/tensor.py
        "r_rms": _REAL,
        "r_row": _REAL,
        # Quantised KV, else null: what rounding K and V alone makes of the output, in the same unit. r_* above are then
        # the kernel's part.
        "quantisation_r_max": _REAL,
        "quantisation_r_rms": _REAL,
        "quantisation_r_row": _REAL,
        "error": _STR,  # why the case has no figures (crash, refusal), else null
    },
    # One row a (prompt, mode, position): both sides already compared.
    # `candidate` beside the champion; and `champion` beside itself, executed another sound way: the floor.
    "model_replay": {
        "backend": _STR,
        "confirmed_backend": _STR,
        "prompt_id": _STR,
        "category": _STR,
        "language": _STR,
        "dtype_class": _STR,  # of the states that were compared
        "num_tokens": _INT,  # of the whole prompt
        "mode": _STR,  # prefill | decode
        "position": _INT,
        "kl": _REAL,
        "topk_overlap": _REAL,
        "next_token_equal": _BOOL,  # argmax of both sides
        "flip_margin": _REAL,  # champion's margin in nats where the argmax flipped, else null
        "nll_champion": _REAL,
        "nll_candidate": _REAL,
    },
    # One row a golden prompt and side.
    "business_replay": {
        "backend": _STR,
        "confirmed_backend": _STR,
        "prompt_id": _STR,
        "category": _STR,
        "language": _STR,
        "passed": _BOOL,
        "grader": _STR,
        "detail": _STR,
        "output_text": _STR,
        "output_tokens": pa.list_(pa.int32()),
        "error": _STR,
    },
    # Raw samples: one row a timed call.
    "perf_samples": {
        "backend": _STR,
        "confirmed_backend": _STR,
        "family": _STR,  # prefill | decode | extend
        "metric": _STR,  # kernel_s | ttft_s | tpot_s | first_call_s
        "case_id": _STR,
        "shape_bucket": _STR,
        "block": _INT,  # interleaving block: whoever is compared takes turns inside one
        "call": _INT,  # within the block
        "seconds": _REAL,
    },
    # One row a (backend, family, metric, cell): what one backend did, beside what the machine could have done.
    "perf_backends": {
        "backend": _STR,
        "confirmed_backend": _STR,
        "family": _STR,  # prefill | decode | extend
        "metric": _STR,  # kernel_s | ttft_s | tpot_s
        "case_id": _STR,
        "case_json": _STR,
        "shape_bucket": _STR,
        "kv_len": _INT,  # upper end of the bucket
        "mix": _STR,  # of the traffic that the weight is of
        "weight": _REAL,  # share of the family's attention work in this bucket
        "calls": _REAL,  # calls of this case that 1000 requests of the mix cost, one layer
        "outcome": _STR,  # measured | refused | out_of_memory | illegal_access | compile_failed | timed_out | crashed
        # | capture_failed | wrong_kernel | wrong_numbers | warm_cache | above_limit | failed
        "error": _STR,  # null where it was measured
        "p50_s": _REAL,
        "p95_s": _REAL,
        "p99_s": _REAL,
        "num_samples": _INT,
        "tokens_per_s": _REAL,  # query tokens of the batch / p50_s, one layer
        "limit_s": _REAL,  # max(FLOPs / matrix product, bytes / read), both measured in the same rounds
        "limited_by": _STR,  # flops | bytes
        "limit_ratio": _REAL,  # limit_s / p50_s
        "datasheet_ratio": _REAL,  # the same with the vendor's figures; null for a machine without a datasheet here
        "cold_ratio": _REAL,  # seconds on these rotating copies / on twice as many; null where no cache holds one
        "first_call_s": _REAL,
        "workspace_bytes": _INT,  # the most that plan and call held beside inputs and outputs; null without a GPU
        "peak_bytes": _INT,  # of the process
        "graph_capture": _STR,  # captured; null for a case that is not to be captured
        "num_waited": _INT,  # blocks in which the device waited for the host, whose time is in their seconds
    },
    # One row a (family, metric, cell): candidate against champion.
    "perf_cells": {
        "backend": _STR,
        "champion_backend": _STR,
        "family": _STR,
        "metric": _STR,
        "case_id": _STR,
        "shape_bucket": _STR,
        "weight": _REAL,  # share of the traffic's work in this bucket
        "champion_p50_s": _REAL,
        "candidate_p50_s": _REAL,
        "candidate_p95_s": _REAL,
        "candidate_p99_s": _REAL,
        "ratio": _REAL,  # candidate / champion, paired by block
        "ratio_low": _REAL,
        "ratio_high": _REAL,
        "verdict": _STR,  # SAME | FAST | SLOW | AMBG
        "floor_s": _REAL,  # unused since version 2: limit_s of perf_backends
        "num_blocks": _INT,
        "margin": _REAL,  # a difference up to this is SAME: the plan's, or today's floor where that is larger
        "aa_floor": _REAL,  # how far from 1 the champion came beside itself, at most, in this run
        "confidence": _REAL,  # of the interval, corrected for the cells judged together
    },
    # One row a round of a ceiling: what the machine can do, measured between the cells.
    "perf_ceilings": {
        "kind": _STR,  # matmul | read
        "case_id": _STR,  # beside which it was measured
        "block": _INT,
        "seconds": _REAL,
        "work": _REAL,  # FLOPs or bytes
    },
    # One row a (backend, cache): a fresh process with empty caches, then another with what the first left there.
    "perf_startup": {
        "backend": _STR,
        "cache": _STR,  # cold | warm
        "outcome": _STR,  # as in perf_backends
        "error": _STR,
        "import_s": _REAL,  # process start until the backend is there
        "first_call_s": _REAL,  # plan and first call, compilation included
        "second_call_s": _REAL,
    },
    # One row a (side, load level) of the stress run.
    "perf_stress": {
        "mix": _STR,
        "level": _REAL,  # of the champion's saturation
        "rate_per_s": _REAL,  # requests offered a second
        "max_running": _INT,  # bound on requests in a step
        "duration_s": _REAL,
        "num_offered": _INT,
        "num_completed": _INT,
        "num_refused": _INT,  # queue full
        "num_failed": _INT,
        "num_good": _INT,  # completed within both objectives
        "goodput_per_s": _REAL,
        "output_tokens_per_s": _REAL,
        "slo_ttft_s": _REAL,
        "slo_tpot_s": _REAL,
        "ttft_p50_s": _REAL,
        "ttft_p95_s": _REAL,
        "ttft_p99_s": _REAL,
        "tpot_p50_s": _REAL,
        "tpot_p95_s": _REAL,
        "tpot_p99_s": _REAL,
        "running_mean": _REAL,
        "kv_peak_share": _REAL,  # of the cache's pages
        "num_preempted": _INT,
        "num_fallbacks": _INT,
        "num_out_of_memory": _INT,
    },
    # One row a served request, written by the instance that served it.
    "requests": {
        "instance": _STR,
        "request_id": _STR,  # x-request-id: pairs a shadow with its primary
        "session_id": _STR,
        "role": _STR,  # x-attention-role the router sent it under: champion | control | candidate
        "shadow": _BOOL,
        "endpoint": _STR,
        "stream": _BOOL,
        "status": _INT,
        "finish_reason": _STR,  # stop | length | error | cancelled
        "prompt_tokens": _INT,
        "output_tokens": _INT,
        "queue_s": _REAL,
        "ttft_s": _REAL,
        "tpot_s": _REAL,  # null below two output tokens
        "e2e_s": _REAL,
        "requested_backend": _STR,
        "resolved_prefill": _STR,
        "resolved_decode": _STR,
        "confirmed_prefill": _STR,
        "confirmed_decode": _STR,
        "fallback": _BOOL,
        "fallback_reason": _STR,
        "num_nonfinite": _INT,  # logits rows that held NaN or Inf
        "batch_size_mean": _REAL,  # sequences in the steps that decoded this request
        "peak_memory_bytes": _INT,
        "prompt_text": _STR,
        "output_text": _STR,
        "token_ids": pa.list_(pa.int32()),
        "error": _STR,
    },
    # One row a (step, window, side): summary the canary gate read.
    "canary_windows": {
        "stage": _STR,  # shadow | canary | expand
        "share": _INT,
        "window": _INT,
        "num_requests": _INT,
        "num_errors": _INT,
        "num_nonfinite": _INT,
        "num_fallbacks": _INT,
        "num_unconfirmed": _INT,
        "ttft_p50_s": _REAL,
        "ttft_p95_s": _REAL,
        "tpot_p50_s": _REAL,
        "tpot_p95_s": _REAL,
        "peak_memory_bytes": _INT,
    },
    # One row a check of a gate.
    "gate_results": {
        "stage": _STR,
        "check": _STR,
        "verdict": _STR,  # pass | inconclusive | error | fail
        "observed": _REAL,
        "limit": _REAL,
        "direction": _STR,  # max | min | equal
        "detectable": _STR,  # smallest effect that this evidence could have shown
        "num_evidence": _INT,
        "owner": _STR,
        "reason": _STR,
        "message": _STR,
    },
    "events": {
        "kind": _STR,  # startup_fallback, request_fallback, share_changed, lease_expired, gate_failed, ...
        "severity": _STR,  # info | warning | critical
        "subject": _STR,
        "message": _STR,
        "detail_json": _STR,
    },
}


def version_of(table: str) -> int:
    """Version of a table's schema, as its files carry it."""
    return TABLE_VERSIONS.get(table, SCHEMA_VERSION)


SCHEMAS: dict[str, pa.Schema] = {
    name: pa.schema(
        [pa.field(column, kind) for column, kind in {**COMMON, **columns}.items()],
        metadata={"attention_release.table": name, "attention_release.version": str(version_of(name))},
    )
    for name, columns in _TABLES.items()
}


def write_rows(lake: Path, table: str, rows: Iterable[Mapping[str, Any]], *, release_id: str) -> Path | None:
    """Append rows to `lake/<table>/release_id=<id>/<uuid>.parquet`; returns the file, None for no rows.

    A column that a row lacks is null; a column that the schema lacks raises ValueError, because
    evidence that is silently dropped cannot be judged.
    """
    schema = SCHEMAS[table]
    known = set(schema.names)
    materialised = []
    for row in rows:
        unknown = set(row) - known
        if unknown:
            raise ValueError(f"{table}: unknown column(s) {sorted(unknown)}; the schema has {sorted(known)}")
        materialised.append({**row, "release_id": release_id})
    if not materialised:
        return None
    return _write(lake, table, pa.Table.from_pylist(materialised, schema=schema), release_id)


def write_columns(lake: Path, table: str, columns: Mapping[str, Any], *, release_id: str) -> Path | None:
    """The same for columns: lists of one length, and single values that hold for every row."""
    schema = SCHEMAS[table]
    unknown = set(columns) - set(schema.names)
    if unknown:
        raise ValueError(f"{table}: unknown column(s) {sorted(unknown)}; the schema has {sorted(schema.names)}")
    lengths = {len(values) for values in columns.values() if isinstance(values, list)}
    if len(lengths) != 1:
        raise ValueError(f"{table}: columns of {sorted(lengths)} rows, not of one length")
    [num_rows] = lengths
    if not num_rows:
        return None
    all_of_them = {**columns, "release_id": release_id}
    arrays = []
    for field in schema:
        value = all_of_them.get(field.name)
        values = value if isinstance(value, list) else [value] * num_rows
        arrays.append(pa.array(values, type=field.type))
    return _write(lake, table, pa.Table.from_arrays(arrays, schema=schema), release_id)


def _write(lake: Path, table: str, content: pa.Table, release_id: str) -> Path:
    folder = private_folder(lake / table / f"release_id={release_id}")
    name = uuid.uuid4().hex
    # The dot keeps the unfinished file out of every `*.parquet` glob.
    temporary, final = folder / f".{name}.tmp", folder / f"{name}.parquet"
    with temporary.open("wb") as sink:
        pq.write_table(content, sink, compression="zstd")
        sink.flush()
        os.fsync(sink.fileno())
    temporary.rename(final)
    return final
