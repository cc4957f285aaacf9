"""`python -m attention`: its verbs, and one line with exit 2 for what a person did wrong."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from attention.__main__ import main
from attention.backends import NAMES
from attention.cases import AttentionCase
from attention.drift import read_rows
from attention.job import ProbeJob, Setup
from attention.probe import Level, ProbeResult, Status
from attention.reasons import Code, Reason
from attention.verbs.probes import backends_of

REPO = Path(__file__).parents[2]
VERBS = ("fingerprint", "matrix", "resolve", "probe", "replay", "compare", "bench", "serve")
PROMPT = {
    "prompt_id": "p1",
    "category": "c",
    "language": "en",
    "messages": [{"role": "user", "content": "Hello there"}],
    "max_tokens": 3,
}


def flags(setup: Setup) -> list[str]:
    return ["--model", str(setup.model), "--policy", str(setup.policy)]


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr of a call that exits 2."""
    assert main(list(argv)) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    (line,) = seen.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n    {verb} " in text


def test_a_mistake_ends_the_process_with_two_and_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attention", "probe", "--job", str(tmp_path / "none.json"), "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: job {tmp_path}/none.json: cannot be read (No such file or directory)\n"


def test_an_unknown_verb_or_flag_exits_two(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["prob"], ["probe", "--modle", "x"], []):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["fingerprint", "probe"])
def test_a_missing_model_is_named(capsys: pytest.CaptureFixture[str], setup: Setup, verb: str) -> None:
    line = error_of(capsys, verb, "--model", "no/such/model", "--policy", str(setup.policy))
    assert "model no/such/model: no config.json there" in line


def test_a_missing_policy_is_named(capsys: pytest.CaptureFixture[str], setup: Setup) -> None:
    assert "policy no/such.yaml" in error_of(capsys, "probe", "--model", str(setup.model), "--policy", "no/such.yaml")
    assert "policy no/such.yaml" in error_of(capsys, "resolve", "no/such.yaml", "--model", str(setup.model))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("verb", ["fingerprint", "probe"])
def test_a_device_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], setup: Setup, verb: str) -> None:
    assert "device cuda" in error_of(capsys, verb, *flags(setup), "--device", "cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_resolve_names_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str], setup: Setup) -> None:
    argv = ("resolve", str(setup.policy), "--model", str(setup.model), "--device", "cuda")
    assert "device cuda" in error_of(capsys, *argv)


@pytest.mark.parametrize(
    ("verb", "wants"),
    [
        ("replay", "replay takes one of --cases FILE, --prompts FILE and --job FILE, and --out DIR"),
        ("compare", "compare takes two recordings, A and B, or --job FILE and --out DIR"),
        ("bench", "bench needs --job FILE and --out DIR"),
    ],
)
def test_a_measuring_verb_without_an_argument_says_what_it_takes(
    capsys: pytest.CaptureFixture[str], verb: str, wants: str
) -> None:
    assert wants in error_of(capsys, verb)


def test_a_bad_fingerprint_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "a.json"
    bad.write_text("{}")
    assert "a.json: not one written by" in error_of(capsys, "fingerprint", "--diff", str(bad), str(bad))
    assert "none.json: cannot be read" in error_of(
        capsys, "fingerprint", "--diff", str(tmp_path / "none.json"), str(bad)
    )


def test_two_fingerprints_are_compared(capsys: pytest.CaptureFixture[str], setup: Setup, tmp_path: Path) -> None:
    files = []
    for name, more in (("a", []), ("b", ["--policy", str(REPO / "data/policies/cpu-math.yaml")])):
        assert main(["fingerprint", *flags(setup), *more, "--json"]) == 0
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(capsys.readouterr().out)
    assert main(["fingerprint", "--diff", str(files[0]), str(files[0])]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["fingerprint", "--diff", *map(str, files)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^attention_backend_policy.mode +preferred-with-fallback +-> pinned$", text, re.MULTILINE)
    assert "another backend is asked for first" in text
    assert main(["fingerprint", "--diff", *map(str, files), "--json"]) == 0
    document = {one["field"]: one for one in json.loads(capsys.readouterr().out)}
    preferred = document["attention_backend_policy.preferred"]
    assert (preferred["old"], preferred["new"]) == (["torch_sdpa:flash"], ["math"])
    assert preferred["effects"][0]["source"] == "attention/policy.py resolve"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ('"\\ud800"', "torch  absent  -> \\ud800"),
        (f'"{"9" * 5000}"', f"torch  absent  -> {'9' * 5000}"),
    ],
)
def test_odd_values_in_a_fingerprint_are_shown(
    capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path, value: str, text: str
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text('{"identity": {}}')
    new.write_text(f'{{"identity": {{"torch": {value}}}}}')
    assert main(["fingerprint", "--diff", str(old), str(new)]) == 0
    assert capsysbinary.readouterr().out.decode().splitlines()[0] == text


def test_deep_nesting_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat, deep = tmp_path / "flat.json", tmp_path / "deep.json"
    flat.write_text('{"identity": {}}')
    deep.write_text("[" * 100_000)
    assert "deep.json: not JSON that can be used" in error_of(capsys, "fingerprint", "--diff", str(flat), str(deep))
    assert "deep.json: not written by `probe --out`" in error_of(capsys, "matrix", "--drift", str(deep))
    # What can just be read may be too deep to be compared.
    monkeypatch.setattr("attention.effects.changes", lambda *sides: deeper())
    assert "nested too deeply to be compared" in error_of(capsys, "fingerprint", "--diff", str(flat), str(flat))


def deeper() -> int:
    return deeper()


def test_fingerprints_of_different_versions_can_be_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text('{"id": "1", "identity": {"torch": "2.10.0"}}')
    new.write_text('{"id": "2", "identity": {"torch": "2.11.0", "a_field_of_tomorrow": true}}')
    assert main(["fingerprint", "--diff", str(old), str(new)]) == 0
    assert "a_field_of_tomorrow  absent  -> true" in capsys.readouterr().out.splitlines()


def test_the_matrix_shows_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix"]) == 0
    text = capsys.readouterr().out
    assert "\nflashinfer:xqa  cuda\n" in text
    assert main(["matrix", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)
    assert set(cells["torch_sdpa:flash"]) == {"cpu", "cuda"}


def test_resolve_explains_the_policy_of_the_document(capsys: pytest.CaptureFixture[str], setup: Setup) -> None:
    document = str(REPO / "data/policies/document.yaml")
    assert main(["resolve", document, "--model", str(setup.model)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[:3] == [
        "prefill, decode, extend, 2 to 512 keys, causal:",
        "  requested flashinfer:fa3, chain torch_sdpa:flash > torch_sdpa:math",
        "  left out flashinfer:fa3",
    ]
    assert text.count("  left out flashinfer:fa3\n    ARCH_UNSUPPORTED: ") == 1
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "pip install flashinfer-python" in text
    assert main(["resolve", document, "--model", str(setup.model), "--json"]) == 0
    assert [r["phase"] for r in json.loads(capsys.readouterr().out)] == ["prefill", "decode", "extend"]


def test_resolve_tells_phases_apart_that_differ(
    capsys: pytest.CaptureFixture[str], setup: Setup, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.yaml"
    override = "{phase: decode, kv_len: [100, null], preferred: [math]}"
    policy.write_text(f"attention_policy: {{preferred: [torch_sdpa:flash], overrides: [{override}]}}")
    assert main(["resolve", str(policy), "--model", str(setup.model)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "prefill, extend, 2 to 512 keys, causal:",
        "decode, 2 to 99 keys, causal:",
        "  requested torch_sdpa:flash, chain torch_sdpa:flash",
        "decode, 100 to 512 keys, causal:",
        "  requested torch_sdpa:math, chain torch_sdpa:math > torch_sdpa:flash",
    ]


def probed(backend: str, probe: str, level: Level, status: Status, *, required: bool = True) -> ProbeResult:
    case = AttentionCase(
        phase="decode", batch="q1s64", heads_q=4, heads_kv=2, head_dim_qk=16, head_dim_vo=16, dtype="float32"
    )
    reason = Reason(
        code=Code.NUMERIC_DRIFT, dimension="R_rms", observed="70", allowed="<= 10", source="probe", message="too far"
    )
    return ProbeResult(
        backend=backend, probe=probe, level=level, feature="decode", required=required, case=case, status=status,
        reasons=() if status == "pass" else (reason,),
    )  # fmt: skip


SOUND = [
    probed("torch_sdpa:flash", "single_decode", "static", "pass"),
    probed("torch_sdpa:flash", "single_decode", "execute", "pass"),
    probed("torch_sdpa:flash", "graph_replay", "static", "fail", required=False),
    probed("torch_sdpa:flash", "lse", "execute", "unknown", required=False),
    probed("torch_sdpa:math", "single_decode", "static", "fail"),
]


def test_probe_says_what_failed_and_what_its_exit_code_means(
    capsys: pytest.CaptureFixture[str], setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attention.startup.probe", lambda *args, **kwargs: SOUND)
    assert main(["probe", *flags(setup)]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["backend", "probe", "phase", "level", "required", "status", "reasons"]
    assert lines[0].split() == ["torch_sdpa:flash", "single_decode", "decode", "static", "yes", "pass"]
    assert lines[2].index("NUMERIC_DRIFT") == header.index("reasons")
    assert lines[-3:] == [
        "5 rows: 2 pass, 0 fail, 2 refused, 1 unknown",
        "resolved: prefill torch_sdpa:flash, decode torch_sdpa:flash, extend torch_sdpa:flash",
        "exit 0: every required probe that the declared rules allow here passed",
    ]


def test_a_required_probe_that_fails_exits_one_although_another_backend_stands_in(
    capsys: pytest.CaptureFixture[str], setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = probed("torch_sdpa:flash", "paged_kv", "execute", "fail")
    monkeypatch.setattr("attention.startup.probe", lambda *args, **kwargs: [*SOUND, bad])
    assert main(["probe", *flags(setup)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("resolved: prefill torch_sdpa:math")
    assert lines[-1] == "exit 1: required and not passed: torch_sdpa:flash paged_kv"


def test_probe_asks_all_backends_on_the_cpu_and_those_of_the_policy_on_a_gpu(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("attention.startup.probe", lambda *args, backends, **kwargs: asked.append(backends) or SOUND)
    assert main(["probe", *flags(setup)]) == main(["probe", *flags(setup), "--backends", "math"]) == 0
    job = ProbeJob(setup=setup.model_copy(update={"device": "cuda"}), level="full")
    assert asked == [NAMES, ("torch_sdpa:math",)]
    assert backends_of(argparse.Namespace(backends=None, job=None), job) is None


def test_the_help_of_probe_says_what_its_exit_code_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["probe", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Exit 1: a backend that may run here by the declared rules did not pass a required probe" in text


def rows(lake: Path, table: str) -> list[dict[str, Any]]:
    files = sorted((lake / table).rglob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def test_replay_and_compare_leave_a_result_and_rows_with_whose_they_are(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attention.verbs.common.die_with_parent", lambda: None)
    threads = torch.get_num_threads()
    evidence = {"lake": str(tmp_path / "lake"), "release_id": "r1", "side": "candidate"}
    common = {"setup": setup.model_dump(mode="json"), "evidence": evidence}
    job = {
        **common,
        "tensor": {
            "seeds": [0],
            "max_kv_len": 63,
            "inputs": ["normal", "sink", "activations"],
            "truths": str(tmp_path / "truths"),
        },
        "model": {
            "prompts": [PROMPT],
            "max_tokens": 32,
            "decode_tokens": 4,
            "floors": str(tmp_path / "floors"),
        },
        "business": {"prompts": [PROMPT]},
    }
    (tmp_path / "replay.json").write_text(json.dumps(job))
    assert main(["replay", "--job", str(tmp_path / "replay.json"), "--out", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["errors"], result["cases"]) == (0, 12)
    assert result["truths"] == {"computed": 12, "read": 0}
    assert 0 < result["throughput"]["oracle_share"] < result["throughput"]["busy_share"] < 1
    assert (tmp_path / "out" / "activations.safetensors").is_file()
    assert [answer["prompt_id"] for answer in result["answers"]] == ["p1"]
    seen = rows(tmp_path / "lake", "tensor_replay")
    assert {(r["release_id"], r["side"], r["model"], r["fingerprint_id"]) for r in seen} == {
        ("r1", "candidate", "tiny-llama", result["fingerprint_id"])
    }

    assert {r["inputs"] for r in seen} == {"normal", "sink", "activations"}

    assert main(["replay", "--job", str(tmp_path / "replay.json"), "--out", str(tmp_path / "out")]) == 0
    again = json.loads((tmp_path / "out" / "result.json").read_text())
    assert again["truths"] == {"computed": 0, "read": 12}, "one release computes a truth once"
    assert again["throughput"]["oracle_share"] == 0 < again["throughput"]["cases_per_minute"]

    compare = {**common, "champion": result["states"], "candidate": result["states"]}
    compare |= {"floor": result["floor"], "known_floor": result["known_floor"]}
    (tmp_path / "compare.json").write_text(json.dumps(compare))
    try:
        assert main(["compare", "--job", str(tmp_path / "compare.json"), "--out", str(tmp_path / "compared")]) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads((tmp_path / "compared" / "result.json").read_text())
    assert found["floor"] == "measured"
    seen = rows(tmp_path / "lake", "model_replay")
    positions = [row for row in seen if row["side"] == "candidate"]
    assert len(positions) == found["positions"] > 0
    assert {row["kl"] for row in positions} == {0.0}
    assert {row["confirmed_backend"] for row in positions} == {"torch_sdpa:flash"}
    assert {(row["fingerprint_id"], row["dtype_class"]) for row in seen} == {(result["fingerprint_id"], "float32")}
    floor = [row for row in seen if row["side"] == "champion"]
    assert {row["confirmed_backend"] for row in floor} == {"torch_sdpa:math"}, "the policy's fallback is the second way"
    assert [row["position"] for row in floor] == [row["position"] for row in positions]

    assert main(["replay", "--job", str(tmp_path / "replay.json"), "--out", str(tmp_path / "out")]) == 0
    again = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (again["floor"], again["known_floor"]) == (None, result["known_floor"]), "a floor is measured once"
    (tmp_path / "compare.json").write_text(json.dumps({**compare, "floor": None}))
    try:
        assert main(["compare", "--job", str(tmp_path / "compare.json"), "--out", str(tmp_path / "compared")]) == 0
    finally:
        torch.set_num_threads(threads)
    assert json.loads((tmp_path / "compared" / "result.json").read_text())["floor"] == "known"
    both = [row["kl"] for row in rows(tmp_path / "lake", "model_replay") if row["side"] == "champion"]
    assert sorted(both) == sorted(2 * [row["kl"] for row in floor])


def test_what_the_system_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    policy = str(REPO / "data/policies/cpu-math.yaml")
    assert error_of(capsys, "resolve", policy, "--model", "x" * 5000).endswith("File name too long")


CELLS = """
groups:
  - base: {phase: decode, batch: q1s64, heads_q: 4, heads_kv: 2, head_dim_qk: 16, head_dim_vo: 16, dtype: float32}
    axes: [[{softcap: null}, {softcap: 5.0}]]
    checks: [{run: [softcap]}]
"""


def test_cells_are_probed_into_a_file_that_the_matrix_compares_with_its_rules(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cells, out = tmp_path / "cells.yaml", tmp_path / "rows.parquet"
    cells.write_text(CELLS)
    argv = ["probe", "--cells", str(cells), "--backends", "math,flashinfer:fa2", "--out", str(out)]
    assert main(argv) == 0
    assert capsys.readouterr().out == ""
    rows = pq.read_table(out).to_pylist()
    assert {(r["backend"], r["level"], r["status"]) for r in rows} == {
        ("torch_sdpa:math", "static", "pass"),
        ("torch_sdpa:math", "construct", "pass"),
        ("torch_sdpa:math", "execute", "pass"),
        ("torch_sdpa:math", "execute", "unknown"),  # softcap of a case without one
        ("torch_sdpa:math", "static", "fail"),  # softcap 5
        ("flashinfer:fa2", "static", "fail"),
    }
    assert main(["matrix", "--drift", str(out)]) == 0
    assert capsys.readouterr().out == "no drift\n"
    lone = tmp_path / "lone.parquet"
    pq.write_table(pq.read_table(out, filters=[("backend", "=", "torch_sdpa:math")]), lone)
    assert main(["matrix", "--drift", str(out), str(lone)]) == 0
    assert capsys.readouterr() == ("no drift\n", f"only in {out}: flashinfer:fa2\n")
    assert main(["matrix", "--drift", str(out), str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_bad_place_for_rows_is_told_before_any_probe_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cells = tmp_path / "cells.yaml"
    cells.write_text(CELLS)
    line = error_of(capsys, "probe", "--cells", str(cells), "--out", str(tmp_path / "rows.csv"))
    assert "write probe rows to a .json or .parquet file" in line
    assert "this is a folder" in error_of(capsys, "probe", "--cells", str(cells), "--out", str(folder(tmp_path)))
    assert "unknown backend 'maths'" in error_of(capsys, "probe", "--cells", str(cells), "--backends", "maths")


def folder(parent: Path) -> Path:
    path = parent / "rows.json"
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        ("--jobs", "0", "--jobs 0: use a whole number"),
        ("--jobs", "-1", "--jobs -1: use a whole number"),
        ("--timeout-s", "nan", "--timeout-s nan: use seconds"),
        ("--timeout-s", "0", "--timeout-s 0: use seconds"),
        ("--budget-s", "-1", "--budget-s -1: use seconds"),
        ("--backends", "", "unknown backend ''"),
        ("--device", "cuda:²", "use cpu, cuda or cuda:N"),
        ("--device", f"cuda:{'9' * 5000}", "use cpu, cuda or cuda:N"),
        ("--compiled", "no/such/file", "--compiled no/such/file: no such file"),
    ],
)
def test_a_flag_out_of_range_is_one_line_and_costs_no_old_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str, value: str, text: str
) -> None:
    (tmp_path / "cells.yaml").write_text(CELLS)
    out = tmp_path / "rows.json"
    out.write_text("old")
    line = error_of(capsys, "probe", "--cells", str(tmp_path / "cells.yaml"), "--out", str(out), flag, value)
    assert text in line and len(line) < 500
    assert [path.name for path in tmp_path.iterdir() if path.name != "cells.yaml"] == ["rows.json"]
    assert out.read_text() == "old"


@pytest.mark.parametrize("flag", [("--calls", "0"), ("--batch", "foo"), ("--batch", f"{'9' * 20}q1")])
def test_a_flag_of_bench_dispatch_out_of_range_is_one_line(
    capsys: pytest.CaptureFixture[str], flag: tuple[str, str]
) -> None:
    assert "Traceback" not in error_of(capsys, "bench", "dispatch", *flag)


def test_where_all_is_probed_resume_leaves_the_file_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, out = tmp_path / "cells.yaml", tmp_path / "rows.json"
    cells.write_text(CELLS)
    argv = ["probe", "--cells", str(cells), "--backends", "flashinfer:fa2", "--out", str(out)]
    assert main(argv) == 0
    before = out.read_bytes()
    capsys.readouterr()
    assert main([*argv, "--resume"]) == 0
    assert capsys.readouterr() == ("", f"{out}: has the rows of all these probes already, and stays as it is\n")
    assert out.read_bytes() == before


def test_ctrl_c_stops_the_workers_at_once_and_keeps_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, out, log = tmp_path / "cells.yaml", tmp_path / "rows.json", tmp_path / ".rows.json.rows"
    batches = ", ".join(f"{{batch: q{num}}}" for num in range(300, 900))
    cells.write_text(
        "groups: [{base: {phase: prefill, heads_q: 4, heads_kv: 2, head_dim_qk: 64, head_dim_vo: 64, dtype: float32}, "
        f"axes: [[{batches}]], checks: [{{run: [numeric]}}]}}]"
    )
    argv = ["probe", "--cells", str(cells), "--backends", "math", "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "attention", *argv], cwd=REPO, stderr=subprocess.PIPE, text=True)
    try:
        while not (log.exists() and b"execute" in log.read_bytes()):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=8)
    finally:
        process.kill()
    assert (process.returncode, said.splitlines()[-1]) == (
        130,
        f"stopped; --out {out} --resume goes on with what is left",
    )
    kept = read_rows(out)
    assert 0 < len({row.case for row in kept}) < 600
    assert not log.exists()
    known: list[Any] = []
    monkeypatch.setattr("attention.probe_workers.probe_all", lambda *args, **more: known.extend(more["known"]) or kept)
    assert main([*argv, "--resume"]) == 0
    assert set(known) == {(row.backend, row.probe, row.case) for row in kept}


def test_the_matrix_lists_rules_and_reports_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix"]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("  known_bad") and "min_kv_len <= 0" in line)
    assert lines[place + 1].split() == ["EMPTY_ROW_SEMANTICS,", "flashinfer#4484"]
    assert all(len(line) <= 80 for line in lines)
    assert main(["matrix", "--json"]) == 0
    bad = json.loads(capsys.readouterr().out)["known_bad"]
    assert {"backend", "when", "versions", "code", "source"} <= set(bad[0])
