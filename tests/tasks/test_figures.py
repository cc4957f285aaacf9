from __future__ import annotations

import struct
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from attention.schemas import write_rows
from data.lake import Lake
from tasks import figures
from tasks.figures import DRAWERS
from tasks.story import STAGES
from tests.tasks.sample_lake import SECRET, SECRET_TOKEN, fill


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures") / "lake"
    fill(folder, "r1")
    return folder


@pytest.fixture(scope="module")
def drawn(lake: Path) -> dict[str, Figure]:
    return {stage: figures.draw(stage, lake, "r1") for stage in DRAWERS}


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)]


def labels(figure: Figure) -> str:
    return " / ".join(f"{ax.get_xlabel()} / {ax.get_ylabel()}" for ax in figure.axes)


def test_every_stage_has_a_figure() -> None:
    assert tuple(DRAWERS) == STAGES


def test_a_saved_figure_is_900_pixels_wide(lake: Path, tmp_path: Path) -> None:
    path = figures.save("shadow", lake, "r1", tmp_path / "new")
    assert path == tmp_path / "new" / "shadow.png"
    assert struct.unpack(">I", path.read_bytes()[16:20])[0] == 900


def test_every_measured_axis_has_a_label_with_its_unit(drawn: dict[str, Figure]) -> None:
    for stage in ("replay", "baseline", "shadow", "canary", "expand"):
        assert all(ax.get_xlabel() for ax in drawn[stage].axes), stage
    assert "nats" in labels(drawn["replay"])
    assert "ms" in labels(drawn["shadow"])
    assert "TTFT, ms" in labels(drawn["canary"])
    assert "seconds" in labels(drawn["canary"])


def test_limits_of_the_gate_stand_in_the_figure(drawn: dict[str, Figure]) -> None:
    assert "r_rms <= 2" in texts(drawn["replay"])
    assert "kl_p999 <= 0.06" in texts(drawn["replay"])
    assert "limit of the mean 1.3" in texts(drawn["baseline"])


def test_the_fingerprint_figure_shows_only_what_differs(drawn: dict[str, Figure]) -> None:
    found = texts(drawn["fingerprint"])
    assert {"kernel", "math", "flash", "torch.version"} <= set(found)
    assert "platform" not in found


def test_a_probe_that_failed_says_so_in_words(drawn: dict[str, Figure]) -> None:
    assert "FAIL\n3/3" in texts(drawn["probe"])
    assert "?\n3/3" in texts(drawn["probe"])


def test_prefill_and_decode_stand_apart_on_one_scale(drawn: dict[str, Figure]) -> None:
    prefill, decode = drawn["baseline"].axes
    assert prefill.get_xlabel().startswith("prefill")
    assert decode.get_xlabel().startswith("decode")
    assert prefill.get_xlim() == decode.get_xlim()


def test_shadows_are_paired_with_requests_that_the_champion_served(drawn: dict[str, Figure]) -> None:
    assert "Shadow: 100 requests answered by both" in texts(drawn["shadow"])


def test_no_text_or_token_of_a_user_is_drawn(drawn: dict[str, Figure]) -> None:
    for stage, figure in drawn.items():
        everything = "\n".join(texts(figure))
        assert SECRET not in everything, stage
        assert str(SECRET_TOKEN) not in everything, stage


@pytest.mark.parametrize("stage", STAGES)
def test_missing_evidence_is_said_and_not_an_empty_picture(stage: str, tmp_path: Path) -> None:
    (said,) = [text for text in texts(figures.draw(stage, tmp_path / "lake", "r1")) if "no evidence" in text]
    assert said.startswith(f"{stage}: no evidence in ")


def test_rows_without_figures_are_drawn_as_such(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    side = {"side": "candidate"}
    rows = {
        "tensor_replay": {"case_id": "decode-q1", "inputs": "normal", "error": "crashed"},
        "perf_cells": {"family": "decode", "metric": "kernel_s", "shape_bucket": "decode/kv<=64"},
        "canary_windows": {"stage": "canary", "share": 20, "window": 0},
    }
    for table, row in rows.items():
        write_rows(lake, table, [side | row], release_id="r1")
    for stage in ("replay", "baseline", "canary"):
        assert figures.save(stage, lake, "r1", tmp_path / "out") is not None
    assert " no figure" in texts(figures.draw("baseline", lake, "r1"))


def test_a_figure_that_cannot_be_drawn_is_an_event_and_no_error(tmp_path: Path) -> None:
    lake, blocked = tmp_path / "lake", tmp_path / "file"
    blocked.write_text("in the way")
    assert figures.save("probe", lake, "r1", blocked) is None
    with Lake(lake) as opened:
        [(kind, subject, message)] = opened.rows("select kind, subject, message from events")
    assert (kind, subject) == ("figure_failed", "probe")
    assert "file" in message
