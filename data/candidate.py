"""A candidate: an environment plus a policy, and how it is to be released (DESIGN 4.1)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from attention.errors import UserError, nearest
from attention.faults import check_fault
from attention.model_config import model_revision
from data.environment import load_environment
from data.paths import GOLDEN_FILE, candidates_dir, family_of, model_path, repo_dir
from data.plan import Plan, load_plan

DRILL_FOLDER = "drill"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Wave(_Strict):
    """One step of the expansion: a GPU model and the models on it. `cpu` is a GPU model here."""

    gpu: str = Field(min_length=1)
    models: tuple[str, ...] = Field(min_length=1)  # folder names of data/models, or paths
    family: str | None = None  # default: the folder name up to its first dash
    approval: bool = False  # hold until `python -m flows approve RELEASE`


class TrafficSource(_Strict):
    """What is replayed through the router, and which mix weights the baselines."""

    source: str
    mix: str = "chat"


class Candidate(_Strict):
    """The file's content; see data/candidates/torch-flash-cpu.yaml for every key."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    engine: Literal["torch"]  # other engines are driven by later versions
    environment: str
    policy: str
    waves: tuple[Wave, ...] = Field(min_length=1)
    plan: str = "full"
    traffic: TrafficSource
    fault: str | None = None  # drills only: see attention/faults.py

    @model_validator(mode="after")
    def _fault_is_known(self) -> Candidate:
        check_fault(self.fault)
        return self

    @property
    def is_drill(self) -> bool:
        return self.fault is not None


class Cell(_Strict):
    """One (GPU model, model family) of a wave: what a release record is about."""

    gpu: str
    family: str
    model: str
    model_path: Path
    approval: bool


class Loaded(_Strict):
    """A candidate whose references were all found."""

    file: Path
    candidate: Candidate
    plan: Plan
    policy_path: Path
    traffic_path: Path
    cells: tuple[Cell, ...]
    identity: str  # hash of candidate, policy, plan, thresholds, environment, traffic, golden set and models


def load_candidate(path: Path) -> Loaded:
    """Read a candidate and check everything that it names. Raises UserError: one line, what, where, remedy."""
    candidate = _parse(path)
    if candidate.is_drill and path.resolve().parent.name != DRILL_FOLDER:
        raise UserError(f"{path}: `fault` is for drills only; move the file to data/candidates/{DRILL_FOLDER}/")
    environment = load_environment(candidate.environment)
    policy_path = _find(path, "policy", candidate.policy)
    from attention.policy import load_policy

    load_policy(policy_path)
    traffic_path = _find(path, "traffic.source", candidate.traffic.source)
    plan = load_plan(candidate.plan)
    cells = tuple(_cell(path, wave, model) for wave in candidate.waves for model in wave.models)
    parts = [
        candidate.model_dump_json(exclude={"name"}),
        policy_path.read_text(),
        plan.model_dump_json(),
        (repo_dir() / "gates" / "thresholds.yaml").read_text(),
        environment.digest(),
        _digest(traffic_path),
        _digest(GOLDEN_FILE),
        *(model_revision(folder) for folder in dict.fromkeys(cell.model_path for cell in cells)),
    ]
    identity = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return Loaded(
        file=path.resolve(),
        candidate=candidate,
        plan=plan,
        policy_path=policy_path,
        traffic_path=traffic_path,
        cells=cells,
        identity=identity,
    )


def candidate_named(name: str) -> Path:
    """The file of a candidate in `candidates_dir()`: `torch-flash-cpu`, or `drill/slow_decode`.

    For callers that may pick a candidate but not add one: a name is looked up among the files that are
    there, so that none can lead elsewhere. Raises UserError with the nearest names.
    """
    folder = candidates_dir()
    known = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.yaml")}
    if name not in known:
        raise UserError(f"candidate {name!r}: not a name in {folder}; {nearest(name, known)}")
    return known[name]


def _parse(path: Path) -> Candidate:
    if not path.is_file():
        folder = repo_dir() / "data" / "candidates"
        known = [str(p.relative_to(repo_dir())) for p in folder.rglob("*.yaml")]
        raise UserError(f"candidate {path}: no such file; {nearest(str(path), known)}")
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: a candidate is a mapping with name, engine, environment, policy, waves, traffic")
    try:
        return Candidate.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "candidate"
        if first["type"] == "extra_forbidden":
            keys = {*Candidate.model_fields, *Wave.model_fields, *TrafficSource.model_fields}
            raise UserError(f"{path}: {where}: unknown key; {nearest(str(first['loc'][-1]), keys)}") from error
        if first["type"] == "missing":
            raise UserError(f"{path}: {where}: this key is missing") from error
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{path}: {where}: {message} (got {first['input']!r})"[:400]) from error


def _find(candidate: Path, key: str, name: str) -> Path:
    """A file named by a candidate: relative to the repository, or absolute."""
    path = Path(name) if Path(name).is_absolute() else repo_dir() / name
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
        raise UserError(f"{candidate}: {key}: {name} is not there; {nearest(path.name, siblings)}".rstrip("; "))
    return path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _cell(candidate: Path, wave: Wave, model: str) -> Cell:
    folder = model_path(model)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{candidate}: waves.models: no model at {folder}; run `make model`, or name the folder of a "
            f"transformers causal LM"
        )
    family = wave.family or family_of(model)
    return Cell(gpu=wave.gpu, family=family, model=folder.name, model_path=folder, approval=wave.approval)
