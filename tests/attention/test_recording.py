"""A cross-version replay by hand: record twice, compare anywhere; what cannot be compared is never a pass."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention.__main__ import main
from attention.cases import REPLAY_INPUTS
from attention.errors import UserError
from attention.job import Setup
from attention.replay import judge, recording
from attention.replay.recording import MANIFEST, TENSORS, Manifest, Recording, record
from gates.thresholds import load_limits
from tests.attention.test_main import error_of, flags

LIMITS = Path(__file__).parents[2] / "gates/thresholds.yaml"
NOBODY = Manifest(fingerprint_id="f", torch="2", python="3", gpu="cpu", distributions={}, entries=())
CASES = """
groups:
  - base: {phase: decode, batch: q1s40_q1s9, heads_q: 4, heads_kv: 2, head_dim_qk: 16, head_dim_vo: 16, dtype: float32}
    axes:
      - [{dtype: float32}, {dtype: bfloat16}]
      - [{phase: decode}, {phase: prefill, batch: q17}, {phase: extend, batch: q5s3}]
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cases") / "cases.yaml"
    path.write_text(CASES)
    return path


@pytest.fixture(scope="module")
def once(tiny_model: Path, cases: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`once(math)`: a recording of the cases by the command, under a policy of one backend, made once."""

    @cache
    def run(backend: str) -> Path:
        folder = tmp_path_factory.mktemp("recorded")
        policy = folder / "policy.yaml"
        policy.write_text(f"attention_policy: {{mode: pinned, preferred: [{backend!r}]}}\n")
        setup = flags(Setup(model=tiny_model, policy=policy))
        out = folder / "recording"
        assert main(["replay", *setup, "--cases", str(cases), "--out", str(out), "--seeds", "3"]) == 0
        return out

    return run


@pytest.fixture
def recorded(once: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """`recorded("A", math)`: a copy of that recording, to spoil."""

    def copy(name: str, backend: str = "torch_sdpa:flash") -> Path:
        return Path(shutil.copytree(once(backend), tmp_path / name))

    return copy


def compared(capsys: pytest.CaptureFixture[str], a: Path, b: Path, *more: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["compare", str(a), str(b), "--limits", str(LIMITS), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def reasons_of(document: dict[str, Any]) -> set[str]:
    return {"; ".join(row["reasons"]) for row in document["rows"]}


def change(folder: Path, edit: Callable[[dict[str, np.ndarray[Any, Any]], dict[str, Any]], None]) -> Path:
    """Edit a recording as its author could: tensors and manifest fit together."""
    one = Recording(folder)
    with np.load(folder / TENSORS) as file:
        arrays = dict(file)
    document = json.loads(one.manifest.model_dump_json())
    edit(arrays, document)
    np.savez(folder / TENSORS, **arrays)
    document["tensors_sha256"] = hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(document))
    return folder


def test_two_sound_backends_pass_and_both_ratios_stand_in_one_row(
    recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = recorded("A", "torch_sdpa:math"), recorded("B", "torch_sdpa:flash")
    code, document = compared(capsys, a, b)
    assert (code, document["verdict"]) == (0, "pass")
    assert len(document["rows"]) == 6 * 3
    for row in document["rows"]:
        assert (row["backend_a"], row["backend_b"]) == ("torch_sdpa:math", "torch_sdpa:flash")
        assert 0 < row["a"]["r_rms"] < 20
        assert 0 < row["b"]["r_rms"] < 20
        assert row["b"]["lse_max_abs"] < 1e-3
    assert document["a"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert document["a"]["fingerprint_id"] != document["b"]["fingerprint_id"], "another policy is another environment"
    assert "torch" in document["a"]["distributions"]


def test_a_wrong_scale_fails_and_the_text_names_the_case(
    recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = recorded("A")
    create = recording.create

    def wrong(name: str, device: str) -> Any:
        backend = create(name, device)
        plan = backend.plan
        backend.plan = lambda batch, spec: plan(batch, replace(spec, scale=spec.scale * 1.05))  # type: ignore[method-assign]
        return backend

    monkeypatch.setattr(recording, "create", wrong)
    b, entries = tmp_path / "B", Recording(a).manifest.entries
    cases = list(dict.fromkeys(entry.case for entry in entries))
    record(cases, REPLAY_INPUTS, (3,), lambda case: "torch_sdpa:flash", NOBODY, b)
    capsys.readouterr()
    assert main(["compare", str(a), str(b), "--limits", str(LIMITS)]) == 1
    text = capsys.readouterr().out
    assert "bfloat16 r_rms: B " in text
    assert "fail decode-q1s40_q1s9" in text
    assert text.splitlines()[-1].startswith("fail: ")
    code, document = compared(capsys, b, a)
    assert (code, document["verdict"]) == (0, "pass"), "a champion that is off fails nobody else"


def nan_in_one_row(arrays: dict[str, Any], document: dict[str, Any]) -> None:
    index = next(i for i, entry in enumerate(document["entries"]) if entry["out_dtype"] == "float32")
    out = arrays[f"{index}.out"].view(np.float32)
    out[1, 2, 3] = np.nan
    arrays[f"{index}.out"] = out.view(np.uint8)


def lost_case(arrays: dict[str, Any], document: dict[str, Any]) -> None:
    document["entries"].pop()


def raised(arrays: dict[str, Any], document: dict[str, Any]) -> None:
    document["entries"][0]["error"] = "CUDA error: an illegal memory access"


def other_numbers(arrays: dict[str, Any], document: dict[str, Any]) -> None:
    document["entries"][0]["question"] = "0" * 64


def other_shape(arrays: dict[str, Any], document: dict[str, Any]) -> None:
    arrays["0.out"] = arrays["0.out"][:-1]


def lse_by_head(arrays: dict[str, Any], document: dict[str, Any]) -> None:
    arrays["0.lse"] = arrays["0.lse"].T.copy()


def lse_of_the_heads(arrays: dict[str, Any], document: dict[str, Any]) -> None:
    arrays["0.lse"] = arrays["0.lse"][0]


def lse_without_keys(arrays: dict[str, Any], document: dict[str, Any]) -> None:
    index = next(i for i, entry in enumerate(document["entries"]) if entry["case"]["batch"] == "q5s3")
    assert np.isneginf(arrays[f"{index}.lse"][:2]).all()
    arrays[f"{index}.lse"][0] = 7


def without_lse(arrays: dict[str, Any], document: dict[str, Any]) -> None:
    document["entries"][0]["has_lse"] = False


def without_any_lse(arrays: dict[str, Any], document: dict[str, Any]) -> None:
    for entry in document["entries"]:
        entry["has_lse"] = False


def other_backend(arrays: dict[str, Any], document: dict[str, Any]) -> None:
    document["entries"][0]["confirmed_backend"] = "torch_sdpa:math"


def unconfirmed(arrays: dict[str, Any], document: dict[str, Any]) -> None:
    for entry in document["entries"]:
        entry["confirmed_backend"] = f"unconfirmed({entry['backend']})"


@pytest.mark.parametrize(
    ("edit", "code", "named"),
    [
        (nan_in_one_row, 1, "member 1 token 0 head 2 dim 3: nan"),
        (lost_case, 3, "only A has it"),
        (raised, 3, "B: CUDA error: an illegal memory access"),
        (other_numbers, 3, "the inputs differ"),
        (other_shape, 3, "not that of the case"),
        (lse_by_head, 3, "B: LSE of shape (4, 2), not that of the case, (2, 4)"),
        (lse_of_the_heads, 3, "B: LSE of shape (4,), not that of the case, (2, 4)"),
        (lse_without_keys, 1, "lse inf > 0.005"),
        (without_lse, 3, "gave no LSE here"),
        (other_backend, 1, "torch_sdpa:math ran in place of torch_sdpa:flash"),
    ],
)
def test_what_is_broken_in_one_recording_is_no_pass(
    recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str], edit: Any, code: int, named: str
) -> None:
    a, b = recorded("A"), recorded("B")
    found, document = compared(capsys, a, change(b, edit))
    assert (found, document["verdict"]) == (code, "fail" if code == 1 else "error")
    (row,) = [row for row in document["rows"] if row["verdict"] != "pass"]
    assert named in "; ".join(row["reasons"])


def test_a_backend_that_lost_its_lse_everywhere_is_an_error_and_another_backend_need_not_give_one(
    recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    b = change(recorded("B"), without_any_lse)
    code, document = compared(capsys, recorded("A"), b)
    assert (code, document["verdict"]) == (3, "error")
    assert reasons_of(document) == {"torch_sdpa:flash gave no LSE in B, and does in A"}
    assert compared(capsys, recorded("math", "torch_sdpa:math"), b)[0] == 0


def test_a_champion_that_nobody_saw_run_is_an_error_unless_the_candidate_fails(
    recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = change(recorded("A"), unconfirmed), recorded("B")
    code, document = compared(capsys, a, b)
    assert (code, document["verdict"]) == (3, "error")
    assert reasons_of(document) == {"A: unconfirmed(torch_sdpa:flash) ran in place of torch_sdpa:flash"}
    assert compared(capsys, a, change(b, nan_in_one_row))[0] == 1


def test_no_case_is_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "AB":
        record([], ("normal",), (0,), lambda case: "torch_sdpa:math", NOBODY, tmp_path / name)
    assert compared(capsys, tmp_path / "A", tmp_path / "B")[0] == 3


def test_a_second_comparison_computes_no_truth(
    recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = recorded("A"), recorded("B")
    first = compared(capsys, a, b, "--truths", str(tmp_path / "truths"))
    monkeypatch.setattr("attention.replay.truths.compute", lambda *_: pytest.fail("computed anew"))
    assert compared(capsys, a, b, "--truths", str(tmp_path / "truths")) == first


def test_recordings_that_are_not_whole_are_one_line(
    recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a, b = recorded("A"), recorded("B")
    capsys.readouterr()
    assert "No such file" in error_of(capsys, "compare", str(a), str(tmp_path / "nowhere"))
    data = bytearray((a / TENSORS).read_bytes())
    data[len(data) // 2] ^= 1
    (a / TENSORS).write_bytes(data)
    assert "record it again" in error_of(capsys, "compare", str(a), str(b))
    lost = change(recorded("lost"), lambda arrays, document: arrays.pop("0.out"))
    assert "no output of decode-" in error_of(capsys, "compare", str(lost), str(b))
    (a / MANIFEST).write_text("{}")
    assert "was not written by `replay --cases`" in error_of(capsys, "compare", str(a), str(b))


def test_tensors_that_are_none_and_seeds_that_nobody_can_draw_are_one_line(
    recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = recorded("A"), recorded("B")
    whole, told = (b / TENSORS).read_bytes(), json.loads((b / MANIFEST).read_text())
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    capsys.readouterr()
    for raw in (b"", b"no zip", whole[:100], whole[:-30], array.getvalue()):
        (b / TENSORS).write_bytes(raw)
        (b / MANIFEST).write_text(json.dumps({**told, "tensors_sha256": hashlib.sha256(raw).hexdigest()}))
        said = error_of(capsys, "compare", str(a), str(b))
        assert "recording" in said and "tensors.npz was not written by `replay --cases`: " in said
    told["entries"][0]["seed"] = 1 << 70
    for folder in (a, b):
        (folder / MANIFEST).write_text(json.dumps(told))
    assert "entries.0.seed: " in error_of(capsys, "compare", str(a), str(b))


def test_a_recording_beside_itself_is_refused(
    recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a = recorded("A")
    (tmp_path / "link").symlink_to(a)
    capsys.readouterr()
    for other in (a, tmp_path / "link"):
        assert "A and B are one folder; name two recordings" in error_of(capsys, "compare", str(a), str(other))


def test_a_folder_is_recorded_into_by_one_process_at_a_time(tmp_path: Path) -> None:
    holds = (
        "import sys, time; from pathlib import Path; from attention.held import held\n"
        "with held(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(600)"
    )
    nothing: Any = ([], ("normal",), (0,), lambda case: "torch_sdpa:math", NOBODY, tmp_path)
    with subprocess.Popen([sys.executable, "-c", holds, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout and other.stdout.readline() == "held\n"
            with pytest.raises(UserError, match=r"--out .*: another process writes there; wait for it"):
                record(*nothing)
            assert not (tmp_path / MANIFEST).exists()
        finally:
            other.kill()
    record(*nothing)
    assert Recording(tmp_path).manifest.entries == ()


def test_flags_that_do_not_fit_are_one_line(
    setup: Setup, cases: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    replay = ["replay", *flags(setup), "--cases", str(cases)]
    assert "needs --out DIR" in error_of(capsys, *replay)
    assert "activations need" in error_of(capsys, *replay, "--out", str(tmp_path), "--inputs", "normal,activations")
    for other in ("--job", "--prompts"):
        assert "one of --cases FILE, --prompts FILE and --job" in error_of(capsys, *replay, other, "x.json")
    assert "below 2**63" in error_of(capsys, *replay, "--out", str(tmp_path), "--seeds", str(1 << 64))
    assert "File exists" in error_of(capsys, *replay, "--out", str(cases))
    assert "--inputs ''" in error_of(capsys, *replay, "--out", str(tmp_path), "--inputs", "")
    assert "two recordings, A and B" in error_of(capsys, "compare", str(tmp_path))


def test_limits_are_those_of_the_gate(tmp_path: Path) -> None:
    limits = judge.load_limits(LIMITS)
    assert limits["r_rms"] == load_limits("replay", "full").value("r_rms")
    assert limits["r_rms.float32"] > limits["r_rms"]
    (tmp_path / "less.yaml").write_text("default: {replay: {r_rms: {value: 1}}}\n")
    with pytest.raises(UserError, match=r"lacks lse, pooled_times_champion, r_max, r_row, times_champion"):
        judge.load_limits(tmp_path / "less.yaml")
    with pytest.raises(UserError, match="no thresholds of a replay gate"):
        judge.load_limits(Path(__file__).parents[2] / "data/plans/demo.yaml")


@pytest.mark.parametrize(("share", "fails"), [(0.99, False), (1.01, True)])
def test_rounding_that_is_worse_everywhere_fails_where_no_case_does(share: float, fails: bool) -> None:
    limits = judge.load_limits(LIMITS)
    theirs = 0.6
    mine = share * limits["pooled_times_champion"] * theirs
    assert mine < min(limits["times_champion"], limits["r_rms"])
    row = judge.Judged("c", "normal", 0, "bfloat16", "a", "b", "pass", (), {"r_rms": theirs}, {"r_rms": mine})
    found = judge._pooled("bfloat16", [row, row], limits)
    assert (found is not None) is fails
    if found is not None:
        assert found.verdict == "fail" and found.reasons[0].startswith("pooled_times_champion ")
