"""Compiling ahead: one job a kind of code, long ones first, and what does not compile is a row."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from attention import matrix, warm
from attention.cases import AttentionCase
from attention.cells import load_cells
from attention.errors import UserError
from attention.isolate import NOT_RUN
from attention.warm import (
    COMPILING,
    Compiled,
    Share,
    compile_all,
    counts,
    distinct,
    earlier_rows,
    jobs_of,
    main,
    pending,
    share_of,
)

CELLS = """
groups:
  - base: {heads_q: 4, heads_kv: 2, head_dim_qk: 16, head_dim_vo: 16, dtype: float32, layout: paged_nhd, page_size: 16}
    axes: [[{phase: decode, batch: q1s33}, {phase: prefill, batch: q20}, {phase: prefill, batch: q40}]]
"""


def case(**changes: Any) -> AttentionCase:
    fields: dict[str, Any] = {"heads_q": 4, "heads_kv": 2, "head_dim_qk": 16, "head_dim_vo": 16, "dtype": "float32"}
    return AttentionCase(**{"phase": "decode", "batch": "q1s33", **fields, **changes})


def test_flashinfers_prefill_kernels_have_one_module_for_every_batch_phase_and_page() -> None:
    alike = [case(), case(batch="q1s40"), case(page_size=64), case(phase="prefill", batch="q20")]
    assert distinct("flashinfer:fa2", alike) == alike[:1]
    assert distinct("flashinfer:xqa", alike) == [alike[0], alike[2]], "pages count"
    wide = case(heads_q=8, heads_kv=4)
    assert distinct("flashinfer:xqa", [case(), wide]) == [case()], "heads count by their ratio"
    assert distinct("triton:paged", [case(), wide]) == [case(), wide]
    assert distinct("triton:paged", alike) == [alike[0], alike[2], alike[3]]


@pytest.mark.parametrize("changes", [{"softcap": 3.0}, {"window": (7, 0)}, {"sinks": True}, {"head_dim_qk": 32}])
def test_a_feature_is_other_code(changes: dict[str, Any]) -> None:
    for backend in COMPILING:
        assert len(distinct(backend, [case(), case(**changes)])) == 2


def test_the_cells_of_hopper_need_few_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_importable", lambda package: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    cells = list(dict.fromkeys(p.case for p in load_cells(Path("attention/cells/hopper.yaml"))))
    wanted, refused = jobs_of(list(COMPILING), cells, "cuda")
    assert len(wanted["flashinfer:fa3"]) == 8
    assert len(wanted["flashinfer:fa2"]) == 12
    assert len(wanted["triton:paged"]) > 40
    assert refused["flashinfer:fa3"] == 4
    assert all(one.phase == "decode" for one in wanted["flashinfer:xqa"].values())


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[int, dict[str, Any]]:
    (tmp_path / "cells.yaml").write_text(CELLS)
    out = tmp_path / "compiled.json"
    always = ["--cells", str(tmp_path / "cells.yaml"), "--out", str(out), "--device", "cpu", "--jobs", "2"]
    monkeypatch.setattr(sys, "argv", ["warm", *always, *flags])
    return main(), json.loads(out.read_text())


def test_what_the_rules_refuse_is_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = run(tmp_path, monkeypatch, "--backends", "torch_sdpa:flash,flash_attn:fa2")
    assert code == 0
    assert said["counts"] == {"torch_sdpa:flash": {"compiled": 2}}
    assert said["refused"] == {"torch_sdpa:flash": 0, "flash_attn:fa2": 2}
    assert all(row["seconds"] >= 0 and row["error"] is None for row in said["rows"])


WORKER = """
import time
from attention.isolate import worker
with worker() as (task, channel):
    for name in task["names"]:
        channel.at(name)
        if name.startswith("flashinfer:fa3"):
            time.sleep(60)
        channel.done(name, seconds=1.5, modules={"m": task["cores"]})
"""


def test_a_slow_backend_does_not_keep_the_others_from_compiling_and_ends_with_the_time() -> None:
    wanted = {
        name: {str(i): case(batch=f"q1s{i + 8}") for i in range(3)} for name in ("flashinfer:fa3", "triton:paged")
    }
    heard: list[Compiled] = []
    started = time.monotonic()
    rows = compile_all(
        wanted,
        device="cpu",
        jobs=4,
        deadline=started + 8,
        heard=heard.append,
        command=[sys.executable, "-c", WORKER],
    )
    assert time.monotonic() - started < 14
    assert rows == heard
    assert counts(rows) == {"triton:paged": {"compiled": 3}, "flashinfer:fa3": {"not run": 3}}
    assert {row.error for row in rows if row.backend == "flashinfer:fa3"} == {NOT_RUN}


def test_a_larger_machine_has_more_workers_and_a_small_one_smaller_ones() -> None:
    assert share_of("flashinfer:fa3", 16) == Share(3, cores=4)
    assert share_of("flashinfer:fa3", 32) == Share(6, cores=4)
    assert share_of("flashinfer:fa3", 4) == Share(3, cores=1)


def test_ctrl_c_does_not_wait_for_what_compiles() -> None:
    def interrupted(row: Compiled) -> None:
        raise KeyboardInterrupt

    wanted = {name: {"0": case()} for name in ("flashinfer:fa3", "triton:paged")}
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compile_all(wanted, device="cpu", jobs=4, heard=interrupted, command=[sys.executable, "-c", WORKER])
    assert time.monotonic() - started < 14


def test_when_the_time_is_spent_the_rest_is_not_compiled_and_a_second_run_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = run(tmp_path, monkeypatch, "--backends", "torch_sdpa:flash", "--budget-s", "0")
    assert (code, said["counts"]) == (3, {"torch_sdpa:flash": {"not run": 2}})
    code, said = run(tmp_path, monkeypatch, "--backends", "torch_sdpa:flash", "--resume")
    assert (code, said["counts"]) == (0, {"torch_sdpa:flash": {"compiled": 2}})
    monkeypatch.setattr(warm, "_COMMAND", ("false",))
    code, again = run(tmp_path, monkeypatch, "--backends", "torch_sdpa:flash", "--resume")
    assert (code, again["rows"]) == (0, said["rows"]), "nothing is compiled twice"


def test_what_is_not_in_the_caches_is_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, there = tmp_path / "compiled.json", case()
    row = {"backend": "flashinfer:fa2", "case_id": "x", "kind": warm.kind_of("flashinfer:fa2", there)}
    path.write_text(json.dumps({"after": {"flashinfer": 3}, "rows": [row]}))
    monkeypatch.setattr(warm.jit, "outputs", lambda: {"flashinfer": 3})
    is_pending = pending(path)
    assert not is_pending("flashinfer:fa2", there)
    assert is_pending("flashinfer:fa2", case(head_dim_qk=32))
    assert is_pending("flashinfer:fa3", there)
    assert not is_pending("torch_sdpa:flash", there)
    monkeypatch.setattr(warm.jit, "outputs", dict)
    assert pending(path)("flashinfer:fa2", there), "another machine"
    assert earlier_rows(path) == []
    assert pending(None)("flashinfer:fa2", there)


def test_what_is_missing_or_of_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--compiled .*none\.json: no such file"):
        pending(tmp_path / "none.json")
    for text in ("[]", '{"rows": [{"a": 1}]}', '{"rows": [], "after": {"torch": "many"}}'):
        (tmp_path / "odd.json").write_text(text)
        with pytest.raises(UserError, match=r"odd\.json: not written by `python -m attention\.warm`"):
            earlier_rows(tmp_path / "odd.json")


@pytest.mark.parametrize(
    "flags",
    [("--jobs", "0"), ("--budget-s", "nan"), ("--device", "cuda:x"), ("--backends", "maths"), ("--out", "/dev/null/x")],
)
def test_a_flag_out_of_range_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: tuple[str, str]
) -> None:
    (tmp_path / "cells.yaml").write_text(CELLS)
    argv = ["--cells", str(tmp_path / "cells.yaml"), "--out", str(tmp_path / "out.json"), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["warm", *argv, "--budget-s", "0", *flags])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
