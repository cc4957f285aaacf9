"""The baseline matrix: cells that the mix weights, calls that add up to its work, and files that are wrong."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from attention.backends import NAMES
from attention.errors import UserError
from data.baseline_matrix import FOLDER, BaselineMatrix, DecodeBatches, cells, covered, kept, load_matrix
from data.mix import load_mix, mix_of
from data.requests import RequestLength

MATRICES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
MIXES = ("chat", "code", "long-context", "reasoning")


def changed(folder: Path, **values: Any) -> str:
    content = yaml.safe_load((FOLDER / "cpu.yaml").read_text())
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content | values))
    return str(path)


@pytest.fixture
def hopper() -> BaselineMatrix:
    return load_matrix("hopper")


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", MATRICES)
def test_every_matrix_has_cells_for_every_mix_each_a_case_of_its_own(name: str, mix: str) -> None:
    found = cells(load_matrix(name), load_mix(mix))
    assert len({cell.case.case_id for cell in found}) == len(found)
    for cell in found:
        assert (cell.case.phase, cell.case.shape_bucket) == (cell.bucket.family, cell.bucket.shape_bucket)
        assert cell.calls > 0


@pytest.mark.parametrize("mix", MIXES)
def test_the_cut_of_hopper_leaves_most_of_the_work(hopper: BaselineMatrix, mix: str) -> None:
    shares = covered(cells(hopper, load_mix(mix)))
    assert min(shares.values()) > 0.88


def test_families_have_layouts_and_executions_of_their_own(hopper: BaselineMatrix) -> None:
    found = defaultdict(set)
    for cell in cells(hopper, load_mix("long-context")):
        found[cell.case.phase].add((cell.case.layout, cell.case.page_size, cell.case.execution))
    assert found == {
        "prefill": {("paged_nhd", 16, "eager"), ("ragged", None, "eager")},
        "extend": {("paged_nhd", 16, "eager"), ("contiguous", None, "eager")},
        "decode": {
            ("paged_nhd", 16, "eager"),
            ("paged_nhd", 16, "cuda_graph"),
            ("contiguous", None, "eager"),
            ("contiguous", None, "cuda_graph"),
        },
    }


@pytest.mark.parametrize("mix", MIXES)
def test_the_calls_of_one_layout_add_up_to_the_work_of_their_bucket(hopper: BaselineMatrix, mix: str) -> None:
    work: dict[Any, float] = defaultdict(float)
    for cell in cells(hopper, load_mix(mix)):
        done = len(cell.case.members) if cell.bucket.family == "decode" else cell.case.num_pairs()
        work[cell.bucket, cell.case.layout, cell.case.execution] += cell.calls * done
    assert work
    for (bucket, _, _), done in work.items():
        assert done == pytest.approx(bucket.units)


def test_an_extend_has_fewer_queries_than_keys_and_a_prefill_as_many(hopper: BaselineMatrix) -> None:
    found = cells(hopper, load_mix("long-context"))
    for cell in found:
        [member, *_] = cell.case.members
        assert member.q_len == {"prefill": member.kv_len, "decode": 1, "extend": cell.bucket.q_len}[cell.case.phase]
    assert {str(c.case.batch) for c in found if c.case.phase == "extend"} >= {"q64ks128k", "q4ks8k"}


def test_light_long_and_superfluous_buckets_fall_out() -> None:
    # Prefill work: 64 to 1024 tokens, the longer the heavier; 4096 is past the longest.
    lengths = [RequestLength(str(n), n, 1, count=count) for n, count in ((4096, 1), (1024, 4), (512, 4), (256, 4))]
    lengths += [RequestLength("light", 16, 1)]
    cpu = load_matrix("cpu").model_copy(update={"min_weight": 0.005, "cells_per_family": 2})
    buckets = mix_of("ours", lengths).buckets()
    assert [b.kv_len for b in kept(cpu, buckets)] == [1024, 512]
    assert [b.kv_len for b in kept(cpu.model_copy(update={"cells_per_family": 9}), buckets)] == [1024, 512, 256]
    assert [b.kv_len for b in kept(cpu.model_copy(update={"min_weight": 0.1}), buckets)] == [1024]


def test_a_decode_batch_is_cut_to_what_the_cache_holds_and_keeps_its_share() -> None:
    batches = DecodeBatches(reason="r", shares={1: 0.2, 8: 0.3, 64: 0.5}, max_tokens=8192)
    assert batches.at(128) == {1: 0.2, 8: 0.3, 64: 0.5}
    assert batches.at(512) == {1: 0.2, 8: 0.3, 16: 0.5}
    assert batches.at(1024) == {1: 0.2, 8: 0.8}
    assert batches.at(16384) == {1: 1.0}


def test_a_mix_of_which_nothing_is_left_says_what_to_change() -> None:
    long = mix_of("long", [RequestLength("a", 9000, 1)])
    with pytest.raises(UserError, match=r"mix long: no bucket has .* at most 1024 keys; lower min_weight"):
        cells(load_matrix("cpu"), long)


def test_a_family_of_backends_stands_for_its_kernels(tmp_path: Path) -> None:
    matrix = load_matrix(changed(tmp_path, backends=["torch_sdpa:math", "pytorch_sdpa", "flashattention"]))
    kernels = tuple(name for name in NAMES if name.startswith(("torch_sdpa", "flash_attn:")))
    assert matrix.contenders()[0] == "torch_sdpa:math"
    assert sorted(matrix.contenders()) == sorted(kernels)


def test_a_matrix_is_for_its_gpus_or_for_any(tmp_path: Path, hopper: BaselineMatrix) -> None:
    assert hopper.covers("nvidia-h200")
    assert not hopper.covers("cpu")
    assert load_matrix(changed(tmp_path, gpus=["any"])).covers("nvidia-b200")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"backend": ["torch_sdpa"]}, "backend: unknown key; did you mean backends"),
        ({"backends": ["torch_sdpa:fast"]}, "backends: unknown backend 'torch_sdpa:fast'"),
        ({"backends": []}, "backends"),
        ({"kv_dtypes": ["fp9"]}, "kv_dtypes: .*fp9"),
        ({"heads": [{"q": 9, "kv": 4, "dim_qk": 64, "dim_vo": 64}]}, "heads.0: q=9 is no multiple of kv=4"),
        ({"min_weight": 2}, "min_weight"),
        ({"max_kv_len": 8}, "max_kv_len"),
        ({"decode_batches": {"reason": "r", "shares": {1: 0.5}, "max_tokens": 64}}, "the shares sum to 0.5, not to 1"),
        ({"decode_batches": {"reason": "", "shares": {1: 1.0}, "max_tokens": 64}}, "decode_batches.reason"),
        ({"decode_batches": {"reason": "r", "shares": {0: 1.0}, "max_tokens": 64}}, "decode_batches.shares.0"),
        ({"families": {}}, "families.prefill: this key is missing"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, values: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=f"mine.yaml: .*{told}") as raised:
        load_matrix(changed(tmp_path, **values))
    assert "\n" not in str(raised.value)


def test_pages_and_layouts_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    axes = {"layouts": [{"layout": "ragged", "page_size": 16}], "executions": ["eager"]}
    with pytest.raises(UserError, match=r"families.prefill.layouts.0: layout=ragged and page_size=16"):
        load_matrix(changed(tmp_path, families=dict.fromkeys(("prefill", "decode", "extend"), axes)))


def test_an_unknown_name_says_the_nearest() -> None:
    with pytest.raises(UserError, match=r"baseline matrix 'hoper': .*did you mean hopper"):
        load_matrix("hoper")
