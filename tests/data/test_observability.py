"""Alerting rules: each is tested, each metric and label that they name is one that an instance really has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from attention.dispatch import FallbackEvent, PhaseRun, StepRecord
from attention.sampling import SamplingParams
from attention.scheduler import Generation
from attention.serve.metrics import Metrics
from tests.attention.serve.test_metrics import probe

FOLDER = Path(__file__).parents[2] / "data" / "observability"
RULES = {
    rule["alert"]: rule
    for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]
    for rule in group["rules"]
}
TESTS = yaml.safe_load((FOLDER / "rules_test.yaml").read_text())["tests"]
#: Labels that Prometheus itself adds to what it scrapes.
ADDED = {"instance", "job"}


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


def names_in(expression: str) -> tuple[set[str], set[str]]:
    """Metrics and labels that an expression names."""
    metrics = set(re.findall(r"attention_\w+", expression))
    matched = {
        label for inner in re.findall(r"\{([^}]*)\}", expression) for label in re.findall(r"(\w+)\s*[=!]", inner)
    }
    grouped = {
        label for inner in re.findall(r"(?:by|on)\s*\(([^)]*)\)", expression) for label in re.findall(r"\w+", inner)
    }
    return metrics, matched | grouped


@pytest.mark.parametrize("alert", RULES)
def test_a_rule_names_what_an_instance_has(alert: str, scraped: dict[str, set[str]]) -> None:
    metrics, labels = names_in(RULES[alert]["expr"])
    assert metrics and metrics <= scraped.keys(), metrics - scraped.keys()
    known = ADDED.union(*(scraped[name] for name in metrics))
    assert labels <= known, labels - known


@pytest.mark.parametrize("alert", RULES)
def test_a_rule_says_what_to_do_and_is_tested_both_ways(alert: str) -> None:
    rule = RULES[alert]
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    expected = [
        bool(case["exp_alerts"]) for test in TESTS for case in test["alert_rule_test"] if case["alertname"] == alert
    ]
    assert sorted(expected) == [False, True]


def queries() -> dict[str, str]:
    """Title and expression of every panel."""
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    return {panel["title"]: target["expr"] for panel in panels for target in panel.get("targets", ())}


@pytest.mark.parametrize("title", queries())
def test_a_panel_names_what_an_instance_has(title: str, scraped: dict[str, set[str]]) -> None:
    metrics, labels = names_in(queries()[title])
    assert metrics and metrics <= scraped.keys(), metrics - scraped.keys()
    known = ADDED.union(*(scraped[name] for name in metrics))
    assert labels <= known, labels - known


def test_every_metric_has_a_panel(scraped: dict[str, set[str]]) -> None:
    shown = set().union(*(names_in(expression)[0] for expression in queries().values()))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in scraped}
    assert families == {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}


def test_the_readme_names_every_alert() -> None:
    assert set(re.findall(r"Attention[A-Z]\w+", (FOLDER / "README.md").read_text())) == set(RULES)


def promtool(*arguments: str) -> Any:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here: Debian's package prometheus has it")
    return subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)


def test_prometheus_takes_the_rules_and_their_tests_pass() -> None:
    for arguments in (("check", "rules", "rules.yaml"), ("test", "rules", "rules_test.yaml")):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
