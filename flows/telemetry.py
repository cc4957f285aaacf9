"""Telemetry of every dependency is off from the first run. Only the standard library.

Each switch is set unless the environment already says something else: a person who turned one on
keeps it, and `flows doctor` shows which. MLflow honours DO_NOT_TRACK only when it is literally
`true`, hence that spelling and its own switch beside it.

    python flows/telemetry.py     # prints `export NAME=value` lines, for a Makefile or a shell
"""

from __future__ import annotations

import os

SWITCHES: dict[str, str] = {
    "DO_NOT_TRACK": "true",  # Prefect's SDK, MLflow and others
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",  # heartbeat of the Prefect server
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",  # adverts that the UI would fetch
    "MLFLOW_DISABLE_TELEMETRY": "true",  # client and server
    "GX_ANALYTICS_ENABLED": "false",  # Great Expectations before 1.24; later versions have none
    "HF_HUB_OFFLINE": "1",  # models are folders here; nothing is fetched at run time
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",  # no telemetry, but it warns at every fork
}


def silence() -> None:
    """Set every switch that the environment leaves open. Call before the first import of a dependency."""
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)


def differing() -> dict[str, str | None]:
    """Switches whose value in the environment is not the one that is known to work, with that value."""
    return {name: os.environ.get(name) for name, value in SWITCHES.items() if os.environ.get(name) != value}


if __name__ == "__main__":
    for name, value in SWITCHES.items():
        print(f"export {name}={value}")
