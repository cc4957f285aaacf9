"""What a GPU showed of the replay, as a markdown table.

    python -m attention.bench_tensor_replay --out DIR/tensor.json
    python -m attention.bench_replay --model MODEL --out DIR/model.json
    python -m attention.drill.measure --plan h200 --frozen gates/thresholds.yaml gates/suites --out ROWS --jobs 16
    python -m flows drill --rows ROWS --json >DIR/drill.json
    python -m attention.replay_evidence DIR

The first three commands need a GPU, the others run anywhere.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from attention.errors import UserError, exit_code
from attention.yaml_file import read_json


def table(folder: Path) -> str:
    """Figure, what was seen and what is asked for. UserError for a folder without the three files."""
    tensor, model, drill = (read_json(folder / f"{name}.json") for name in ("tensor", "model", "drill"))
    try:
        rows = [*_tensor(tensor["first"], tensor["second"]), *_model(model), *_drill(drill)]
        return "\n".join([f"| on one {tensor['device']} | seen | asked |", "|---|---|---|", *rows])
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder}: not what the benches write ({type(error).__name__}: {error})") from error


def _tensor(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    runs = (first, second)
    return [
        _row(
            "tensor replay, cases a minute: first run / truths on disk",
            " / ".join(f"{run['cases_per_minute']:,.0f}" for run in runs),
            "500",
        ),
        _row("time in which a kernel ran, likewise", " / ".join(f"{run['utilisation']:.0%}" for run in runs), "80%"),
        _row("time in the oracle, likewise", " / ".join(f"{run['oracle_share']:.0%}" for run in runs), "25% / 0%"),
    ]


def _model(found: dict[str, Any]) -> list[str]:
    return [
        _row("model replay, tokens a second of both sides", f"{found['replay_tokens_per_s']:,.0f}", "200,000"),
        _row("over `model(ids)` alone", f"{found['replay_over_forward']:.2f}", "0.8"),
        _row("forced decode over static cache and CUDA graph", f"{found['forced_over_graph']:.2f}", "0.8"),
    ]


def _drill(found: dict[str, Any]) -> list[str]:
    effective, caught = (sum(kind[name] for kind in found["kinds"]) for name in ("effective", "caught"))
    stopped, sound = (found["benign"][name] for name in ("false_alarms", "num_runs"))
    return [
        _row("faults around real kernels that were caught", f"{caught:,} of {effective:,}", "all"),
        _row("sound runs of real kernels that were stopped", f"{stopped:,} of {sound:,}", "0"),
    ]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m attention.replay_evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="holds tensor.json, model.json and drill.json")
    options = parser.parse_args(argv)

    def run() -> int:
        print(table(options.folder))
        return 0

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
