"""Alerting rules: each is tested, each metric and label that they name is one that an instance really has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families

from attention.__main__ import EXAMPLES
from attention.backends.base import AttentionSpec
from attention.dispatch import FallbackEvent, PhaseRun, StepRecord
from attention.probe import probes_of
from attention.sampling import SamplingParams
from attention.scheduler import Generation
from attention.serve.metrics import Metrics
from flows.__main__ import app
from tests.attention.serve.test_metrics import probe
from tests.data.promql import UnknownNameError, labels_of, metrics_of

FOLDER = Path(__file__).parents[2] / "data" / "observability"
_ALL = [rule for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"] for rule in group["rules"]]
RULES = {rule["alert"]: rule for rule in _ALL if "alert" in rule}
RECORDED = {rule["record"]: rule for rule in _ALL if "record" in rule}
FILES = sorted(path.name for path in FOLDER.glob("rules_test*.yaml"))
TESTS = [test for name in FILES for test in yaml.safe_load((FOLDER / name).read_text())["tests"]]
#: Labels that Prometheus itself adds to what it scrapes.
ADDED = frozenset({"instance", "job"})


@pytest.fixture(scope="module")
def scraped() -> dict[str, set[str]]:
    """Every series of an instance that has seen everything, with its labels."""
    one = Metrics(node="n", gpu="g", model="m")
    one.observe_startup(dtype="d", probes=[probe("decode", "fail", drift=True)])
    one.observe_build(fingerprint="f", policy_mode="pinned", torch="2")
    one.observe_fallback(FallbackEvent("request_fallback", "decode", "a:x", "b:y", ()))
    one.observe_refused()
    run = PhaseRun("decode", "decode/kv<=64", "triton:paged", "triton:paged", "triton:paged", 1)
    run.kernel_seconds, run.layers, run.first_call_seconds = 0.3, 30, 1.5
    one.observe_step(StepRecord([run]))
    one.observe_confirmation("decode", 0.001)
    one.observe_pages({"free": 1, "total": 2})
    one.observe_state(peak_memory_bytes=1, requests_running=0, requests_waiting=0, backend_mismatch=0)
    finished = Generation("r", (1,), SamplingParams(max_tokens=1), submitted=0.0)
    finished.admitted, finished.first_token, finished.last_token = 0.1, 0.2, 0.3
    finished.output_ids += [1, 2]
    finished.num_nonfinite, finished.finish_reason = 1, "stop"
    finished.confirmed["decode"] = "a:x"
    one.observe_finished(finished)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(one.text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


#: What Prometheus itself knows of a target.
UP = {"up": ADDED}


@pytest.fixture(scope="module")
def metrics(scraped: dict[str, set[str]]) -> dict[str, frozenset[str]]:
    """Every series that a rule may name, with its labels: of an instance, of Prometheus, and what rules record."""
    found = {name: frozenset(labels | ADDED) for name, labels in scraped.items()} | UP
    return found | {name: labels_of(rule["expr"], found) for name, rule in RECORDED.items()}


@pytest.mark.parametrize("alert", RULES)
def test_a_rule_names_what_an_instance_has(alert: str, metrics: dict[str, frozenset[str]]) -> None:
    told = labels_of(RULES[alert]["expr"], metrics)
    for text in RULES[alert]["annotations"].values():
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= told


@pytest.mark.parametrize("alert", RULES)
def test_a_rule_says_what_to_do_and_is_tested_both_ways(alert: str) -> None:
    rule = RULES[alert]
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    expected = {
        bool(case["exp_alerts"]) for test in TESTS for case in test["alert_rule_test"] if case["alertname"] == alert
    }
    assert expected == {False, True}


@pytest.mark.parametrize("alert", RULES)
def test_a_runbook_names_a_command_that_there_is(alert: str) -> None:
    text = RULES[alert]["annotations"]["runbook"]
    flows: Any = typer.main.get_command(app)
    known = {"attention": set(EXAMPLES), "flows": set(flows.commands)}
    named = re.findall(r"python -m (attention|flows) (\w+)", text)
    assert all(verb in known[program] for program, verb in named)
    assert named or re.search(r"curl |kill |python -m attention\.warm", text)


@pytest.mark.parametrize(
    "expression", ["attention_nothing > 0", "sum by (nobody) (up)", 'up{nobody="x"}', "up > on (le) up"]
)
def test_a_name_that_nothing_has_is_found(expression: str, metrics: dict[str, frozenset[str]]) -> None:
    with pytest.raises(UnknownNameError):
        labels_of(expression, metrics)


def test_probes_that_nothing_depends_on_raise_no_alarm() -> None:
    spec = AttentionSpec(heads_q=4, heads_kv=2, head_dim_qk=64, head_dim_vo=64, dtype=torch.float32, scale=0.125)
    probes = probes_of(spec, "float32", 16, num_pages=64)
    spare = {one.feature for one in probes} - {one.feature for one in probes if one.required}
    (named,) = re.findall(r'feature!~"([^"]*)"', RULES["AttentionProbeFailed"]["expr"])
    assert set(named.split("|")) == spare


def queries() -> dict[str, str]:
    """Title and expression of every panel."""
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    return {panel["title"]: target["expr"] for panel in panels for target in panel.get("targets", ())}


@pytest.mark.parametrize("title", queries())
def test_a_panel_names_what_an_instance_has_and_shows_the_models_and_gpus_chosen(
    title: str, metrics: dict[str, frozenset[str]]
) -> None:
    labels_of(queries()[title], metrics)
    assert 'model=~"$model",gpu=~"$gpu"' in queries()[title]


def test_every_metric_has_a_panel(scraped: dict[str, set[str]]) -> None:
    def families(names: Iterable[str]) -> set[str]:
        return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}

    assert families(scraped) == families(set().union(*map(metrics_of, queries().values())))


def test_the_readme_maps_conditions_to_alerts_as_the_rules_do() -> None:
    rows = re.findall(r"^\| [^|]+ \| ([\w-]+) \| (Attention.*) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    told = {(condition, alert) for condition, alerts in rows for alert in alerts.split(", ")}
    assert told == {(rule["labels"]["condition"], alert) for alert, rule in RULES.items()}


def promtool(*arguments: str) -> Any:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here: Debian's package prometheus has it")
    return subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)


def test_prometheus_takes_the_rules_and_their_tests_pass() -> None:
    for arguments in (("check", "rules", "rules.yaml"), ("test", "rules", *FILES)):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
