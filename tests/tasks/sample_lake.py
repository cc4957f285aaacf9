"""A small lake of one release for the tests of figures, report, MLflow, `status` and `why`.

The texts that must never leave the lake all hold SECRET, so that a test can look for it.
"""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from attention.schemas import write_rows
from gates.verdict import Check, GateReport, Verdict
from tests.tasks.sample_baseline import release_tables

SECRET = "xyzzy-prompt-text"
SECRET_TOKEN = 271828
START = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def passing(stage: str, check: str = "requests_lost", observed: float = 0.0, limit: float = 1.0) -> GateReport:
    one = Check(
        check=check,
        verdict=Verdict.PASS,
        observed=observed,
        limit=limit,
        detectable="1 in 40",
        num_evidence=40,
        owner="serving",
        reason="no request may be lost",
        message=f"{check} is {observed:g}",
    )
    return GateReport(stage=stage, checks=(one,))


def failing(stage: str = "replay") -> GateReport:
    bad = Check(
        check="tensor.float32.r_rms",
        verdict=Verdict.FAIL,
        observed=31.5,
        limit=2.0,
        detectable="0.1",
        num_evidence=72,
        owner="numerics",
        reason="a sound kernel stays below 1.5",
        message="r_rms is 31.5 in decode-q1s256 <needle>",
    )
    return GateReport(stage=stage, checks=(bad, *passing(stage, "model.prefill.kl_p999", 0.0004, 0.06).checks))


def fill(lake: Path, release_id: str, *, seed: int = 0) -> None:
    """Evidence of every stage, shaped like the demo plan's."""
    common = {"fingerprint_id": "fp-1234abcd", "node": "n0", "gpu": "cpu", "model": "smollm2-135m-instruct"}
    rng = random.Random(seed)
    tables = {
        "fingerprints": _fingerprints(),
        "probes": _probes(),
        "tensor_replay": _tensor(rng),
        "model_replay": _model(rng),
        "business_replay": _business(),
        **release_tables(rng),
        "requests": _requests(rng),
        "canary_windows": _windows(rng),
        "events": _events(),
    }
    for table, rows in tables.items():
        stamped = [{"time": START, "side": "candidate", **common, **row} for row in rows]
        # What the champion serves carries the champion's own release.
        theirs = [row for row in stamped if table == "requests" and row["side"] == "champion"]
        write_rows(lake, table, theirs, release_id="r0")
        write_rows(lake, table, [row for row in stamped if row not in theirs], release_id=release_id)
    for report in (passing("probe"), failing("replay"), passing("baseline", "decode.kernel_s.ratio", 0.71, 1.3)):
        report.write(lake, release_id, gpu="cpu", model="smollm2-135m-instruct")


def _fingerprints() -> list[dict[str, Any]]:
    base = {
        "torch": {"version": "2.13.0", "record": "a" * 64},
        "platform": "cpu",
        "kernel": "math",
        "threads": 2,
    }
    other = {**base, "kernel": "flash", "torch": {"version": "2.13.1", "record": "b" * 64}}
    return [
        {"side": "champion", "fingerprint_id": "fp-0000ffff", "identity_json": json.dumps(base)},
        {"side": "candidate", "identity_json": json.dumps(other)},
    ]


def _probes() -> list[dict[str, Any]]:
    names = ("short_prefill", "long_prefill", "single_decode", "batched_decode", "paged_kv", "sliding_window",
             "custom_mask", "nan_scan", "determinism")  # fmt: skip
    rows = []
    for backend in ("torch_sdpa:flash", "torch_sdpa:math", "flex_attention:triton", "triton:paged"):
        for probe in names:
            status = "pass"
            if backend.startswith("triton"):
                status = "unknown"
            if (backend, probe) == ("torch_sdpa:flash", "custom_mask"):
                status = "fail"
            rows += [{"backend": backend, "probe": probe, "status": status, "level": "execute"}] * 3
    return rows


def _tensor(rng: random.Random) -> list[dict[str, Any]]:
    rows = []
    for phase in ("prefill", "decode", "extend"):
        for inputs in ("normal", "needle", "large_logit"):
            for case in range(6):
                for seed in range(3):
                    rms = rng.lognormvariate(0.15, 0.12)
                    rows.append(
                        {
                            "backend": "torch_sdpa:flash",
                            "case_id": f"{phase}-q{case}-h9/3-d64-float32-{case:08x}",
                            "inputs": inputs,
                            "seed": seed,
                            "dtype_class": "float32",
                            "r_rms": rms,
                            "r_max": rms * rng.uniform(1.0, 1.6),
                            "r_row": rms * rng.uniform(1.0, 1.3),
                        }
                    )
    return rows


def _model(rng: random.Random) -> list[dict[str, Any]]:
    return [
        {"mode": mode, "prompt_id": f"p{i % 12}", "position": i, "kl": rng.lognormvariate(-17, 2.0)}
        for mode, number in (("prefill", 900), ("decode", 190))
        for i in range(number)
    ]


def _business() -> list[dict[str, Any]]:
    return [
        {
            "side": side,
            "prompt_id": f"g{i}",
            "category": "json",
            "passed": i % 3 != 0,
            "grader": "json_schema",
            "detail": f"not JSON: {SECRET}",
            "output_text": SECRET,
            "output_tokens": [SECRET_TOKEN],
        }
        for side in ("champion", "candidate")
        for i in range(12)
    ]


def _requests(rng: random.Random) -> list[dict[str, Any]]:
    rows = []
    for i in range(400):
        share = (0, 20, 50, 100)[i // 100]
        draw = rng.uniform(0, 100)
        control = min(share, 100 - share)
        role = "candidate" if draw < share else "control" if draw < share + control else "champion"
        ttft, tpot = rng.lognormvariate(-2.2, 0.4), rng.lognormvariate(-3.7, 0.2)
        tokens = [rng.randrange(1000) for _ in range(16)]
        row = {
            "request_id": f"r{i}",
            "role": role,
            "side": role,
            "shadow": False,
            "status": 200,
            "finish_reason": "stop",
            "ttft_s": ttft,
            "tpot_s": tpot,
            "time": START + timedelta(seconds=i / 6),
            "prompt_text": SECRET,
            "output_text": SECRET,
            "token_ids": tokens,
            "num_nonfinite": 0,
        }
        rows.append(row)
        if share == 0:
            same = tokens if rng.random() < 0.9 else [*tokens[:9], SECRET_TOKEN, *tokens[10:]]
            pair = {"role": None, "shadow": True, "side": "candidate", "token_ids": same}
            rows.append(
                {
                    **row,
                    **pair,
                    "ttft_s": ttft * rng.uniform(0.8, 1.1),
                    "tpot_s": tpot * rng.uniform(0.8, 1.1),
                }
            )
    return rows


def _windows(rng: random.Random) -> list[dict[str, Any]]:
    rows = []
    for stage, steps in (("canary", (20, 50, 100)), ("expand", (100,))):
        for share in steps:
            for window in range(2):
                for side in ("candidate", "control") if share < 100 else ("candidate",):
                    ttft, tpot = rng.uniform(0.09, 0.12), rng.uniform(0.022, 0.028)
                    rows.append(
                        {
                            "stage": stage,
                            "share": share,
                            "window": window,
                            "side": side,
                            "num_requests": 20,
                            "ttft_p50_s": ttft,
                            "ttft_p95_s": ttft * 1.8,
                            "tpot_p50_s": tpot,
                            "tpot_p95_s": tpot * 1.3,
                        }
                    )
    return rows


def _events() -> list[dict[str, Any]]:
    return [
        {
            "kind": "share_changed",
            "severity": "info",
            "subject": "router",
            "message": "champion 60, control 20, candidate 20",
            "detail_json": json.dumps({"note": SECRET}),
        },
        {
            "kind": "gate_failed",
            "severity": "critical",
            "subject": "replay",
            "message": "r_rms <31.5> over 2",
        },
    ]
