"""`python -m flows baseline`: every backend of a matrix on a mix, a choice, and a proposal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from attention.errors import UserError
from attention.policy import load_policy
from data.baseline_matrix import MatrixCell, load_matrix
from data.lake import Lake
from data.mix import load_mix
from flows import baseline
from flows.__main__ import main
from flows.baseline import Asked, Baseline
from flows.tables import console_of_width
from gates.selection import Measured, layout_of
from tasks import survey

MATRIX = """\
gpus: [cpu]
backends: [torch_sdpa:flash, torch_sdpa:math, flash_attn:fa2]
dtypes: [float32]
kv_dtypes: [auto]
heads: [{q: 4, kv: 2, dim_qk: 16, dim_vo: 16}]
families:
  prefill: {layouts: [{layout: paged_nhd, page_size: 16}], executions: [eager]}
  decode: {layouts: [{layout: paged_nhd, page_size: 16}], executions: [eager]}
  extend: {layouts: [{layout: paged_nhd, page_size: 16}], executions: [eager]}
decode_batches: {reason: a test, shares: {2: 1.0}, max_tokens: 4096}
min_weight: 0.01
max_kv_len: 256
cells_per_family: 1
"""
MIX = "# source: made up\n# note: one class\nprompt_tokens,cached_tokens,output_tokens,requests\n"
MIX += "200,0,8,1\n120,64,8,1\n"


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Baseline, Path]:
    folder = tmp_path_factory.mktemp("survey")
    (folder / "small.yaml").write_text(MATRIX)
    (folder / "ours.csv").write_text(MIX)
    asked = Asked(
        matrix=str(folder / "small.yaml"),
        mix=str(folder / "ours.csv"),
        blocks=4,
        propose=folder / "proposed.yaml",
        out=folder / "out",
    )
    return baseline.run(asked, say=lambda line: None), folder


def test_every_family_and_backend_has_a_row_and_what_is_refused_says_why(surveyed: tuple[Baseline, Path]) -> None:
    found, _ = surveyed
    assert (found.device, found.num_left_out, found.exit_code) == ("cpu", 0, 0)
    assert set(found.covered) == {"prefill", "decode", "extend"}
    assert all(0 < share <= 1 for share in found.covered.values())
    rows = {(row["family"], row["backend"]): row for row in found.cells}
    assert len(rows) == 3 * 3
    for family in ("prefill", "decode", "extend"):
        for backend in ("torch_sdpa:flash", "torch_sdpa:math"):
            row = rows[family, backend]
            assert (row["outcome"], row["confirmed_backend"]) == ("measured", backend)
            assert 0 < row["limit_ratio"] < 1
            assert row["p50_s"] <= row["p95_s"] <= row["p99_s"]
        refused = rows[family, "flash_attn:fa2"]
        assert (refused["outcome"], "ARCH_UNSUPPORTED" in refused["error"]) == ("refused", True)


def test_the_lake_holds_every_call_and_the_ceilings(surveyed: tuple[Baseline, Path]) -> None:
    found, folder = surveyed
    with Lake(folder / "out" / "lake", release_id=found.release_id) as lake:
        [(calls, kinds)] = lake.rows(
            "select count(*), count(distinct (backend, family, block)) from perf_samples where metric = 'kernel_s'"
        )
        [(ceilings,)] = lake.rows("select count(distinct (kind, case_id, block)) from perf_ceilings")
    assert kinds == 2 * 3 * 4
    assert calls >= kinds * 2
    assert ceilings == 2 * 3 * 4


def test_the_selection_is_told_and_proposed(surveyed: tuple[Baseline, Path]) -> None:
    found, folder = surveyed
    [service] = found.selection.services
    assert service.families == ("prefill", "decode", "extend")
    assert found.sentence.startswith("over ours ")
    policy = load_policy(folder / "proposed.yaml")
    assert set(policy.preferred) == {"torch_sdpa:flash", "torch_sdpa:math"}
    assert found.release_id in (folder / "proposed.yaml").read_text()
    console = console_of_width()
    with console.capture() as shown:
        console.print(baseline.render(found))
    assert found.sentence in " ".join(shown.get().split())
    document: dict[str, Any] = json.loads(found.model_dump_json())
    assert len(document["cells"]) == 9
    assert all(math.isfinite(cell["p50_s"]) for cell in document["cells"] if cell.get("p50_s") is not None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"matrix": "cpuu"}, "cpu"),
        ({"mix": "chatt"}, "chat"),
        ({"gpu": "nvidia-h200"}, "--gpu nvidia-h200: matrix cpu is for cpu"),
        ({"mix": "own"}, "--traffic"),
        ({"traffic": Path("x.jsonl")}, "--mix own"),
        ({"backends": "torch_spda"}, "torch_sdpa"),
        ({"propose": Path("data/policies/document.yaml")}, "name another file"),
        ({"propose": Path("/proc/nowhere.yaml")}, "name another file"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        baseline.run(Asked(**{"matrix": "cpu", "mix": "chat", **given}), say=lambda line: None)


def test_a_bucket_is_chosen_for_by_all_of_its_batches_or_not_at_all() -> None:
    wanted = survey.cells(load_matrix("cpu"), load_mix("chat"))
    decode = [one for one in wanted if one.bucket == wanted[-1].bucket]
    assert len(decode) == 2, "two batches of one bucket"

    def row(one: MatrixCell) -> Measured:
        bucket, case = one.bucket, one.case
        named = (case.case_id, bucket.shape_bucket, layout_of(case))
        return Measured("torch_sdpa:flash", bucket.family, *named, bucket.weight, one.calls, (1.0,) * 6)

    assert survey.complete(wanted, [row(one) for one in decode]) == [row(one) for one in decode]
    assert survey.complete(wanted, [row(decode[0])]) == []


def test_a_backend_that_lost_cells_is_named_beside_the_choice() -> None:
    rows = [{"backend": "a", "outcome": outcome} for outcome in ("measured", "refused", "crashed", "out_of_memory")]
    assert baseline._lost_note(rows) == "; a lost 2 of its cells"


def test_the_command_ends_with_2_for_bad_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["flows", "baseline", "--mix", "chatt"])
    assert main() == 2
    assert capsys.readouterr().err.startswith("error: ")
