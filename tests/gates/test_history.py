"""The history: a release's baseline beside the accepted ones of other days."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention.errors import EvidenceError
from attention.schemas import write_rows
from gates import history
from gates.thresholds import load_limits
from gates.verdict import Check, Verdict

Row = dict[str, Any]
LIMITS = load_limits("history", "full")
FLASH = "torch_sdpa:flash"
DAY = datetime(2026, 11, 1, tzinfo=UTC)
OLD = {"torch": "2.12.0", "driver": "580.1", "distributions": {"torch": "2.12.0+aa", "numpy": "2.0+bb"}}


def night(number: int) -> str:
    return f"nightly-flash-{DAY + timedelta(days=number):%Y%m%d-%H%M%S}"


class Nights:
    """A lake of nights. Prefill cell `p0` takes 2 ms and reaches half of its limit, decode `d0` 0.1 ms and a fifth."""

    def __init__(self, lake: Path) -> None:
        self.lake = lake

    def write(
        self,
        number: int,
        mend: Callable[[Row], Row | None] = lambda row: row,
        *,
        accepted: bool = True,
        identity: Row = OLD,
        **common: Any,
    ) -> str:
        """One night; `mend` changes or drops rows of perf_backends; `common` are columns that all rows share."""
        release = night(number)
        wobble = 1 + 0.002 * (-1) ** number  # nights differ a little
        common = {"gpu": "cpu", "model": "m", "fingerprint_id": str(hash(json.dumps(identity)))} | common
        common |= {"time": DAY + timedelta(days=number)}
        rows = [
            self.cell("prefill", "p0", 2e-3 * wobble, 0.5 / wobble),
            self.cell("decode", "d0", 1e-4 * wobble, 0.2 / wobble),
        ]
        mended = [mend({"side": "candidate", **common, **row}) for row in rows]
        write_rows(self.lake, "perf_backends", [row for row in mended if row], release_id=release)
        fingerprint = {"side": "candidate", **common, "identity_json": json.dumps(identity)}
        write_rows(self.lake, "fingerprints", [fingerprint], release_id=release)
        self.judge(number, accepted, **common)
        return release

    def judge(self, number: int, accepted: bool, **common: Any) -> None:
        verdicts = ["pass", "pass" if accepted else "inconclusive"]
        rows = [
            {"stage": "baseline", "check": f"c{i}", "verdict": verdict, **common} for i, verdict in enumerate(verdicts)
        ]
        rows.append({"stage": "canary", "check": "other", "verdict": "fail", **common})
        write_rows(self.lake, "gate_results", rows, release_id=night(number))

    def cell(self, family: str, case_id: str, seconds: float, limit_ratio: float) -> Row:
        figures = {"p50_s": seconds, "limit_ratio": limit_ratio, "weight": 0.4, "outcome": "measured"}
        return {"family": family, "metric": "kernel_s", "backend": FLASH, "case_id": case_id, **figures}


@pytest.fixture(scope="module")
def ten_nights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lake = Nights(tmp_path_factory.mktemp("ten") / "lake")
    for number in range(10):
        lake.write(number)
    return lake.lake


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    """None yet."""
    return Nights(tmp_path / "lake")


@pytest.fixture
def after_ten(nights: Nights, ten_nights: Path) -> Nights:
    """Ten accepted nights alike; the next one is number 10."""
    shutil.copytree(ten_nights, nights.lake, copy_function=os.link)
    return nights


def judged(nights: Nights, release: str) -> dict[str, Check]:
    return {check.check.removeprefix("history."): check for check in history.checks(nights.lake, release, LIMITS)}


def failed(nights: Nights, release: str) -> set[str]:
    return {name for name, check in judged(nights, release).items() if check.verdict is not Verdict.PASS}


def slower(factor: float, *, kernel: bool = True, ceiling: float = 1.0) -> Callable[[Row], Row]:
    """The decode cell by a factor; `ceiling`: how much longer the machine's own limit took."""

    def mend(row: Row) -> Row:
        if row["family"] != "decode":
            return row
        seconds = row["p50_s"] * (factor if kernel else 1.0)
        return row | {"p50_s": seconds, "limit_ratio": row["limit_ratio"] * row["p50_s"] * ceiling / seconds}

    return mend


def test_the_first_night_passes_and_says_that_there_is_nothing_to_compare_with(nights: Nights) -> None:
    found = judged(nights, nights.write(0))
    assert {check.verdict for check in found.values()} == {Verdict.PASS}
    assert found["baselines"].detectable == ("recorded: no accepted baseline of cpu m before: nothing to compare with")
    assert "nothing yet" in found["slower"].detectable and "nothing yet" in found["lost"].detectable


def test_a_night_like_the_others_passes_with_the_slowdown_that_would_have_shown(after_ten: Nights) -> None:
    found = judged(after_ten, after_ten.write(10))
    assert {check.verdict for check in found.values()} == {Verdict.PASS}
    assert found["slower"].detectable == "history +8 % in half of 2 cells, +8 % in each"
    assert found["baselines"].detectable == "recorded: 10 accepted baselines before, 10 of this fingerprint"


def test_a_regression_names_the_cell_its_figures_and_what_changed_in_the_fingerprint(after_ten: Nights) -> None:
    new = {"torch": "2.13.0", "driver": "580.1", "distributions": {"torch": "2.13.0+cc", "numpy": "2.0+bb"}}
    found = judged(after_ten, after_ten.write(10, slower(1.2), identity=new))
    assert found["slower"].verdict is Verdict.FAIL
    assert found["slower"].observed == pytest.approx(1.2, rel=0.01)
    assert (found["slower"].owner, found["slower"].limit) == ("performance", 1.08)
    assert found["slower"].message == (
        "history.slower: 1.202 is not <= 1.08; decode kernel_s of torch_sdpa:flash on d0: 120.2 us now, 99.8 us last "
        f"({night(9)}), 100 us median of 10; 0.166 of its limit now, 0.2 last, 0.2 median; "
        f"changed since {night(9)}: torch: 2.12.0 -> 2.13.0, distributions.torch: 2.12.0+aa -> 2.13.0+cc"
    )


def test_a_regression_under_an_unchanged_fingerprint_sends_to_the_machine(after_ten: Nights) -> None:
    message = judged(after_ten, after_ten.write(10, slower(1.2)))["slower"].message
    assert message.endswith(f"nothing in the fingerprint changed since {night(9)}: look at the machine")


def test_five_changed_fields_are_named_and_the_others_counted(after_ten: Nights) -> None:
    new = OLD | {"distributions": {f"package-{i}": "x" * 100 for i in range(9)}}
    message = judged(after_ten, after_ten.write(10, slower(1.2), identity=new))["slower"].message
    assert message.count(" -> ") == 5 and message.endswith("(and 6 more)")
    assert "x" * 41 not in message


def test_a_slower_machine_is_no_regression_and_neither_is_a_ceiling_that_rose(after_ten: Nights) -> None:
    assert not failed(after_ten, after_ten.write(10, slower(1.3, ceiling=1.3), accepted=False))
    assert not failed(after_ten, after_ten.write(11, slower(1.0, ceiling=0.8), accepted=False))
    assert failed(after_ten, after_ten.write(12, slower(1.3, ceiling=1.0))) == {"slower"}


def test_a_metric_without_a_limit_is_judged_by_its_seconds(nights: Nights) -> None:
    def steps(factor: float) -> Callable[[Row], Row]:
        return lambda row: row | {"metric": "tpot_s", "limit_ratio": None, "p50_s": factor * row["p50_s"]}

    for number in range(10):
        nights.write(number, steps(1.0))
    assert not failed(nights, nights.write(10, steps(1.05), accepted=False))
    assert failed(nights, nights.write(11, steps(1.2))) == {"slower"}


def test_a_slowdown_that_was_accepted_is_not_told_of_every_night(after_ten: Nights) -> None:
    assert failed(after_ten, after_ten.write(10, slower(1.2))) == {"slower"}
    assert not failed(after_ten, after_ten.write(11, slower(1.2)))


def test_a_night_that_failed_is_nobodys_measure(after_ten: Nights) -> None:
    after_ten.write(10, slower(1.2), accepted=False)
    assert failed(after_ten, after_ten.write(11, slower(1.2))) == {"slower"}


def test_the_latest_report_of_a_stage_that_was_resumed_counts(nights: Nights) -> None:
    nights.write(0, accepted=False)
    assert judged(nights, nights.write(1))["baselines"].observed == 0
    nights.judge(0, True, gpu="cpu", model="m", time=DAY + timedelta(hours=1))
    assert judged(nights, night(1))["baselines"].observed == 1


def test_a_cell_whose_nights_differ_widely_must_be_slower_by_more(nights: Nights) -> None:
    def noisy(number: int) -> Callable[[Row], Row]:
        return slower((0.9, 1.0, 1.1)[number % 3])

    for number in range(9):
        nights.write(number, noisy(number))
    found = judged(nights, nights.write(9, slower(1.25), accepted=False))
    assert found["slower"].verdict is Verdict.PASS
    assert "history +" in found["slower"].detectable and "+8 %" not in found["slower"].detectable
    assert failed(nights, nights.write(10, slower(4.0))) == {"slower"}


def test_a_cell_that_carries_next_to_no_work_cannot_fail_by_its_time(after_ten: Nights) -> None:
    slow = slower(3.0)
    assert not failed(after_ten, after_ten.write(10, lambda row: slow(row) | {"weight": 0.005}, accepted=False))
    assert failed(after_ten, after_ten.write(11, lambda row: slow(row) | {"weight": None})) == {"slower"}


def test_of_too_few_accepted_figures_a_slowdown_is_recorded_only(nights: Nights) -> None:
    for number in range(4):
        nights.write(number)
    found = judged(nights, nights.write(4, slower(3.0), accepted=False))
    assert found["slower"].verdict is Verdict.PASS and "nothing yet" in found["slower"].detectable
    nights.write(5)
    assert failed(nights, nights.write(6, slower(3.0))) == {"slower"}


def test_a_cell_that_crashes_where_it_was_measured_before_is_a_regression(nights: Nights) -> None:
    nights.write(0)
    lost = {"outcome": "crashed", "error": "signal 11", "p50_s": None, "limit_ratio": None, "weight": 0.001}
    found = judged(nights, nights.write(1, lambda row: row | lost if row["family"] == "decode" else row))
    assert found["lost"].verdict is Verdict.FAIL
    assert f"decode kernel_s of torch_sdpa:flash on d0 was measured in {night(0)}, now crashed (signal 11)" in (
        found["lost"].message
    )
    assert "look at the machine" in found["lost"].message


def test_a_cell_that_is_not_asked_for_any_more_is_no_regression(after_ten: Nights) -> None:
    assert not failed(after_ten, after_ten.write(10, lambda row: row if row["family"] == "prefill" else None))


def test_another_gpu_another_model_and_another_side_are_another_history(nights: Nights) -> None:
    others: list[Row] = [{"gpu": "nvidia-h200"}, {"model": "another"}, {"side": "champion"}]
    for number in range(18):
        nights.write(number, **others[number % 3])
    found = judged(nights, nights.write(18, slower(3.0)))
    assert found["slower"].verdict is Verdict.PASS and "nothing yet" in found["slower"].detectable


def test_another_backend_or_case_is_another_cell(after_ten: Nights) -> None:
    slow = slower(3.0)
    assert not failed(
        after_ten, after_ten.write(10, lambda row: slow(row) | {"backend": "flashinfer:fa3"}, accepted=False)
    )
    assert not failed(after_ten, after_ten.write(11, lambda row: slow(row) | {"case_id": f"new-{row['case_id']}"}))


def test_a_release_is_compared_with_what_began_before_it_and_never_with_itself(nights: Nights) -> None:
    for number in range(5, 12):
        nights.write(number)
    assert judged(nights, nights.write(4, slower(3.0)))["baselines"].observed == 0
    assert judged(nights, night(9))["baselines"].observed == 5


def test_a_broken_file_of_another_release_leaves_that_release_out_and_says_so(nights: Nights) -> None:
    for number in range(12):
        nights.write(number)
    for table, number in (("gate_results", 11), ("perf_backends", 8)):
        [file] = (nights.lake / table / f"release_id={night(number)}").iterdir()
        file.write_bytes(b"PAR1 torn")
    found = judged(nights, nights.write(12, slower(1.2)))
    assert found["baselines"].observed == 10
    assert f"left out, files cannot be read: {night(11)}, {night(8)}" in found["baselines"].detectable
    assert found["slower"].verdict is Verdict.FAIL
    [file] = (nights.lake / "fingerprints" / f"release_id={night(10)}").iterdir()
    file.write_bytes(b"")
    assert f"since {night(10)} cannot be told" in judged(nights, night(12))["slower"].message


def test_its_own_broken_file_is_an_error(nights: Nights) -> None:
    [file] = (nights.lake / "perf_backends" / f"release_id={nights.write(0)}").iterdir()
    file.write_bytes(b"PAR1 torn")
    with pytest.raises(EvidenceError, match="broken file"):
        judged(nights, night(0))


@pytest.mark.parametrize("seconds", [math.nan, None])
def test_a_measured_cell_without_a_time_is_an_error(after_ten: Nights, seconds: float | None) -> None:
    found = judged(after_ten, after_ten.write(10, lambda row: row | {"p50_s": seconds}))
    assert found["figures"].verdict is Verdict.ERROR
    assert "decode kernel_s of torch_sdpa:flash on d0 has no time" in found["figures"].message


def test_a_release_that_measured_nothing_is_inconclusive(after_ten: Nights) -> None:
    found = judged(after_ten, night(10))
    assert {check.verdict for check in found.values()} == {Verdict.INCONCLUSIVE}


def test_four_hundred_nights_of_forty_cells_are_asked_within_a_second(nights: Nights) -> None:
    def forty(row: Row) -> Row | None:
        return row if row["family"] == "decode" else None

    newest = 400
    for number in (0, newest):
        nights.write(number, forty)
        cells = [nights.cell("prefill", f"p{i}", 1e-3, 0.5) for i in range(39)]
        common = {"side": "candidate", "gpu": "cpu", "model": "m", "time": DAY + timedelta(days=number)}
        write_rows(nights.lake, "perf_backends", [common | cell for cell in cells], release_id=night(number))
    for table in ("perf_backends", "gate_results", "fingerprints"):
        files = list((nights.lake / table / f"release_id={night(0)}").iterdir())
        for number in range(1, newest):  # a folder's name is the id of what lies in it
            folder = nights.lake / table / f"release_id={night(number)}"
            folder.mkdir()
            for file in files:
                os.link(file, folder / file.name)
    history.checks(nights.lake, night(newest), LIMITS)  # imports of the suite are not the query
    started = time.process_time()
    found = judged(nights, night(newest))
    assert time.process_time() - started < 1.0
    assert found["baselines"].observed == 10 and found["lost"].detectable == "1 of 40 cells"


def test_restless_nights_raise_next_to_no_alarm_and_a_slowdown_of_15_percent_is_found() -> None:
    """What the module's docstring says of its rule: a clock that varies by 2 %, and a bad night in twenty."""
    random = np.random.default_rng(5)
    num_nights, num_cells, num_past = 60, 40, 10

    def logs(count: int) -> tuple[Any, Any]:
        """Log seconds and log limits of `count` nights, newest first: [count, cells]."""
        machine = random.normal(0, 0.02, (count, 1)) + (random.random((count, 1)) < 0.05) * random.exponential(
            0.08, (count, 1)
        )
        kernel, ceiling = (noise * random.standard_t(4, (count, num_cells)) / 2**0.5 for noise in (0.004, 0.003))
        return machine + kernel, machine + ceiling

    def cells(step: float) -> list[history.Cell]:
        seconds, limit = logs(num_past + 1)
        seconds[0] += math.log(step)
        figure = history.Figure("measured", None, 0.02, 1.0, 1.0)
        costs = [
            [history.Costs(column[0], tuple(column[1:])) for column in np.exp(values).T.tolist()]
            for values in (seconds, seconds - limit)
        ]
        keys = [history.Key("decode", "kernel_s", FLASH, f"d{i}") for i in range(num_cells)]
        return [history.Cell(key, figure, "r", *pair) for key, *pair in zip(keys, *costs, strict=True)]

    def share_slower(step: float) -> list[float]:
        told = [history._judge(cells(step), LIMITS) for _ in range(num_nights)]
        return [sum(one.slower for one in night) / num_cells for night in told]

    assert sum(share > 0 for share in share_slower(1.0)) <= 1
    assert np.mean(share_slower(1.15)) > 0.95
