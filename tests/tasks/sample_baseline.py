"""Rows of a performance baseline for tests: of a release with two sides, and of a survey of several backends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attention.cases import AttentionCase, Execution, Phase
from attention.roofline import Ceilings, limit_of
from attention.schemas import write_rows

Row = dict[str, Any]
MACHINE = Ceilings(flops_per_s=50e9, bytes_per_s=10e9)
FAMILIES: tuple[Phase, ...] = ("prefill", "decode", "extend")
LENGTHS = (64, 128, 256, 512)
WEIGHT = {64: 0.4, 128: 0.3, 256: 0.2, 512: 0.1}
CHAMPION, CANDIDATE = "torch_sdpa:math", "torch_sdpa:flash"


def case(family: Phase, kv_len: int, count: int = 1, execution: Execution = "eager") -> AttentionCase:
    q_len = {"prefill": kv_len, "decode": 1, "extend": kv_len // 2}[family]
    return AttentionCase(
        phase=family, batch=f"{count}q{q_len}s{kv_len}", heads_q=9, heads_kv=3, head_dim_qk=64, head_dim_vo=64,
        dtype="float32", execution=execution,
    )  # fmt: skip


def backend_row(backend: str, one: AttentionCase, ratio: float, *, metric: str = "kernel_s", **changed: Any) -> Row:
    """perf_backends: a kernel that takes `ratio` times the limit."""
    limit, kv_len = limit_of(one, MACHINE), max(m.kv_len for m in one.members)
    return {
        "backend": backend, "confirmed_backend": backend, "family": one.phase, "metric": metric,
        "case_id": one.case_id, "case_json": one.model_dump_json(), "shape_bucket": one.shape_bucket,
        "kv_len": kv_len, "weight": WEIGHT[kv_len], "mix": "chat", "outcome": "measured",
        "p50_s": limit.seconds * ratio, "p95_s": 1.2 * limit.seconds * ratio, "p99_s": 1.4 * limit.seconds * ratio,
        "limit_s": limit.seconds, "limited_by": limit.limited_by, "limit_ratio": 1 / ratio, **changed,
    }  # fmt: skip


def lost(backend: str, one: AttentionCase, outcome: str, **changed: Any) -> Row:
    """perf_backends: no figure."""
    nothing: Row = dict.fromkeys(
        ("p50_s", "p95_s", "p99_s", "limit_s", "limited_by", "limit_ratio", "confirmed_backend")
    )
    return backend_row(backend, one, 1.0, outcome=outcome, error="it said why", **nothing, **changed)


def release_tables(rng: random.Random) -> dict[str, list[Row]]:
    """Tables of a release: every cell compared but one, which the candidate lost."""
    tables: dict[str, list[Row]] = {"perf_backends": [], "perf_cells": []}
    for family, metric, kv_len in _measured():
        one = case(family, kv_len)
        ours, theirs = rng.uniform(1.2, 2.0), rng.uniform(1.4, 2.4)
        tables["perf_backends"].append(backend_row(CHAMPION, one, theirs, metric=metric, side="champion"))
        if (family, metric, kv_len) == ("decode", "kernel_s", 512):
            tables["perf_backends"].append(lost(CANDIDATE, one, "out_of_memory"))
            continue
        tables["perf_backends"].append(backend_row(CANDIDATE, one, ours, metric=metric))
        tables["perf_cells"].append(_cell(one, metric, ours / theirs))
    cases = [case(family, kv_len) for family in FAMILIES for kv_len in LENGTHS]
    return tables | {"perf_ceilings": ceilings(cases), "perf_startup": _startup(), "perf_stress": _stress()}


def _measured() -> Iterator[tuple[Phase, str, int]]:
    for family in FAMILIES:
        for metric in ("kernel_s", *{"prefill": ["ttft_s"], "decode": ["tpot_s"]}.get(family, [])):
            for kv_len in LENGTHS:
                yield family, metric, kv_len


def _cell(one: AttentionCase, metric: str, ratio: float) -> Row:
    kv_len = max(m.kv_len for m in one.members)
    return {
        "family": one.phase, "case_id": one.case_id, "backend": CANDIDATE, "champion_backend": CHAMPION,
        "metric": metric, "shape_bucket": one.shape_bucket, "weight": WEIGHT[kv_len], "ratio": ratio,
        "ratio_low": ratio - 0.06, "ratio_high": ratio + 0.08,
        "verdict": "FAST" if ratio < 0.9 else "SAME" if ratio < 1.02 else "AMBG",
    }  # fmt: skip


def ceilings(cases: list[AttentionCase]) -> list[Row]:
    """perf_ceilings: three rounds a case; a short read is faster, because a cache holds it."""
    rates = {"matmul": MACHINE.flops_per_s, "read": MACHINE.bytes_per_s}
    return [
        {"kind": kind, "case_id": one.case_id, "block": block, "work": 1e9, "seconds": 1e9 / rate * (1 + 0.01 * block)}
        for one in cases
        for kind, rate in rates.items()
        for block in range(3)
    ]


def _startup() -> list[Row]:
    measured = {"outcome": "measured", "import_s": 1.5, "first_call_s": 0.04, "second_call_s": 0.001}
    return [
        {"backend": CHAMPION, "cache": "cold", "side": "champion", **measured},
        {"backend": CHAMPION, "cache": "warm", "side": "champion", **measured},
        {"backend": CANDIDATE, "cache": "cold", **measured, "first_call_s": 62.0},
        {"backend": CANDIDATE, "cache": "warm", "outcome": "timed_out", "error": "no end after 900 s"},
    ]


def _stress() -> list[Row]:
    goodput = {"champion": (1.0, 1.6, 1.5, 0.9), "candidate": (1.0, 1.6, 2.0, 2.4)}
    return [
        {
            "side": side, "mix": "chat", "level": level, "rate_per_s": 2 * level, "max_running": 4,
            "num_offered": round(200 * level), "num_good": round(100 * good), "goodput_per_s": good,
            "slo_ttft_s": 0.8, "slo_tpot_s": 0.06,
            "ttft_p95_s": 0.2 * 2 * level / good, "tpot_p95_s": 0.03 * 2 * level / good,
        }
        for side, goods in goodput.items()
        for level, good in zip((0.5, 0.8, 1.0, 1.2), goods, strict=True)
    ]  # fmt: skip


def fill_survey(lake: Path, release_id: str) -> None:
    """Three backends on two services, decode in two batches; `flashinfer:fa3` takes no eager decode and ran out of
    memory once, `triton:paged` claims to be faster than the machine."""
    cases = [case(family, kv_len) for family in FAMILIES for kv_len in LENGTHS[:2]]
    cases += [case("decode", kv_len, 8) for kv_len in LENGTHS[:2]]
    cases += [case("decode", kv_len, count, "cuda_graph") for kv_len in LENGTHS[:2] for count in (1, 8)]
    rows = []
    for one in cases:
        long = one.members[0].kv_len == LENGTHS[1]
        rows.append(backend_row("flash_attn:fa2", one, 1.2))
        rows.append(backend_row("torch_sdpa:flash", one, 3.0))
        if one.phase == "decode" and one.execution == "eager":
            rows.append(lost("flashinfer:fa3", one, "refused"))
        else:
            rows.append(
                lost("flashinfer:fa3", one, "out_of_memory") if long else backend_row("flashinfer:fa3", one, 1.8)
            )
        rows.append(backend_row("triton:paged", one, 0.5, outcome="above_limit"))
    common = {"node": "n0", "gpu": "cpu", "side": "candidate"}
    for table, found in (("perf_backends", rows), ("perf_ceilings", ceilings(cases))):
        write_rows(lake, table, [common | row for row in found], release_id=release_id)
