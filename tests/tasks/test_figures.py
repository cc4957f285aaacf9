from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from attention.schemas import write_rows
from data.lake import Lake
from tasks import figures
from tasks.figures import PICTURES
from tasks.figures.canvas import Picture, apart
from tasks.story import STAGES
from tests.tasks.sample_baseline import backend_row, case, fill_survey, lost
from tests.tasks.sample_lake import SECRET, SECRET_TOKEN, fill


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures") / "lake"
    fill(folder, "r1")
    return folder


@pytest.fixture(scope="module")
def drawn(lake: Path) -> dict[str, Figure]:
    return draw_all(lake, "r1")


@pytest.fixture(scope="module")
def survey(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figure]:
    """The pictures of a survey: three backends that run, and one whose figures no machine reaches."""
    lake = tmp_path_factory.mktemp("survey") / "lake"
    fill_survey(lake, "baseline-1")
    return draw_all(lake, "baseline-1", "baseline")


def draw_all(lake: Path, release_id: str, *stages: str) -> dict[str, Figure]:
    wanted = [picture for stage in stages or STAGES for picture in PICTURES[stage]]
    found = {picture.name: figures.draw(picture, lake, release_id) for picture in wanted}
    return {name: figure for name, figure in found.items() if figure is not None}


def main(stage: str) -> Picture:
    return PICTURES[stage][0]


def draw_main(stage: str, lake: Path) -> Figure:
    figure = figures.draw(main(stage), lake, "r1")
    assert figure is not None
    return figure


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)]


def labels(figure: Figure) -> str:
    return " / ".join(f"{ax.get_xlabel()} / {ax.get_ylabel()}" for ax in figure.axes)


def test_every_stage_has_a_main_picture_of_its_own_name() -> None:
    assert set(PICTURES) == set(STAGES)
    assert all(main(stage).name == stage for stage in STAGES)
    names = [picture.name for pictures in PICTURES.values() for picture in pictures]
    assert len(set(names)) == len(names)


def test_a_saved_figure_is_900_pixels_wide(lake: Path, tmp_path: Path) -> None:
    [path] = figures.save("shadow", lake, "r1", tmp_path / "new")
    assert path == tmp_path / "new" / "shadow.png"
    assert struct.unpack(">I", path.read_bytes()[16:20])[0] == 900


def test_every_measured_axis_has_a_label_with_its_unit(drawn: dict[str, Figure]) -> None:
    for name in ("replay", "baseline", "baseline-latency", "baseline-roofline", "shadow", "canary", "expand"):
        assert all(ax.get_xlabel() for ax in drawn[name].axes), name
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


def test_prefill_decode_and_extend_stand_apart_on_one_scale(drawn: dict[str, Figure]) -> None:
    axes = drawn["baseline"].axes
    assert [ax.get_xlabel().partition(":")[0] for ax in axes] == ["prefill", "decode", "extend"]
    assert len({ax.get_xlim() for ax in axes}) == 1


def test_shadows_are_paired_with_requests_that_the_champion_served(drawn: dict[str, Figure]) -> None:
    assert "Shadow: 100 requests answered by both" in texts(drawn["shadow"])


def test_no_text_or_token_of_a_user_is_drawn(drawn: dict[str, Figure]) -> None:
    for stage, figure in drawn.items():
        everything = "\n".join(texts(figure))
        assert SECRET not in everything, stage
        assert str(SECRET_TOKEN) not in everything, stage


@pytest.mark.parametrize("stage", STAGES)
def test_missing_evidence_is_said_and_not_an_empty_picture(stage: str, tmp_path: Path) -> None:
    (said,) = [text for text in texts(draw_main(stage, tmp_path / "lake")) if "no evidence" in text]
    assert said.startswith(f"{stage}: no evidence in ")


def test_rows_without_figures_are_drawn_as_such(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    side = {"side": "candidate"}
    rows: dict[str, dict[str, Any]] = {
        "tensor_replay": {"case_id": "decode-q1", "inputs": "normal", "error": "crashed"},
        "perf_cells": {"family": "decode", "metric": "kernel_s", "shape_bucket": "decode/kv<=64"},
        "canary_windows": {"stage": "canary", "share": 20, "window": 0},
    }
    for table, row in rows.items():
        write_rows(lake, table, [side | row], release_id="r1")
    for stage in ("replay", "baseline", "canary"):
        assert figures.save(stage, lake, "r1", tmp_path / "out")
    assert " no figure" in texts(draw_main("baseline", lake))


def test_a_figure_that_cannot_be_drawn_is_an_event_and_no_error(tmp_path: Path) -> None:
    lake, blocked = tmp_path / "lake", tmp_path / "file"
    blocked.write_text("in the way")
    assert figures.save("probe", lake, "r1", blocked) == []
    with Lake(lake) as opened:
        [(kind, subject, message)] = opened.rows("select kind, subject, message from events")
    assert (kind, subject) == ("figure_failed", "probe")
    assert "file" in message


def test_one_picture_that_cannot_be_drawn_does_not_cost_the_others(
    lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = PICTURES["baseline"]
    broken = Picture("baseline-broken", "", lambda evidence: evidence.rows("select 1")[1])  # type: ignore[arg-type,return-value]
    monkeypatch.setitem(PICTURES, "baseline", (first, broken, second))
    saved = figures.save("baseline", lake, "r1", tmp_path)
    assert [path.stem for path in saved] == [first.name, second.name]
    with Lake(lake) as opened:
        found = opened.rows("select subject from events where kind = 'figure_failed'")
    assert found == [("baseline-broken",)]


def test_a_release_has_every_picture_of_the_baseline_that_compares_two_sides(drawn: dict[str, Figure]) -> None:
    assert [name for name in drawn if name.startswith("baseline")] == [
        "baseline",
        "baseline-verdicts",
        "baseline-latency",
        "baseline-roofline",
        "baseline-first-call",
        "baseline-stress",
    ]


def test_a_cell_says_ratio_verdict_and_interval_or_what_was_lost(drawn: dict[str, Figure]) -> None:
    prefill, decode, extend = drawn["baseline-verdicts"].axes
    assert [ax.get_title(loc="left") for ax in (prefill, decode, extend)] == ["prefill", "decode", "extend"]
    said = [text.get_text() for text in decode.texts]
    assert sum(text.endswith((" FAST", " SAME", " AMBG")) for text in said) == 7
    assert "candidate\nOOM" in said
    rows = [label.get_text() for label in decode.get_yticklabels()]
    assert "TPOT\ntorch_sdpa:flash\nover torch_sdpa:math" in rows


def test_a_survey_is_drawn_without_a_champion(survey: dict[str, Figure]) -> None:
    assert list(survey) == [
        "baseline-best-prefill",
        "baseline-best-decode",
        "baseline-best-extend",
        "baseline-latency",
        "baseline-roofline",
    ]


def test_each_backend_is_told_by_the_best_of_its_own_case(survey: dict[str, Figure]) -> None:
    (ax,) = survey["baseline-best-prefill"].axes
    said = [text.get_text() for text in ax.texts]
    # Of 1.2, 3.0 and 1.8 times the limit; a fourth claims half of it, which no machine reaches.
    assert sorted(said) == ["1.00", "1.00", "1.50", "2.50", "2.50", "OOM", "above limit on all"]


def test_services_have_a_panel_each_and_batches_a_header(survey: dict[str, Figure]) -> None:
    graph, eager = survey["baseline-best-decode"].axes
    assert graph.get_title(loc="left") == "paged_nhd/16, cuda_graph, 9/3 heads of 64, float32"
    said = [text.get_text() for text in eager.texts]
    assert {"batch 1", "batch 8", "refused on all"} <= set(said)
    assert eager.get_xticklabels()[1].get_text() == "128\n30 %"


def test_latency_names_every_line_and_the_limit(survey: dict[str, Figure]) -> None:
    prefill, decode, _ = survey["baseline-latency"].axes
    said = {text.get_text() for text in prefill.texts}
    assert {"flash_attn:fa2", "torch_sdpa:flash", "flashinfer:fa3", "limit of the machine"} <= said
    assert "triton:paged" not in said, "above the limit is no measurement"
    assert decode.get_title(loc="left").startswith("decode: batch 8, paged_nhd/16, cuda_graph")


def test_the_roofline_names_its_measured_roofs_and_who_is_nearest(survey: dict[str, Figure]) -> None:
    said = texts(survey["baseline-roofline"])
    assert "read 9.9 GB/s" in said
    assert "float32 matrix product 49.5 GFLOP/s" in said
    assert any(text.startswith("prefill: flash_attn:fa2 reaches 0.83 of the limit on q") for text in said)


def test_a_first_call_that_failed_is_a_word_in_place_of_a_bar(drawn: dict[str, Figure]) -> None:
    said = texts(drawn["baseline-first-call"])
    assert {"timed out", "1.5 + 62 s", "candidate torch_sdpa:flash, warm"} <= set(said)


def test_the_knee_is_the_rate_up_to_which_nine_tenths_are_good(drawn: dict[str, Figure]) -> None:
    said = texts(drawn["baseline-stress"])
    assert "champion, 4 running: knee 1.76/s" in said
    assert "candidate, 4 running: knee 2.4/s or more" in said
    assert {"objective 800 ms", "objective 60 ms"} <= set(said)


def test_labels_that_would_cover_each_other_are_moved_apart() -> None:
    assert apart([0.2, 0.5], 0.1) == [0.2, 0.5]
    assert apart([0.5, 0.5, 0.55], 0.1) == pytest.approx([0.5, 0.6, 0.7])
    assert apart([0.98, 1.0], 0.1) == pytest.approx([0.9, 1.0])


def test_rows_of_backends_without_a_figure_say_so(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    rows = [lost("torch_sdpa:flash", case("prefill", 64), "crashed")]
    write_rows(lake, "perf_backends", [{"side": "candidate"} | row for row in rows], release_id="b1")
    write_rows(lake, "perf_stress", [{"side": "candidate", "rate_per_s": 1.0, "max_running": 2}], release_id="b1")
    found = draw_all(lake, "b1", "baseline")
    assert "crashed" in texts(found["baseline-best-prefill"])
    for name in ("latency", "roofline"):
        assert f"{name}: no evidence in perf_backends (no kernel was measured)" in texts(found[f"baseline-{name}"])
    assert figures.save("baseline", lake, "b1", tmp_path / "out")
    with Lake(lake) as opened:
        assert opened.rows("select message from events") == []


def test_a_candidate_that_lost_every_case_still_has_its_roofline(tmp_path: Path) -> None:
    lake, one = tmp_path / "lake", case("decode", 64)
    rows = [
        backend_row("torch_sdpa:math", one, 2.0) | {"side": "champion"},
        lost("torch_sdpa:flash", one, "crashed") | {"side": "candidate"},
    ]
    write_rows(lake, "perf_backends", rows, release_id="r1")
    found = draw_all(lake, "r1", "baseline")
    assert "decode: none has a figure and a limit" in texts(found["baseline-roofline"])
    assert "candidate\ncrash" in texts(found["baseline-verdicts"])


def test_verdicts_of_many_cases_are_several_panels() -> None:
    from tasks.figures.heat import MAX_VERDICTS, _verdict_panels

    rows = [{"case_id": str(i), "kv_len": i, "case_json": None} for i in range(MAX_VERDICTS + 2)]
    panels = _verdict_panels([*rows[::-1], *rows])
    assert [len({row["case_id"] for row in panel}) for panel in panels] == [MAX_VERDICTS, 2]
    assert [len(panel) for panel in panels] == [2 * MAX_VERDICTS, 4], "both metrics of a case"
