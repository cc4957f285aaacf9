"""`python -m attention.drill.measure`: draw by draw, resumed, and without what judges."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.drill import measure, run
from attention.drill.kinds import KINDS
from attention.drill.measured import Folder, sha256_of
from attention.drill.plan import FOLDER, load_plan
from attention.drill.rows import read_rows, write_rows
from attention.errors import UserError
from tests.attention.drill.plans import ONE_DRAW, plan_file

QUICK: dict[str, Any] = {
    **ONE_DRAW,
    "shapes": [{"phase": "decode", "batch": "q1s33_q1s17"}],
    "layouts": ["ragged", "paged_nhd"],
    "variants": [],
    "faulted": ["torch_sdpa:flash"],
}


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    plan = plan_file(tmp_path / "plan.yaml", **QUICK)
    return ["--plan", str(plan), "--out", str(tmp_path / "rows"), "--frozen", str(plan)]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "measured.json").read_text())
    return found


def test_a_draw_is_a_file_and_the_rows_come_back_as_they_were(words: list[str], tmp_path: Path) -> None:
    assert measure.main(words) == 0
    assert files(tmp_path / "rows") == ["draw-0000.parquet", "draw-0001.parquet", "drill.json", "measured.json"]
    rows = read_rows(tmp_path / "rows" / "draw-0001.parquet")
    sound = [row for row in rows if row.kind is None]
    assert {row.confirmed for row in sound} == {"torch_sdpa:flash", "torch_sdpa:math"}
    assert all(row.figures and row.figures.r_rms < 1.5 and row.effect is None for row in sound)
    scale = next(row for row in rows if row.kind == "scale_5")
    assert scale.effect and scale.effect.r_rms > 1 and scale.published["fa2"] in (True, False)


def test_stopped_it_goes_on_with_what_is_left_under_the_same_seed(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_of, seen = run.rows_of, []

    def interrupted(draw: Any, plan: Any) -> Any:
        if seen:
            raise KeyboardInterrupt
        seen.append(draw)
        return rows_of(draw, plan)

    monkeypatch.setattr(run, "rows_of", interrupted)
    assert measure.main(words) == 130
    assert files(tmp_path / "rows") == ["draw-0000.parquet", "drill.json", "measured.json"], "nothing half-written"
    assert (manifest(tmp_path / "rows")["complete"], len(manifest(tmp_path / "rows")["parts"])) == (False, 1)
    seed = Folder(tmp_path / "rows").asked().seed  # type: ignore[union-attr]
    monkeypatch.setattr(run, "rows_of", rows_of)
    capsys.readouterr()
    assert measure.main(words) == 0
    assert f"seed {seed}" in (said := capsys.readouterr().err) and "1 of 2 draws" in said
    assert len(files(tmp_path / "rows")) == 4 and manifest(tmp_path / "rows")["complete"]


def test_a_folder_says_what_it_holds_and_of_which_kinds(words: list[str], tmp_path: Path) -> None:
    assert measure.main(words) == 0
    said = manifest(tmp_path / "rows")
    assert said["complete"] and said["kinds"] == [kind.name for kind in KINDS]
    for name in ("draw-0000.parquet", "draw-0001.parquet"):
        rows, part = read_rows(tmp_path / "rows" / name), said["parts"][name]
        assert part["num_rows"] == len(rows)
        assert part["kinds"] == Counter(row.kind or "sound" for row in rows) and part["kinds"]["scale_5"] == 3


def test_a_file_that_was_changed_is_measured_again(words: list[str], tmp_path: Path, capsys: Any) -> None:
    assert measure.main([*words, "--seed", "3"]) == 0
    path = tmp_path / "rows" / "draw-0001.parquet"
    whole = read_rows(path)
    write_rows(path, [row for row in whole if row.kind != "scale_5"])
    capsys.readouterr()
    assert measure.main(words) == 0
    assert "1 of 2 draws" in capsys.readouterr().err
    assert str(read_rows(path)) == str(whole)


def test_a_folder_is_measured_into_by_one_process_and_freed_by_its_death(
    words: list[str], tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "rows").mkdir()
    holds = (
        "import sys, time; from pathlib import Path; from attention.drill.measured import Folder\n"
        "with Folder(Path(sys.argv[1])).held():\n    print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(tmp_path / "rows")], stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout and other.stdout.readline() == "held\n"
            assert measure.main(words) == 2
            said = capsys.readouterr().err
            assert "rows: another process writes there; wait for it, or use a new folder" in said
            assert said.count("\n") == 1 and files(tmp_path / "rows") == []
        finally:
            other.kill()
    assert measure.main(words) == 0


def test_while_it_measures_its_folder_is_held(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    def tried(draw: Any, plan: Any) -> Any:
        with (tmp_path / "rows" / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(draw)
        return []

    monkeypatch.setattr(run, "rows_of", tried)
    assert measure.main(words) == 0
    assert len(held) == 2


@pytest.mark.slow  # two processes that import torch
def test_side_by_side_a_seed_gives_the_same_rows(words: list[str], tmp_path: Path) -> None:
    measure.main([*words, "--seed", "3"])
    more = ["--out", str(tmp_path / "apart"), "--seed", "3", "--jobs", "2"]
    assert measure.main([*words, *more]) == 0
    for name in ("draw-0000.parquet", "draw-0001.parquet"):
        apart, together = (str(read_rows(tmp_path / one / name)) for one in ("apart", "rows"))  # text: NaN is not NaN
        assert apart == together


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--jobs", "0"], "--jobs 0: use a whole number, at least 1"),
        (["--plan", "h201"], "drill plan 'h201': no file"),
        (["--out", ""], "--out '': name a folder"),
        (["--seed", "-1"], "--seed -1: use a whole number"),
        (["--frozen", "no/such/file"], "No such file"),
    ],
)
def test_a_bad_flag_is_one_line(words: list[str], change: list[str], said: str, capsys: Any) -> None:
    assert measure.main([*words, *change]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_folder_of_another_seed_or_other_limits_is_not_mixed(words: list[str], capsys: Any, tmp_path: Path) -> None:
    assert measure.main([*words, "--seed", "1"]) == 0
    capsys.readouterr()
    assert measure.main([*words, "--seed", "2"]) == 2
    assert "its rows are of another seed; use a new folder" in capsys.readouterr().err
    other = tmp_path / "other.yaml"
    other.write_text("x: 1")
    assert measure.main([*words, "--frozen", str(other)]) == 2
    assert "its rows are of another limits" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the plan would run")
def test_a_plan_for_a_gpu_says_so_where_there_is_none(tmp_path: Path, capsys: Any) -> None:
    assert measure.main(["--plan", "h200", "--out", str(tmp_path), "--frozen", str(FOLDER)]) == 2
    assert "the plan's device is cuda, and there is no CUDA device here" in capsys.readouterr().err


def test_the_gpu_plan_names_backends_alone_and_puts_faults_around_each_but_flashinfers_cudnn() -> None:
    plan = load_plan("h200")
    assert not plan.variants and plan.whole is None
    assert "flashinfer:cudnn" in plan.backends, "sound runs need no other scale than the first"
    assert plan.faulted == tuple(name for name in plan.backends if name != "flashinfer:cudnn")


def test_who_measures_needs_no_gates() -> None:
    code = (
        "import sys, attention.drill.measure, attention.drill.run\n"
        "print([m for m in ('prefect', 'mlflow', 'duckdb', 'great_expectations', 'pandas', 'transformers', 'gates')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_hash_is_of_names_and_contents_and_never_of_nothing(tmp_path: Path) -> None:
    one = tmp_path / "one.yaml"
    one.write_text("r_rms: 1.5")
    before = sha256_of([tmp_path])
    assert before == sha256_of([one])
    one.write_text("r_rms: 1.6")
    assert sha256_of([tmp_path]) != before
    with pytest.raises(UserError, match="No such file"):
        sha256_of([tmp_path / "two.yaml"])
    with pytest.raises(UserError, match="nothing to freeze"):
        sha256_of([tmp_path / "empty"] if (tmp_path / "empty").mkdir() is None else [])
