"""Cells as data: products of axes, checks by condition, and one line for what a file gets wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention.cells import Cells, load_cells
from attention.errors import UserError

HOPPER = Path(__file__).parents[2] / "attention/cells/hopper.yaml"
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
        ("checks:", "cheks:", "groups.0.cheks: Extra inputs"),
        ("groups:", "groups: [", "neither YAML nor JSON"),
    ],
)
def test_a_mistake_in_a_cell_file_is_one_line(tmp_path: Path, old: str, new: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        load_cells(written(tmp_path, TEXT.replace(old, new)))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


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
