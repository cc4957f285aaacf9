"""Which texts of the traffic the model replay is given, and what its jobs say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from attention.job import Evidence, Setup
from data.environment import Environment
from data.plan import load_plan
from data.recorded import read_traffic
from tasks.replay import _compare, _job, _model_prompts
from tests.data.readers import test_mooncake, test_vllm_log
from tests.data.readers.logs import write
from tests.data.test_recorded import batch
from tests.data.words import Words


def context(path: Path) -> Any:
    return SimpleNamespace(
        candidate=SimpleNamespace(traffic=lambda: read_traffic(path)),
        plan=SimpleNamespace(replay=SimpleNamespace(model_prompts=3)),
        cell=SimpleNamespace(model_path=path),
    )


def test_chats_come_before_plain_prompts(tmp_path: Path) -> None:
    plain = batch(9) | {"url": "/v1/completions", "body": {"model": "m", "prompt": "plain", "max_tokens": 2}}
    prompts = _model_prompts(context(write(tmp_path / "t", plain, batch(0), batch(1))))
    assert sorted(prompt.prompt_id for prompt in prompts) == ["r0", "r1"]
    assert prompts[0].messages == ({"role": "user", "content": "hello"},)


def test_where_no_chat_was_recorded_a_plain_prompt_is_what_a_user_says(tmp_path: Path) -> None:
    path = write(tmp_path / "t", test_vllm_log.received("one two"))
    [prompt] = _model_prompts(context(path))
    assert prompt.messages == ({"role": "user", "content": "one two"},)


def test_where_only_lengths_were_recorded_a_prompt_of_that_length_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda path: Words())
    path = write(tmp_path / "t", *(test_mooncake.request() for _ in range(5)))
    prompts = _model_prompts(context(path))
    assert [len(prompt.messages[0]["content"].split()) for prompt in prompts] == [1300] * 3


def sides(tmp_path: Path) -> Any:
    """A context of which only what jobs are made of is there."""
    return SimpleNamespace(
        folder=tmp_path,
        work=tmp_path / "work",
        release_id="r1",
        plan=load_plan("demo"),
        setup=lambda side: Setup(model=tmp_path, policy=tmp_path / f"{side}.yaml"),
        evidence=lambda side: Evidence(lake=tmp_path, release_id="r1", side=side),
        environment=lambda side: Environment(name=side, interpreter="current"),
    )


def test_the_champion_alone_measures_a_floor_in_a_folder_that_outlives_the_release(tmp_path: Path) -> None:
    context = sides(tmp_path)
    assert _job(context, "champion", (), []).model.floors == tmp_path / "floors"
    assert _job(context, "candidate", (), []).model.floors is None


def test_the_comparison_is_given_both_recordings_and_the_champions_floor(tmp_path: Path) -> None:
    known = {"states": "c/states", "floor": None, "known_floor": "floors/k.parquet"}
    candidate = {"states": "d/states", "floor": None, "known_floor": None}
    job: Any = _compare(sides(tmp_path), {"champion": known, "candidate": candidate}).job
    assert (job.champion, job.candidate) == (Path("c/states"), Path("d/states"))
    assert (job.floor, job.known_floor) == (None, Path("floors/k.parquet"))
    assert job.evidence.side == "candidate"
