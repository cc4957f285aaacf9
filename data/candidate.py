"""A candidate: an environment plus a policy, and how it is to be released."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from attention.errors import UserError, is_dir, is_file, nearest, shown
from attention.faults import check_fault
from attention.model_config import model_revision
from attention.yaml_file import read_yaml
from data.environment import load_environment
from data.paths import candidates_dir, check_part, family_of, model_path, repo_dir
from data.plan import Plan, load_plan
from data.readers import FORMATS, format_of

if TYPE_CHECKING:
    from data.golden_set import Drawn
    from data.requests import Traffic

DRILL_FOLDER = "drill"
#: `own`: what `source` holds, as the plan plays it.
OWN = "own"
MIXES = ("chat", "code", "long-context", "reasoning", OWN)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Wave(_Strict):
    """One step of the expansion: a GPU model and the models on it. `cpu` is a GPU model here."""

    gpu: str
    models: tuple[str, ...] = Field(min_length=1)  # folder names of data/models, or paths
    family: str | None = None  # default: the folder name up to its first dash
    approval: bool = False  # hold until `python -m flows approve RELEASE`

    @field_validator("gpu")
    @classmethod
    def _gpu_names_a_cell(cls, gpu: str) -> str:
        return check_part("gpu", gpu)

    @field_validator("family")
    @classmethod
    def _family_names_a_cell(cls, family: str | None) -> str | None:
        return None if family is None else check_part("family", family)


class TrafficSource(_Strict):
    """What is replayed through the router, and which mix weights the baselines."""

    source: str
    format: str | None = None  # of data.readers.FORMATS; None: the content tells
    mix: str = "chat"

    @field_validator("format")
    @classmethod
    def _format_is_known(cls, format: str | None) -> str | None:
        if format is not None and format not in FORMATS:
            raise ValueError(f"unknown format; known: {', '.join(FORMATS)}")
        return format

    @field_validator("mix")
    @classmethod
    def _mix_is_known(cls, mix: str) -> str:
        if mix not in MIXES:
            raise ValueError(f"unknown mix; {nearest(mix, MIXES)}")
        return mix


class Candidate(_Strict):
    """The file's content; see data/candidates/torch-flash-cpu.yaml for every key."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    engine: Literal["torch"]  # other engines are driven by later versions
    environment: str
    policy: str
    waves: tuple[Wave, ...] = Field(min_length=1)
    plan: str = "full"
    traffic: TrafficSource
    golden: str = "data/golden/golden.jsonl"  # prompts whose answers a rule can judge: data/golden_set.py
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
    golden_path: Path
    cells: tuple[Cell, ...]
    identity: str  # hash of candidate, policy, plan, thresholds, environment, traffic, golden set and models

    def traffic(self) -> Traffic:
        """The recorded requests as the plan wants them; every stage that asks gets the same."""
        from data.recorded import read_traffic

        return read_traffic(
            self.traffic_path, format=self.candidate.traffic.format, max_requests=self.plan.traffic.max_requests
        )

    def golden(self) -> Drawn:
        """The golden prompts that the plan asks for."""
        from data.golden_set import draw

        return draw(self.golden_path, self.plan.replay)


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
    if candidate.traffic.format is None:
        format_of(traffic_path)
    golden_path = _find(path, "golden", candidate.golden)
    plan = load_plan(candidate.plan)
    from data.golden_set import draw

    draw(golden_path, plan.replay)
    cells = tuple(_cell(path, wave, model) for wave in candidate.waves for model in wave.models)
    _check_cells(path, cells)
    parts = [
        candidate.model_dump_json(exclude={"name"}),
        policy_path.read_text(),
        plan.model_dump_json(),
        (repo_dir() / "gates" / "thresholds.yaml").read_text(),
        environment.digest(),
        _digest(traffic_path),
        _digest(golden_path),
        *(model_revision(folder) for folder in dict.fromkeys(cell.model_path for cell in cells)),
    ]
    identity = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return Loaded(
        file=path.resolve(),
        candidate=candidate,
        plan=plan,
        policy_path=policy_path,
        traffic_path=traffic_path,
        golden_path=golden_path,
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
    if not is_file(path):
        folder = repo_dir() / "data" / "candidates"
        known = [str(p.relative_to(repo_dir())) for p in folder.rglob("*.yaml")]
        raise UserError(f"candidate {path}: no such file; {nearest(str(path), known)}")
    content = read_yaml(path)
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
        raise UserError(f"{path}: {where}: {message} (got {shown(first['input'])})") from error


def _find(candidate: Path, key: str, name: str) -> Path:
    """A file named by a candidate: relative to the repository, or absolute."""
    path = Path(name) if Path(name).is_absolute() else repo_dir() / name
    if is_dir(path):
        raise UserError(f"{candidate}: {key}: {name} is a folder; name a file")
    if not is_file(path):
        siblings = [p.name for p in path.parent.glob("*")] if is_dir(path.parent) else []
        raise UserError(f"{candidate}: {key}: {name} is not there; {nearest(path.name, siblings)}".rstrip("; "))
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cell(candidate: Path, wave: Wave, model: str) -> Cell:
    folder = model_path(model)
    if not is_file(folder / "config.json"):
        raise UserError(
            f"{candidate}: waves.models: no model at {folder}; run `make model`, or name the folder of a "
            f"transformers causal LM"
        )
    family = wave.family or family_of(model)
    try:
        check_part("family", family)
    except UserError as error:
        raise UserError(f"{candidate}: waves.models: {error}, or set `family` in the wave of {model}") from error
    return Cell(gpu=wave.gpu, family=family, model=folder.name, model_path=folder, approval=wave.approval)


def _check_cells(candidate: Path, cells: Sequence[Cell]) -> None:
    """Two models in one cell would share its record: the second would pass for promoted with the first."""
    seen: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        other = seen.setdefault((cell.gpu, cell.family), cell)
        if other is not cell:
            raise UserError(
                f"{candidate}: waves: {other.model} and {cell.model} are both {cell.gpu} {cell.family}, "
                f"which one release serves; give one a wave of its own with another `family`"
            )
