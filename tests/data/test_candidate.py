from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from attention.errors import UserError
from attention.model_config import model_revision
from data.candidate import load_candidate
from data.paths import repo_dir
from tests.attention.test_yaml_file import BOMB
from tests.commands import FLASH, QUICK, SAMPLE, candidate_file
from tests.data.test_golden_set import PROMPT

CANDIDATES = sorted((repo_dir() / "data" / "candidates").rglob("*.yaml"))


@pytest.mark.parametrize("path", CANDIDATES, ids=lambda path: path.stem)
def test_every_candidate_of_the_repository_loads(path: Path) -> None:
    loaded = load_candidate(path)
    assert loaded.candidate.is_drill == (path.parent.name == "drill")
    assert loaded.candidate.name.replace("-", "_").endswith(path.stem.replace("-", "_"))


def test_references_are_found_and_a_cell_is_one_model_of_one_wave(tmp_path: Path) -> None:
    own = tmp_path / "Own-7B"
    own.mkdir()
    (own / "config.json").write_text("{}")
    waves = [
        {"gpu": "cpu", "models": ["smollm2-135m-instruct", str(own)]},
        {"gpu": "nvidia-h200", "models": [str(own)], "family": "mine", "approval": True},
    ]
    loaded = load_candidate(candidate_file(tmp_path, waves=waves))
    assert [(cell.gpu, cell.family, cell.model, cell.approval) for cell in loaded.cells] == [
        ("cpu", "smollm2", "smollm2-135m-instruct", False),
        ("cpu", "own", "Own-7B", False),
        ("nvidia-h200", "mine", "Own-7B", True),
    ]
    assert (loaded.policy_path, loaded.traffic_path) == (FLASH, SAMPLE)
    assert loaded.file.is_absolute() and loaded.cells[1].model_path == own


def test_paths_are_relative_to_the_repository_wherever_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_candidate(candidate_file(tmp_path, policy="data/policies/cpu-flash.yaml"))
    assert loaded.policy_path == FLASH


def copy_of(source: Path, folder: Path, before: str, after: str) -> str:
    path = folder / source.name
    assert before in source.read_text()
    path.write_text(source.read_text().replace(before, after))
    return str(path)


def test_identity_is_what_is_released_not_what_it_is_called(tmp_path: Path) -> None:
    def identity(name: str = "flash", **changes: Any) -> str:
        return load_candidate(candidate_file(tmp_path / "drill", name, **changes)).identity

    sound = identity()
    assert identity("renamed") == sound
    drill = tmp_path / "drill"
    others = [
        identity(fault="wrong_scale"),
        identity(fault="slow_decode"),
        identity(policy=str(FLASH.with_name("cpu-math.yaml"))),
        identity(plan="demo"),
        identity(plan=copy_of(QUICK, drill, "requests: 20", "requests: 21")),
        identity(policy=copy_of(FLASH, drill, "allow_runtime_fallback: true", "allow_runtime_fallback: false")),
        identity(waves=[{"gpu": "cpu", "models": ["smollm2-135m-instruct"], "approval": True}]),
    ]
    assert len({sound, *others}) == len(others) + 1


def test_identity_follows_the_content_of_the_plan_behind_the_same_name(tmp_path: Path) -> None:
    plan = tmp_path / "quick.yaml"
    plan.write_text(QUICK.read_text())
    path = candidate_file(tmp_path, plan=str(plan))
    before = load_candidate(path).identity
    plan.write_text(QUICK.read_text().replace("seeds: 1", "seeds: 2"))
    assert load_candidate(path).identity != before


def test_identity_follows_traffic_golden_set_and_model_behind_the_same_names(tmp_path: Path) -> None:
    traffic, golden, model = tmp_path / "traffic.jsonl", tmp_path / "golden.jsonl", tmp_path / "own-1b"
    traffic.write_text(SAMPLE.read_text())
    golden.write_text(json.dumps(PROMPT))
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = bytearray(1 << 25)
    (model / "model.safetensors").write_bytes(weights)
    waves = [{"gpu": "cpu", "models": [str(model)]}]
    path = candidate_file(tmp_path, traffic={"source": str(traffic)}, golden=str(golden), waves=waves)

    def identity() -> str:
        return load_candidate(path).identity

    found = [identity()]
    assert identity() == found[0]
    traffic.write_text(SAMPLE.read_text() + SAMPLE.read_text().splitlines()[0] + "\n")
    found.append(identity())
    golden.write_text(json.dumps(PROMPT) + " ")
    found.append(identity())
    (model / "config.json").write_text('{"rope_theta": 1}')
    found.append(identity())
    weights[0] = 1
    (model / "model.safetensors").write_bytes(weights)
    found.append(identity())
    (model / "tokenizer.json").write_text("{}")
    found.append(identity())
    assert len(set(found)) == len(found)


def test_a_golden_set_of_ones_own_is_drawn_and_its_bad_lines_are_counted(tmp_path: Path) -> None:
    golden = tmp_path / "golden.jsonl"
    lines = [
        PROMPT,
        PROMPT | {"prompt_id": "own", "category": "billing"},
        PROMPT | {"prompt_id": "bad", "max_tokens": 0},
    ]
    golden.write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = load_candidate(candidate_file(tmp_path, golden=str(golden))).golden()
    assert [prompt.category for prompt in drawn.prompts] == ["copy", "billing"]
    assert [str(line.line) + " " + line.reason for line in drawn.rejected] == [
        "3 max_tokens: Input should be greater than or equal to 1"
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "golden: .* is not there"),
        ("", "no usable line, it is empty"),
        ("{}\n", "no usable line; line 1: prompt_id: Field required"),
        (json.dumps(PROMPT | {"max_tokens": 900}), "none of its 1 prompts fits the plan's golden_max_tokens"),
    ],
)
def test_a_golden_set_without_a_prompt_to_ask_is_refused_in_one_line(
    tmp_path: Path, content: str | None, said: str
) -> None:
    golden = tmp_path / "golden.jsonl"
    if content is not None:
        golden.write_text(content)
    with pytest.raises(UserError, match=said) as refused:
        load_candidate(candidate_file(tmp_path, golden=str(golden)))
    assert "\n" not in str(refused.value)


def test_a_large_model_is_told_apart_at_once(tmp_path: Path) -> None:
    """270 MB of weights, and a tokenizer, as the default model has; the least of five, for machines with others on."""
    (tmp_path / "tokenizer.json").write_bytes(bytes(3_500_000))
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(270_000_000)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        model_revision(tmp_path)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.05


def test_a_model_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"config.json: Permission denied: fetch the model again"):
        model_revision(tmp_path)


@pytest.mark.parametrize("name", ["", "-flash", "a/b", "../up", "a b", "x" * 64, "naïve"])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    path = candidate_file(tmp_path)
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "name": name}))
    with pytest.raises(UserError, match=r"flash.yaml: name: "):
        load_candidate(path)


@pytest.mark.parametrize("content", ["", "- a", "text", "name: [", "\t"])
def test_a_file_that_is_no_candidate_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=r"mine.yaml: ") as raised:
        load_candidate(path)
    assert "\n" not in str(raised.value)


def test_waves_and_models_cannot_be_empty(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"waves: "):
        load_candidate(candidate_file(tmp_path, waves=[]))
    with pytest.raises(UserError, match=r"waves.0.models: "):
        load_candidate(candidate_file(tmp_path, waves=[{"gpu": "cpu", "models": []}]))


def test_a_fault_is_a_matter_of_the_drill_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"drills only"):
        load_candidate(candidate_file(tmp_path, fault="wrong_scale"))
    loaded = load_candidate(candidate_file(tmp_path / "drill", fault="wrong_scale"))
    assert loaded.candidate.is_drill


@pytest.mark.parametrize("part", ["../../x", "a/b", "a--b", "a\0b", "Cpu", ""])
@pytest.mark.parametrize("key", ["gpu", "family"])
def test_gpu_and_family_name_a_folder_of_the_state(tmp_path: Path, key: str, part: str) -> None:
    wave = {"gpu": "cpu", "models": ["smollm2-135m-instruct"], key: part}
    with pytest.raises(UserError, match=rf"waves.0.{key}: .*use at most 63") as raised:
        load_candidate(candidate_file(tmp_path, waves=[wave]))
    assert "\n" not in str(raised.value)


def model_folder(path: Path) -> str:
    path.mkdir()
    (path / "config.json").write_text("{}")
    return str(path)


def test_a_folder_whose_name_gives_no_family_says_to_set_it(tmp_path: Path) -> None:
    own = model_folder(tmp_path / "own model")
    with pytest.raises(UserError, match=r"waves.models: family 'own model'.*set `family`"):
        load_candidate(candidate_file(tmp_path, waves=[{"gpu": "cpu", "models": [own]}]))
    load_candidate(candidate_file(tmp_path, waves=[{"gpu": "cpu", "models": [own], "family": "own"}]))


def test_two_models_cannot_share_a_cell(tmp_path: Path) -> None:
    small, large = (model_folder(tmp_path / name) for name in ("own-1b", "own-7b"))
    waves: list[dict[str, Any]] = [{"gpu": "cpu", "models": [small, large]}]
    with pytest.raises(UserError, match=r"own-1b and own-7b are both cpu own.*another `family`"):
        load_candidate(candidate_file(tmp_path, waves=waves))
    with pytest.raises(UserError, match=r"are both cpu own"):
        load_candidate(candidate_file(tmp_path, waves=[{"gpu": "cpu", "models": [m]} for m in (small, large)]))
    waves = [{"gpu": "cpu", "models": [small]}, {"gpu": "cpu", "models": [large], "family": "own-7b"}]
    assert [cell.family for cell in load_candidate(candidate_file(tmp_path, waves=waves)).cells] == ["own", "own-7b"]


def test_a_mix_that_does_not_exist_says_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"traffic.mix: unknown mix; did you mean chat\? \(got 'caht'\)"):
        load_candidate(candidate_file(tmp_path, traffic={"source": str(SAMPLE), "mix": "caht"}))


@pytest.mark.parametrize("key", ["policy", "plan", "environment"])
@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "a\nb"])
def test_a_name_that_no_file_can_have_is_one_line(tmp_path: Path, key: str, name: str) -> None:
    with pytest.raises(UserError) as raised:
        load_candidate(candidate_file(tmp_path, **{key: name}))
    assert "\n" not in str(raised.value)


def test_a_file_or_model_with_such_a_name_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_candidate(tmp_path / ("x" * 5000))
    for model in ("x" * 5000, "a\0b", "~nobody-of-this-name/m"):
        with pytest.raises(UserError):
            load_candidate(candidate_file(tmp_path, waves=[{"gpu": "cpu", "models": [model]}]))


def test_aliases_that_multiply_do_not_end_in_the_message(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(BOMB + "name: *j\n")
    with pytest.raises(UserError) as raised:
        load_candidate(path)
    assert len(str(raised.value)) < 3000


def test_traffic_may_be_any_known_log_and_is_drawn_to_the_plan(tmp_path: Path) -> None:
    log = tmp_path / "trace.csv"
    times = [f"2023-11-16 18:15:{second:02}.0000000,{100 + second},44" for second in range(50)]
    log.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *times]))
    content = yaml.safe_load(QUICK.read_text())
    content["traffic"]["max_requests"] = 20
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(content))
    loaded = load_candidate(candidate_file(tmp_path, traffic={"source": str(log)}, plan=str(plan)))
    traffic = loaded.traffic()
    assert (traffic.format, len(traffic.requests)) == ("azure", 20)
    assert traffic.sample is not None and traffic.sample.requests == 50


def test_a_format_may_be_named_and_an_unknown_one_lists_the_known(tmp_path: Path) -> None:
    forced = {"source": str(SAMPLE), "format": "mooncake"}
    loaded = load_candidate(candidate_file(tmp_path, traffic=forced))
    with pytest.raises(UserError, match="no usable line; line 1: timestamp: this key is missing"):
        loaded.traffic()
    with pytest.raises(UserError, match=r"traffic.format: unknown format; known: openai-batch, otel, .*mooncake"):
        load_candidate(candidate_file(tmp_path, traffic={"source": str(SAMPLE), "format": "moncake"}))


def test_a_traffic_file_of_no_known_format_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match="no line is of a known format"):
        load_candidate(candidate_file(tmp_path, traffic={"source": str(tmp_path / "notes.txt")}))
