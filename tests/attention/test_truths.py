"""Truths that are computed once: a second run computes none, and no file is believed that is not what was written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention.backends.oracle import Truth
from attention.cases import AttentionCase
from attention.job import Setup, TensorPlan
from attention.model import specs_of
from attention.replay import tensor, truths
from attention.replay.problems import make, members_of, spec_of
from attention.replay.truths import Truths, compute, key_of

CASE = AttentionCase(
    phase="extend", batch="q3s20_q1s9", heads_q=4, heads_kv=2, head_dim_qk=16, head_dim_vo=16, dtype="bfloat16"
)
SPEC = spec_of(CASE)
MEMBERS = members_of(CASE, SPEC, "normal", 3)
PLAN = TensorPlan(seeds=(0, 1), max_kv_len=63)


def equal(one: Truth, other: Truth) -> bool:
    return all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


def replayed(setup: Setup, folder: Path, backend: str, *, backwards: bool = False) -> tuple[Truths, list[Any]]:
    oracle = Truths(folder)
    resolved = dict.fromkeys(("prefill", "decode", "extend"), backend)
    sources = tensor.Sources(oracle=oracle, backwards=backwards)
    specs = specs_of(setup.model, "float32")
    return oracle, list(tensor.rows(setup, PLAN, specs, ("float32", "bfloat16"), resolved, 1.0, sources=sources))


def test_the_other_side_of_a_release_computes_no_truth_and_a_second_run_neither(setup: Setup, tmp_path: Path) -> None:
    champion, first = replayed(setup, tmp_path, "torch_sdpa:math")
    candidate, _ = replayed(setup, tmp_path, "torch_sdpa:flash", backwards=True)
    again, second = replayed(setup, tmp_path, "torch_sdpa:math")
    num = len(first)
    assert (champion.num_computed, candidate.num_computed, again.num_computed) == (num, 0, 0)
    assert (candidate.num_read, again.num_read) == (num, num)
    without_time = [[{k: v for k, v in row.items() if k != "time"} for row in rows] for rows in (first, second)]
    assert without_time[0] == without_time[1]
    assert not any("error" in row for row in first)


def test_two_sides_that_meet_in_the_middle_share_the_work(setup: Setup, tmp_path: Path) -> None:
    forward, backward = (
        replayed(setup, tmp_path / name, "torch_sdpa:math", backwards=b)[1] for name, b in (("a", False), ("b", True))
    )
    assert [row["case_id"] for row in forward] == [row["case_id"] for row in reversed(backward)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_read_is_what_was_computed_to_the_bit(tmp_path: Path, dtype: str) -> None:
    case = CASE.model_copy(update={"dtype": dtype})
    made = [make(case, "large_logit", 5, oracle=Truths(tmp_path)).truth for _ in range(2)]
    assert equal(*made)
    assert equal(made[1], make(case, "large_logit", 5).truth)
    assert len(list(tmp_path.iterdir())) == 1


def test_layout_and_pages_share_a_truth(tmp_path: Path) -> None:
    oracle = Truths(tmp_path)
    ragged = CASE.model_copy(update={"layout": "ragged", "page_size": None})
    contiguous = CASE.model_copy(update={"layout": "contiguous", "page_size": None})
    for case in (ragged, contiguous):
        make(case, "normal", 0, oracle=oracle)
    assert (oracle.num_computed, oracle.num_read) == (1, 1)


@pytest.mark.parametrize(
    "other",
    [
        lambda: (MEMBERS, replace(SPEC, scale=SPEC.scale * 1.01)),
        lambda: (MEMBERS, replace(SPEC, window=(3, 0))),
        lambda: (members_of(CASE, SPEC, "normal", 4), SPEC),
        lambda: (members_of(CASE, SPEC, "needle", 3), SPEC),
        lambda: (MEMBERS[::-1], SPEC),
        lambda: ([replace(MEMBERS[0], mask_QL=torch.ones(3, 20, dtype=torch.bool)), MEMBERS[1]], SPEC),
        lambda: ([replace(MEMBERS[0], k_LGD=MEMBERS[0].v_LGD, v_LGD=MEMBERS[0].k_LGD), MEMBERS[1]], SPEC),
    ],
    ids=["scale", "window", "seed", "inputs", "order", "mask", "k and v swapped"],
)
def test_another_question_has_another_key(other: Callable[[], Any]) -> None:
    assert key_of(*other()) != key_of(MEMBERS, SPEC)


def test_the_key_is_of_the_numbers_not_of_how_they_lie_in_memory() -> None:
    strided = [replace(m, k_LGD=m.k_LGD.transpose(0, 1).contiguous().transpose(0, 1)) for m in MEMBERS]
    assert not strided[0].k_LGD.is_contiguous()
    assert key_of(strided, SPEC) == key_of(MEMBERS, SPEC)


def test_another_oracle_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(MEMBERS, SPEC)
    monkeypatch.setattr(truths, "oracle_version", lambda: "another")
    assert key_of(MEMBERS, SPEC) != before


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def _edit(path: Path) -> None:
    """A whole file with another number and the old seal."""
    numbers = np.fromfile(path, dtype=np.float64, offset=truths._NUM_SEAL, count=1)
    with path.open("r+b") as file:
        file.seek(truths._NUM_SEAL)
        file.write((numbers + 1e-3).tobytes())


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(8))


def _forge_the_seal(path: Path) -> None:
    path.write_bytes(bytes(truths._NUM_SEAL) + path.read_bytes()[truths._NUM_SEAL :])


def _exchange_two_numbers(path: Path) -> None:
    data = bytearray(path.read_bytes())
    first, second = (slice(start, start + 8) for start in (truths._NUM_SEAL, truths._NUM_SEAL + 8))
    data[first], data[second] = data[second], data[first]
    path.write_bytes(data)


def _of_another_seed(path: Path) -> None:
    """A true file of ours under another's name."""
    folder = path.parent / "elsewhere"
    Truths(folder)(members_of(CASE, SPEC, "normal", 4), SPEC, "cpu")
    (other,) = folder.glob("*.truth")
    shutil.copy(other, path)


@pytest.mark.parametrize(
    "spoil",
    [
        _cut,
        _lengthen,
        _flip_a_bit,
        _edit,
        _exchange_two_numbers,
        _forge_the_seal,
        _of_another_seed,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("x"),
    ],
    ids=["cut off", "longer", "a bit flipped", "edited", "exchanged", "no seal", "foreign", "empty", "text"],
)
def test_a_file_that_is_not_what_was_written_is_computed_anew_and_replaced(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    exact = compute(MEMBERS, SPEC, "cpu")
    Truths(tmp_path)(MEMBERS, SPEC, "cpu")
    (path,) = tmp_path.glob("*.truth")
    spoil(path)
    second, third = Truths(tmp_path), Truths(tmp_path)
    assert equal(second(MEMBERS, SPEC, "cpu"), exact)
    assert (second.num_computed, second.num_read) == (1, 0)
    assert equal(third(MEMBERS, SPEC, "cpu"), exact)
    assert (third.num_computed, third.num_read) == (0, 1)


def test_a_file_of_another_size_is_never_read_into_memory(tmp_path: Path) -> None:
    Truths(tmp_path)(MEMBERS, SPEC, "cpu")
    (path,) = tmp_path.glob("*.truth")
    os.truncate(path, 1 << 40)  # a terabyte of zeros that takes no place
    second = Truths(tmp_path)
    second(MEMBERS, SPEC, "cpu")
    assert (second.num_computed, second.num_read) == (1, 0)


def test_a_truth_without_a_query_is_kept_too(tmp_path: Path) -> None:
    nobody = [replace(MEMBERS[0], q_QHD=MEMBERS[0].q_QHD[:0])]
    first, second = (Truths(tmp_path)(nobody, SPEC, "cpu") for _ in range(2))
    assert equal(first, second)
    assert second.out_QHD.shape == (0, 4, 16)


def test_threads_that_share_a_folder_all_get_the_truth_and_leave_one_file(tmp_path: Path) -> None:
    exact = compute(MEMBERS, SPEC, "cpu")
    oracle = Truths(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: oracle(MEMBERS, SPEC, "cpu"), range(32)))
    assert all(equal(one, exact) for one in found)
    assert oracle.num_computed + oracle.num_read == 32
    assert [path.suffix for path in tmp_path.iterdir()] == [".truth"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_and_a_cpu_share_truths_whichever_wrote_them(tmp_path: Path) -> None:
    there = [replace(m, **{name: t.cuda() for name, t in vars(m).items() if t is not None}) for m in MEMBERS]
    assert key_of(there, SPEC) == key_of(MEMBERS, SPEC)
    on_gpu = Truths(tmp_path / "gpu")(there, SPEC, "cuda")
    assert on_gpu.out_QHD.is_cuda
    reader = Truths(tmp_path / "gpu")
    with ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda _: reader(there, SPEC, "cuda"), range(64)))
    assert all(equal(one, on_gpu) for one in again)
    assert equal(reader(MEMBERS, SPEC, "cpu"), Truth(*(t.cpu() for t in vars(on_gpu).values())))
    assert (reader.num_computed, reader.num_read) == (0, 65)
    on_cpu = Truths(tmp_path / "cpu")(MEMBERS, SPEC, "cpu")
    from_cpu = Truths(tmp_path / "cpu")
    assert equal(Truth(*(t.cpu() for t in vars(from_cpu(there, SPEC, "cuda")).values())), on_cpu)
    assert from_cpu.num_computed == 0
