"""Where things lie. Everything generated stands under one folder, so that a test can have its own.

Environment variables: ATTENTION_RELEASE_HOME (default: the repository's `data/`) holds `lake/` and
`state/`; ATTENTION_RELEASE_MODELS (default: `data/models`) holds model folders, shared by all homes;
ATTENTION_RELEASE_CANDIDATES (default: `data/candidates`) holds the candidates that go by name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from attention.errors import UserError, is_dir, shown

_PART = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9._])?")


def repo_dir() -> Path:
    """The checkout that holds flows/, tasks/, gates/, data/ and attention/."""
    return Path(__file__).resolve().parent.parent


GOLDEN_FILE = repo_dir() / "data" / "golden" / "golden.jsonl"


def _named(variable: str, default: Path) -> Path:
    """The folder that an environment variable names, `~` allowed."""
    name = os.environ.get(variable)
    return expanded(name).resolve() if name else default.resolve()


def expanded(name: str) -> Path:
    """A path with its `~`. Raises UserError for the home of somebody who has none."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise UserError(f"{name}: {error}; write the path out") from error


def home_dir() -> Path:
    return _named("ATTENTION_RELEASE_HOME", repo_dir() / "data")


def lake_dir() -> Path:
    """The evidence lake: `<table>/release_id=<id>/<uuid>.parquet`."""
    return home_dir() / "lake"


def state_dir() -> Path:
    """Release records, route files, process files, MLflow's store, Prefect's home."""
    return home_dir() / "state"


def models_dir() -> Path:
    return _named("ATTENTION_RELEASE_MODELS", repo_dir() / "data" / "models")


def candidates_dir() -> Path:
    """Candidates that a person added, and that an event or an API call may pick by name."""
    return _named("ATTENTION_RELEASE_CANDIDATES", repo_dir() / "data" / "candidates")


def cell_dir(gpu: str, family: str) -> Path:
    """State of one cell (GPU model, model family): record, route files, logs, process files.

    Raises UserError for names that would lead elsewhere, or could not be told apart again.
    """
    return state_dir() / f"{check_part('gpu', gpu)}--{check_part('family', family)}"


def check_part(what: str, name: str) -> str:
    """`name` if it can be half of a cell's folder. Raises UserError."""
    if not _is_part(name):
        raise UserError(
            f"{what} {shown(name)}: use at most 63 of a-z, 0-9, `.`, `_` and `-`, a letter or digit first, "
            "no `-` last and no `--`"
        )
    return name


def _is_part(name: str) -> bool:
    return _PART.fullmatch(name) is not None and "--" not in name


def cells() -> list[tuple[str, str]]:
    """Every (gpu, family) that has a folder."""
    folder = state_dir()
    if not folder.is_dir():
        return []
    return sorted(
        (gpu, family)
        for gpu, mark, family in (child.name.partition("--") for child in folder.iterdir() if child.is_dir())
        if mark and _is_part(gpu) and _is_part(family)
    )


def model_path(model: str) -> Path:
    """A model named in a candidate: a folder if it is one, else a folder of `models_dir()`."""
    direct = expanded(model)
    return direct.resolve() if is_dir(direct) else models_dir() / model


def family_of(model: str) -> str:
    """`smollm2` of `smollm2-135m-instruct`: the folder name up to its first dash, lower-cased."""
    return Path(model).name.split("-", 1)[0].lower()
