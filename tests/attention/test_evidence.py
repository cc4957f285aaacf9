"""All evidence in one go: a step that fails, hangs or dies is a line in steps.json, and the next one runs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from attention.bench_kernels import Row, write
from attention.drift import read_rows, write_rows
from attention.errors import UserError
from attention.evidence import DISPATCHED, Step, backend_table, main, run_all, steps
from attention.probe import Probe
from attention.probe_workers import probe_all
from tests.attention.test_warm import case

ROOT = Path(__file__).parents[2]


def python(name: str, code: str, share: float = 1, stdout: str | None = None) -> Step:
    return Step(name, lambda limit_s: [sys.executable, "-c", code], share, stdout)


def outcomes(folder: Path) -> list[tuple[str, str]]:
    return [(one["name"], one["status"]) for one in json.loads((folder / "steps.json").read_text())]


def runs(pid: int) -> bool:
    """Whether a process is there and not a zombie: a container may have no init that reaps."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_whatever_comes_of_a_step_the_next_one_runs(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    wanted = [
        python("crash", "import os; os.abort()"),
        python("hang", f"{child}; open({str(pid)!r}, 'w').write(str(p.pid)); p.wait()", share=0.3),
        python("fails", "raise SystemExit('out of memory')"),
        python("speaks", "print('{}')", stdout="said.json"),
        python("silent", "", stdout="silent.json"),
        python("spent", "raise SystemExit(3)"),
    ]
    found = run_all(wanted, tmp_path, budget_s=20)
    assert outcomes(tmp_path) == [
        ("crash", "failed"), ("hang", "timeout"), ("fails", "failed"), ("speaks", "done"),
        ("silent", "failed"), ("spent", "partial"),
    ]  # fmt: skip
    assert found[0].exit_code == -6
    assert found[2].tail == "out of memory"
    assert json.loads((tmp_path / "said.json").read_text()) == {}
    assert not (tmp_path / "silent.json").exists()
    time.sleep(0.2)
    assert not runs(int(pid.read_text())), "what the step that hung had started is gone too"


def test_time_that_a_step_does_not_use_goes_to_the_next_and_none_starts_after_the_budget(tmp_path: Path) -> None:
    quick, slow = python("quick", ""), python("slow", "import time; time.sleep(60)")
    found = run_all([quick, slow, python("late", "")], tmp_path, budget_s=4)
    assert found[1].limit_s > found[0].limit_s
    assert run_all([slow], tmp_path, budget_s=0)[0].status == "not run"


def test_the_steps_are_told_how_long_they_have(tmp_path: Path) -> None:
    wanted = steps(tmp_path, device="cuda", cells=Path("cells.yaml"), backends="all", calls=None, small=False)
    assert [step.name for step in wanted] == [
        "fingerprint_before", "compile", "probes", "dispatch", "kernels", "fingerprint_after",
    ]  # fmt: skip
    told = {step.name: step.argv(100.0)[-2:] for step in wanted}
    for name in ("compile", "probes", "dispatch", "kernels"):
        assert told[name] == ["--budget-s", "94"]


@pytest.mark.parametrize(
    "flags",
    [("--budget-s", "nan"), ("--calls", "0"), ("--device", "cuda:²"), ("--backends", ""), ("--only", "prbes")],
)
def test_a_flag_out_of_range_is_one_line_before_any_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, str]
) -> None:
    assert main(["--out", str(tmp_path / "out"), "--device", "cpu", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_the_probes_are_told_what_is_compiled_if_that_was_written(tmp_path: Path) -> None:
    wanted = steps(tmp_path, device="cpu", cells=Path("c.yaml"), backends="all", calls=None, small=False)
    (probes,) = (step for step in wanted if step.name == "probes")
    assert "--compiled" not in probes.argv(100.0)
    (tmp_path / "compiled.json").write_text("{}")
    assert str(tmp_path / "compiled.json") in probes.argv(100.0)


def test_a_second_run_skips_what_is_done_and_completes_the_rest(tmp_path: Path) -> None:
    mark = tmp_path / "marks"
    tell = f"open({str(mark)!r}, 'a').write"
    wanted = [python("whole", f"{tell}('w')"), python("part", f"{tell}('p'); raise SystemExit(3)")]
    run_all(wanted, tmp_path, budget_s=20)
    run_all([*wanted, python("late", f"{tell}('l')")], tmp_path, budget_s=20, resume=True)
    assert mark.read_text() == "wppl"
    assert outcomes(tmp_path) == [("whole", "done"), ("part", "partial"), ("part", "partial"), ("late", "done")]


@pytest.mark.slow
def test_the_probes_of_a_step_that_was_killed_are_kept(tmp_path: Path) -> None:
    rows = probe_all(("torch_sdpa:cudnn",), [Probe(name="cell", feature="decode", case=case())], device="cpu")
    code = f"""
import time
from pathlib import Path
from attention.drift import RowsLog, read_rows
log = RowsLog(Path({str(tmp_path / "probes.parquet")!r}))
log.add(read_rows(Path({str(tmp_path / "rows.json")!r})))
log._lines.write(b'[{{"backend": "half a li')
log._lines.flush()
time.sleep(60)
"""
    write_rows(tmp_path / "rows.json", rows)
    found = run_all([python("probes", code)], tmp_path, budget_s=12)
    assert found[0].status == "timeout"
    assert read_rows(tmp_path / "probes.parquet") == rows
    assert not list(tmp_path.glob(".*"))


def test_the_table_has_a_line_a_backend_and_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no steps\.json"):
        backend_table(tmp_path)
    cases = [case(), case(phase="prefill", batch="q20")]
    probes = [Probe(name="cell", feature="decode", case=one) for one in cases]
    probes.append(Probe(name="lse", feature="lse", case=cases[0], check="lse"))
    write_rows(tmp_path / "probes.parquet", probe_all(("torch_sdpa:flash", "torch_sdpa:cudnn"), probes, device="cpu"))
    rows = [
        Row("decode-page16", "torch_sdpa:flash", "TB/s", 3.0, ratio=0.75, baseline="read:triton"),
        Row("decode-page64", "torch_sdpa:flash", "TB/s", 3.2, ratio=0.8, baseline="read:triton"),
        Row("prefill-ragged", "torch_sdpa:flash", "TFLOP/s", error="out of memory"),
        Row("decode-page16", "read:triton", "TB/s", 4.0, ratio=1.0, baseline="read:triton"),
    ]
    write(rows, tmp_path / "kernels.json")
    overhead = {"backend": "torch_sdpa:flash", "overhead_us": 2.25, "run_nodes": 3, "library_nodes": 3}
    crashed = {"backend": "flash_attn:fa2", "error": "the worker died"}
    (tmp_path / "dispatch.json").write_text(json.dumps([{**overhead, "nodes_equal": True}, crashed]))
    run_all([python("done", ""), python("broken", "1 / 0")], tmp_path, budget_s=20)
    table = backend_table(tmp_path).splitlines()
    assert table[2] == "| `torch_sdpa:cudnn` | - | 2 | - | - | - | - | - |"
    assert table[3] == "| `torch_sdpa:flash` | 2 of 2 | - | 1 of 1 | 3.20 (contiguous, 80%) | - | +2.2 | 3 = 3 |"
    assert table[-2] == "Plain read: `read:triton` 4.00 TB/s."
    assert {line.count("|") for line in table[:4]} == {9}
    assert table[-1].endswith("2 steps, not done: broken (failed).")


@pytest.mark.slow
def test_a_small_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.attention.test_warm import CELLS

    monkeypatch.chdir(ROOT)
    (tmp_path / "cells.yaml").write_text(CELLS)
    out = tmp_path / "evidence"
    flags = ["--out", str(out), "--device", "cpu", "--cells", str(tmp_path / "cells.yaml"), "--backends", "torch_sdpa"]
    only = "fingerprint,compile,probes"
    assert main([*flags, "--budget-s", "200", "--only", only]) == 0
    assert {status for _, status in outcomes(out)} == {"done"}
    assert "the same after; 4 steps, all done." in backend_table(out)
    assert main([*flags, "--calls", "20", "--budget-s", "100", "--only", "dispatch,fingerprint", "--resume"]) == 1
    assert [row["backend"] for row in json.loads((out / "dispatch.json").read_text())] == list(DISPATCHED)
    assert len([path for path in out.rglob("*") if path.is_file()]) <= 8
    assert sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) < 1 << 20
