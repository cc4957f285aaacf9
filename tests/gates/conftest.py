"""A small lake written through `write_rows`: evidence of a sound release, which a test then breaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention.schemas import write_rows
from data.plan import Plan, load_plan
from gates.served import Span
from gates.verdict import GateReport, Verdict

RELEASE, OLDER = "r1", "r0"
START = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
FLASH, MATH = "torch_sdpa:flash", "torch_sdpa:math"
IDS = {"champion": "fp-champion", "control": "fp-champion", "candidate": "fp-candidate"}

Row = dict[str, Any]
Mend = Callable[[Row], Row | None]  # returns the row to write; None drops it


def unchanged(row: Row) -> Row | None:
    return row


class Evidence:
    """Writes one table at a time; `mend` sees every row before it is written."""

    release, older, flash, math = RELEASE, OLDER, FLASH, MATH

    def __init__(self, lake: Path) -> None:
        self.lake = lake
        self.span = Span(START, START + timedelta(hours=1))

    def write(self, table: str, rows: list[Row], mend: Mend = unchanged, release: str = RELEASE) -> None:
        changed = [mend(dict(row)) for row in rows]
        write_rows(self.lake, table, [row for row in changed if row is not None], release_id=release)

    def common(self, side: str, second: float = 0.0) -> Row:
        time = START + timedelta(seconds=second)
        return {"side": side, "fingerprint_id": IDS[side], "gpu": "cpu", "model": "m", "time": time, "node": "n"}

    def backend(self, side: str) -> Row:
        name = FLASH if side == "candidate" else MATH
        return {**self.common(side), "backend": name, "confirmed_backend": name}

    def fingerprints(self, mend: Mend = unchanged) -> None:
        identity = json.dumps({"torch": "2.13.0"})
        rows = [{**self.common(side), "identity_json": identity} for side in ("champion", "candidate")]
        self.write("fingerprints", rows, mend)

    def probes(self, mend: Mend = unchanged) -> None:
        rows = [
            {**self.common("candidate"), "backend": b, "confirmed_backend": b, "probe": p, "level": "execute"}
            | {"status": "pass"}
            for b in (FLASH, MATH)
            for p in ("short_prefill", "single_decode")
        ]
        self.write("probes", rows, mend)

    def tensor(self, mend: Mend = unchanged, cases: int = 16) -> None:
        rows = [
            {
                **self.backend(side),
                "case_id": f"case{case}",
                "inputs": "normal",
                "seed": seed,
                "dtype_class": "bfloat16",
                "finite_mask_equal": True,
                "bias_z": 0.5,
                "lse_max_abs": 1e-6,
                "r_rms": 0.7 + 0.01 * seed,
                "r_max": 1.2,
                "r_row": 1.1,
            }
            for side in ("champion", "candidate")
            for case in range(cases)
            for seed in range(3)
        ]
        self.write("tensor_replay", rows, mend)

    def model(self, mend: Mend = unchanged) -> None:
        """Candidate beside champion, and the floor: the champion beside itself on another sound backend."""
        rows = [
            {
                **self.backend(side),
                "prompt_id": f"p{prompt}",
                "category": "c",
                "language": "pl" if prompt == 11 else "en",
                "dtype_class": "bfloat16",
                "num_tokens": length,
                "mode": mode,
                "position": position,
                "kl": 1e-6,
                "topk_overlap": 0.9,
                "next_token_equal": True,
                "flip_margin": None,
                "nll_champion": 2.0,
                "nll_candidate": 2.0 + 1e-5 * (prompt % 3),
            }
            for side in ("candidate", "champion")
            for mode, length in (("prefill", 60), ("decode", 16))
            for prompt in range(12)
            for position in range(length)
        ]
        self.write("model_replay", rows, mend)

    def golden(self, mend: Mend = unchanged, num: int = 48) -> None:
        rows = [
            {**self.backend(side), "prompt_id": f"g{prompt}", "category": "answer", "language": "en"}
            | {"passed": prompt % 4 > 0, "grader": "exact"}
            for side in ("champion", "candidate")
            for prompt in range(num)
        ]
        self.write("business_replay", rows, mend)

    def cells(self, mend: Mend = unchanged) -> None:
        rows = [
            {
                **self.common("candidate"),
                "backend": FLASH,
                "champion_backend": MATH,
                "family": family,
                "metric": "kernel_s",
                "case_id": f"{family}{cell}",
                "weight": 0.25,
                "ratio": 0.9,
                "ratio_low": 0.85,
                "ratio_high": 0.95,
                "verdict": "FAST",
                "num_blocks": 8,
                "margin": 0.01,
                "aa_floor": 0.004,
            }
            for family in ("prefill", "decode")
            for cell in range(4)
        ]
        self.write("perf_cells", rows, mend)

    def outcomes(self, mend: Mend = unchanged) -> None:
        rows = [
            {
                **self.backend(side),
                "family": family,
                "metric": "kernel_s",
                "case_id": f"{family}{cell}",
                "weight": 0.25,
                "outcome": "measured",
                "p50_s": 1e-3,
                "limit_ratio": 0.5,
            }
            for side in ("champion", "candidate")
            for family in ("prefill", "decode")
            for cell in range(4)
        ]
        self.write("perf_backends", rows, mend)

    def samples(self, mend: Mend = unchanged) -> None:
        rows = [
            {**self.backend(side), "family": "decode", "metric": "kernel_s", "seconds": 1e-3, "block": block}
            for side in ("champion", "candidate")
            for block in range(8)
        ]
        self.write("perf_samples", rows, mend)

    def request(self, side: str, number: int, second: float, *, shadow: bool = False, seed: int = 0) -> Row:
        """One request that was answered; latencies scatter log-normally with sigma 0.3."""
        noise = np.random.default_rng([seed, number, sorted(IDS).index(side)]).normal(0, 0.3, 2)
        backend = FLASH if side == "candidate" else MATH
        return {
            **self.common(side, second),
            "instance": side,
            "request_id": f"q{seed}-{number}",
            "session_id": f"s{seed}-{number}",
            "role": side,
            "shadow": shadow,
            "status": 200,
            "finish_reason": "length",
            "prompt_tokens": 32,
            "output_tokens": 16,
            "ttft_s": 0.05 * float(np.exp(noise[0])),
            "tpot_s": 0.02 * float(np.exp(noise[1])),
            "e2e_s": 0.4,
            "resolved_prefill": backend,
            "confirmed_prefill": backend,
            "resolved_decode": backend,
            "confirmed_decode": backend,
            "fallback": False,
            "batch_size_mean": 1.0,
            "num_nonfinite": 0,
            "peak_memory_bytes": 1_000_000_000,
            "token_ids": list(range(16)),
        }

    def step(self, mend: Mend = unchanged, num: int = 40) -> None:
        """A 20 % step: candidate and control `num` requests each, champion three times as many."""
        arms = {"candidate": num, "control": num, "champion": 3 * num}
        for offset, (side, count) in enumerate(arms.items()):
            rows = [self.request(side, 10_000 * offset + i, 10 + 600 * i / count) for i in range(count)]
            self.write("requests", rows, mend, OLDER if side == "champion" else RELEASE)

    def mirrored_step(self, mend: Mend = unchanged, num: int = 40) -> None:
        """The 100 % step: control sees copies of the candidate's requests."""
        for side in ("candidate", "control"):
            rows = [self.request(side, i, 10 + i, shadow=side == "control") for i in range(num)]
            self.write("requests", rows, mend)

    def shadows(self, mend: Mend = unchanged, num: int = 40) -> None:
        primaries = [self.request("champion", i, 10 + i) for i in range(num)]
        self.write("requests", primaries, mend, OLDER)
        copies = [self.request("candidate", i, 10.5 + i, shadow=True) for i in range(num)]
        self.write("requests", copies, mend)


class Judged:
    """A report by the names of its checks."""

    def __init__(self, report: GateReport) -> None:
        self.report = report
        self.verdict = report.verdict
        self.checks = {check.check: check for check in report.checks}

    def named(self, verdict: Verdict) -> set[str]:
        return {name for name, check in self.checks.items() if check.verdict is verdict}


@pytest.fixture(scope="session")
def judged() -> type[Judged]:
    return Judged


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    return Evidence(tmp_path / "lake")


@pytest.fixture(scope="session")
def plan() -> Plan:
    """The demo plan, its tensor cases of one kind of inputs, as `Evidence.tensor` writes them: 8 shapes, 6 seeds."""
    demo = load_plan("demo")
    return demo.model_copy(update={"replay": demo.replay.model_copy(update={"inputs": ("normal",), "seeds": 6})})
