from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from attention.errors import UserError
from data.paths import repo_dir
from data.plan import load_plan
from tests.commands import QUICK

PLANS = sorted((repo_dir() / "data" / "plans").glob("*.yaml"))


def changed(folder: Path, section: str, **values: object) -> str:
    content = yaml.safe_load(QUICK.read_text())
    content[section] |= values
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_goes_by_the_name_of_its_file(path: Path) -> None:
    assert load_plan(path.stem).name == path.stem
    assert load_plan(str(path)) == load_plan(path.stem)


def test_the_demo_is_what_the_project_promises() -> None:
    demo = load_plan("demo")
    assert (demo.traffic.divide_lengths_by, demo.traffic.max_output_tokens) == (16, 16)
    assert (demo.canary.steps, demo.canary.min_candidate_requests) == ((20, 50, 100), 40)


def test_kinds_of_inputs_and_kv_dtypes_count_once_and_by_torchs_name(tmp_path: Path) -> None:
    plan = load_plan(changed(tmp_path, "replay", inputs=["sink", "normal", "sink"], kv_dtypes=["fp8", "float8_e4m3fn"]))
    assert (plan.replay.inputs, plan.replay.kv_dtypes) == (("sink", "normal"), ("float8_e4m3fn",))


def test_an_unknown_name_says_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plan 'dmeo': .*did you mean demo"):
        load_plan("dmeo")
    with pytest.raises(UserError, match=r"nowhere.yaml"):
        load_plan(str(tmp_path / "nowhere.yaml"))


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("shadow", {"reqests": 5}, "shadow.reqests"),
        ("shadow", {"fraction": 1.5}, "shadow.fraction"),
        ("replay", {"seeds": "many"}, "replay.seeds"),
        ("baseline", {"blocks": 3}, "baseline.blocks"),
        ("canary", {"steps": [50, 20, 100]}, "canary: .*steps must rise and end at 100"),
        ("canary", {"steps": [20, 50]}, "steps must rise and end at 100"),
        ("canary", {"steps": [50, 50, 100]}, "steps must rise"),
        ("canary", {"steps": []}, "steps must rise"),
        ("canary", {"steps": [0, 100]}, "canary.steps.0"),
        ("canary", {"steps": [-5, 100]}, "canary.steps.0"),
        ("canary", {"steps": [50, 101]}, "canary.steps.1"),
        ("canary", {"hold_deadline_s": float("inf")}, "canary.hold_deadline_s"),
        ("traffic", {"requests_per_s": float("inf")}, "traffic.requests_per_s"),
        ("baseline", {"min_block_s": float("inf")}, "baseline.min_block_s"),
        ("replay", {"golden_prompts": -5}, "replay.golden_prompts"),
        ("replay", {"golden_prompts": 0}, "replay.golden_prompts"),
        ("replay", {"golden_max_tokens": -16}, "replay.golden_max_tokens"),
        ("replay", {"kv_dtypes": ["fp9"]}, "replay.kv_dtypes: .*fp9"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, section: str, values: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=f"mine.yaml: .*{told}") as raised:
        load_plan(changed(tmp_path, section, **values))
    assert "\n" not in str(raised.value)


def test_a_name_that_no_file_can_have_is_one_line() -> None:
    for name in ("x" * 5000, "a\0b", "a\nb"):
        with pytest.raises(UserError, match="no file") as raised:
            load_plan(name)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", ["name: [unclosed", "", "just text", "name: 2024-99-99", "[" * 3000])
def test_a_file_that_is_no_plan_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=r"mine.yaml: ") as raised:
        load_plan(str(path))
    assert "\n" not in str(raised.value)


def test_a_file_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UserError, match=r"mine.yaml: "):
        load_plan(str(path))
