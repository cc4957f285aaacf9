"""Where things lie. Everything generated stands under one folder, so that a test can have its own.

Environment variables: ATTENTION_RELEASE_HOME (default: the repository's `data/`) holds `lake/` and
`state/`; ATTENTION_RELEASE_MODELS (default: `data/models`) holds model folders, shared by all homes;
ATTENTION_RELEASE_CANDIDATES (default: `data/candidates`) holds the candidates that go by name.
"""

from __future__ import annotations

import os
from pathlib import Path


def repo_dir() -> Path:
    """The checkout that holds flows/, tasks/, gates/, data/ and attention/."""
    return Path(__file__).resolve().parent.parent


GOLDEN_FILE = repo_dir() / "data" / "golden" / "golden.jsonl"


def home_dir() -> Path:
    return Path(os.environ.get("ATTENTION_RELEASE_HOME") or repo_dir() / "data").resolve()


def lake_dir() -> Path:
    """The evidence lake: `<table>/release_id=<id>/<uuid>.parquet`."""
    return home_dir() / "lake"


def state_dir() -> Path:
    """Release records, route files, process files, MLflow's store, Prefect's home."""
    return home_dir() / "state"


def models_dir() -> Path:
    return Path(os.environ.get("ATTENTION_RELEASE_MODELS") or repo_dir() / "data" / "models").resolve()


def candidates_dir() -> Path:
    """Candidates that a person added, and that an event or an API call may pick by name."""
    return Path(os.environ.get("ATTENTION_RELEASE_CANDIDATES") or repo_dir() / "data" / "candidates").resolve()


def cell_dir(gpu: str, family: str) -> Path:
    """State of one cell (GPU model, model family): record, route files, logs, process files."""
    return state_dir() / f"{gpu}--{family}"


def cells() -> list[tuple[str, str]]:
    """Every (gpu, family) that has a folder."""
    folder = state_dir()
    if not folder.is_dir():
        return []
    return sorted(
        (gpu, family)
        for gpu, mark, family in (child.name.partition("--") for child in folder.iterdir() if child.is_dir())
        if mark
    )


def model_path(model: str) -> Path:
    """A model named in a candidate: a folder if it is one, else a folder of `models_dir()`."""
    direct = Path(model).expanduser()
    return direct.resolve() if direct.is_dir() else models_dir() / model


def family_of(model: str) -> str:
    """`smollm2` of `smollm2-135m-instruct`: the folder name up to its first dash, lower-cased."""
    return Path(model).name.split("-", 1)[0].lower()
