"""Cells as data: products of axes, checks by condition, and one line for what a file gets wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention.cells import Cells, load_cells
from attention.errors import UserError
from attention.matrix import declared_reasons

HOPPER = Path(__file__).parents[2] / "attention/cells/hopper.yaml"
CPU = HOPPER.with_name("cpu.yaml")
TEXT = """
groups:
  - base: {heads_q: 4, heads_kv: 2, head_dim_qk: 16, head_dim_vo: 16, dtype: float32}
    axes:
      - [{phase: decode, batch: q1s64}, {phase: prefill, batch: q40}]
      - [{execution: eager}, {execution: cuda_graph}]
    checks:
      - {when: {execution: [eager]}, run: [numeric, lse]}
      - {when: {execution: [cuda_graph], phase: [decode]}, run: [graph_replay]}
      - {when: {phase: [decode]}, run: [lse]}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "cells.yaml"
    path.write_text(text)
    return path


def test_a_group_is_the_product_of_its_axes_with_the_checks_that_apply(tmp_path: Path) -> None:
    found = [(p.name, p.case.phase, p.case.execution) for p in load_cells(written(tmp_path, TEXT))]
    assert found == [
        ("cell", "decode", "eager"),
        ("numeric", "decode", "eager"),
        ("lse", "decode", "eager"),
        ("cell", "decode", "cuda_graph"),
        ("graph_replay", "decode", "cuda_graph"),
        ("lse", "decode", "cuda_graph"),
        ("cell", "prefill", "eager"),
        ("numeric", "prefill", "eager"),
        ("lse", "prefill", "eager"),
        ("cell", "prefill", "cuda_graph"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("numeric, lse", "numerics", "check 'numerics' is unknown; did you mean numeric"),
        ("phase: [decode]}, run: [lse]", "fase: [decode]}, run: [lse]", "field 'fase' is unknown; did you mean phase"),
        ("heads_kv: 2", "heads_kv: 3", "heads_q=4 is no multiple of heads_kv=3"),
        ("checks:", "cheks:", "groups.0.cheks: unknown key; did you mean checks"),
        ("heads_q: 4", "head_q: 4", "groups.0: head_q: unknown key; did you mean heads_q"),
        ("groups:", "'': 1\ngroups:", "cells.yaml: '': unknown key; known: "),
        ("dtype: float32", "dtype: float32, softcap: .nan", "groups.0: softcap: Input should be a finite number"),
        ("q40", f"q{'9' * 5000}", "is not `[count]q<len>[k][s<kv len>[k]]`"),
        ("heads_kv: 2", "heads_kv: 2, heads_kv: 2", "the key 'heads_kv' stands twice"),
        ("{phase: decode, batch: q1s64}, {phase: prefill, batch: q40}", "", "groups.0.axes: an axis is empty"),
        ("groups:", "groups: [", "not YAML"),
    ],
)
def test_a_mistake_in_a_cell_file_is_one_line(tmp_path: Path, old: str, new: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        load_cells(written(tmp_path, TEXT.replace(old, new)))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("c.yaml", b"groups: []", "groups: there is none, so no case to probe"),
        ("c.yaml", b"", "c.yaml: Input should be"),
        ("c.yaml", b"\xff\xfe\x00\x81", "not YAML"),
        ("c.yaml", b"groups: 2024-99-99", "not YAML"),
        ("c.json", b'{"groups": []}', "groups: there is none, so no case to probe"),
        ("c.json", b"[" * 100_000, "not JSON that can be used: nested too deeply"),
        ("c.json", b"9" * 5000, "not JSON: "),
        ("no\0where.json", None, "not JSON: "),
    ],
)
def test_a_file_without_a_case_or_of_something_else_is_one_line(
    tmp_path: Path, name: str, content: bytes | None, text: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_cells(tmp_path / name)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_the_hopper_cells_cover_what_a_hopper_serves() -> None:
    probes = load_cells(HOPPER)
    cases = {p.case for p in probes}
    assert {c.kv_dtype for c in cases} == {"auto", "float8_e4m3fn"}
    assert {c.head_dim_qk for c in cases} == {64, 128, 256}
    assert {(c.phase, c.execution) for c in cases} >= {
        (p, e) for p in ("decode", "prefill", "extend") for e in ("eager", "cuda_graph")
    }
    assert {c.layout for c in cases} == {"paged_nhd", "paged_hnd", "ragged", "contiguous"}
    assert not any(p.required for p in probes)
    assert Cells.model_validate({"groups": []}).probes() == []


def test_the_cpu_cells_run_on_both_kernels_of_a_cpu_and_none_is_refused() -> None:
    cases = {p.case for p in load_cells(CPU)}
    assert {c.dtype for c in cases} == {"float32", "bfloat16"}
    assert {c.phase for c in cases} == {"decode", "prefill", "extend"}
    assert {c.layout for c in cases} == {"paged_nhd", "paged_hnd", "ragged", "contiguous"}
    assert {"sliding_window", "alibi", "custom_mask"} <= {feature for c in cases for feature in c.features}
    for name in ("torch_sdpa:flash", "torch_sdpa:math"):
        assert not any(declared_reasons(name, case, device="cpu") for case in cases)
