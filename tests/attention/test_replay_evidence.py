"""`python -m attention.replay_evidence`: what the benches wrote as a table; a folder of something else is a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attention import replay_evidence

RUN = {"cases_per_minute": 7343.7, "utilisation": 0.944, "oracle_share": 0.21}
FILES: dict[str, Any] = {
    "tensor": {"device": "GPU", "first": RUN, "second": {**RUN, "oracle_share": 0.0}},
    "model": {"replay_tokens_per_s": 512476.6, "replay_over_forward": 0.814, "forced_over_graph": 3.237},
    "drill": {
        "kinds": [{"effective": 132, "caught": 132}, {"effective": 10, "caught": 9}],
        "benign": {"false_alarms": 0, "num_runs": 572},
    },
}


def test_every_figure_stands_beside_what_is_asked(tmp_path: Path, capsys: Any) -> None:
    for name, document in FILES.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    assert replay_evidence.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for row in (
        "| tensor replay, cases a minute: first run / truths on disk | 7,344 / 7,344 | 500 |",
        "| time in the oracle, likewise | 21% / 0% | 25% / 0% |",
        "| over `model(ids)` alone | 0.81 | 0.8 |",
        "| faults around real kernels that were caught | 141 of 142 | all |",
        "| sound runs of real kernels that were stopped | 0 of 572 | 0 |",
    ):
        assert row in said


def test_a_folder_of_something_else_is_a_line(tmp_path: Path, capsys: Any) -> None:
    assert replay_evidence.main([str(tmp_path)]) == 2
    for name in FILES:
        (tmp_path / f"{name}.json").write_text("{}")
    assert replay_evidence.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "not what the benches write (KeyError: 'first')" in said[1]
