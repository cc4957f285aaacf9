"""The baseline matrix: what is measured with what, declared as data and cut to what a traffic mix weights.

    matrix = load_matrix("hopper")            # data/baselines/hopper.yaml, or a path
    cells = cells(matrix, load_mix("chat"))

The axes are GPU x backend x dtype x KV dtype x heads x length x batch x KV layout x execution. Prefill, decode and
extend are three families with axes of their own, and never merge. The lengths are those of the mix's shape buckets, so
that no ideal shape is measured for its own sake. Dtypes, heads, layouts and executions are alternatives: a service has
one of each. The batches of a decode bucket add up instead, each with its share of the sequences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from attention.backends import expand
from attention.cases import AttentionCase, DType, Execution, Layout, kv_dtype_of
from attention.errors import UserError, is_file, nearest, shown
from attention.validated import validated
from attention.yaml_file import read_yaml
from data.mix import Mix
from data.requests import Bucket, Family

FOLDER = Path(__file__).parent / "baselines"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Heads(_Section):
    """Heads per rank, and their dims."""

    q: int = Field(ge=1)
    kv: int = Field(ge=1)
    dim_qk: int = Field(ge=1)
    dim_vo: int = Field(ge=1)

    @model_validator(mode="after")
    def _grouped(self) -> Heads:
        if self.q % self.kv:
            raise ValueError(f"q={self.q} is no multiple of kv={self.kv}")
        return self


class KVLayout(_Section):
    """A layout of keys and values, with its page size where it has pages."""

    layout: Layout
    page_size: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> KVLayout:
        if self.layout.startswith("paged") != (self.page_size is not None):
            raise ValueError(f"layout={self.layout} and page_size={self.page_size} do not go together")
        return self


class FamilyAxes(_Section):
    layouts: tuple[KVLayout, ...] = Field(min_length=1)
    executions: tuple[Execution, ...] = Field(min_length=1)


class Families(_Section):
    prefill: FamilyAxes
    decode: FamilyAxes
    extend: FamilyAxes


class DecodeBatches(_Section):
    """How many sequences decode together: which share of the sequences does so in a batch of which size."""

    reason: str = Field(min_length=1)
    shares: dict[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0, le=1)]] = Field(min_length=1)
    max_tokens: int = Field(ge=16)  # keys that a batch may hold: a cache has no room for 64 sequences of any length

    @field_validator("shares")
    @classmethod
    def _whole(cls, shares: dict[int, float]) -> dict[int, float]:
        if abs(sum(shares.values()) - 1) > 1e-9:
            raise ValueError(f"the shares sum to {sum(shares.values()):g}, not to 1")
        return shares

    def at(self, kv_len: int) -> dict[int, float]:
        """Shares by batch size for sequences of `kv_len` keys: what is too large for `max_tokens` is cut to fit."""
        found: dict[int, float] = defaultdict(float)
        for batch, share in self.shares.items():
            found[max(1, min(batch, self.max_tokens // kv_len))] += share
        return dict(found)


class BaselineMatrix(_Section):
    """Axes, and the cut. Lengths are tokens."""

    gpus: tuple[str, ...] = Field(min_length=1)  # names as waves spell them (`nvidia-h200`, `cpu`), or `any`
    backends: tuple[str, ...] = Field(min_length=1)  # backends or families
    dtypes: tuple[DType, ...] = Field(min_length=1)
    kv_dtypes: tuple[str, ...] = Field(min_length=1)
    heads: tuple[Heads, ...] = Field(min_length=1)
    families: Families
    decode_batches: DecodeBatches
    min_weight: float = Field(ge=0, lt=1)  # buckets with a smaller share of their family's work fall out
    max_kv_len: int = Field(ge=16)  # so do longer ones
    cells_per_family: int = Field(ge=1)  # of the rest the heaviest buckets of a family stay

    @field_validator("backends")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            expand(name)
        return names

    @field_validator("kv_dtypes")
    @classmethod
    def _spelled(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(kv_dtype_of, names)))

    def covers(self, gpu: str) -> bool:
        """Whether it is meant for a GPU of that name."""
        return "any" in self.gpus or gpu in self.gpus

    def contenders(self) -> tuple[str, ...]:
        """Every kernel that its backends and families name, once, in order."""
        return tuple(dict.fromkeys(kernel for name in self.backends for kernel in expand(name)))


@dataclass(frozen=True)
class MatrixCell:
    """One case to measure, and how often the traffic calls it."""

    bucket: Bucket
    case: AttentionCase
    calls: float  # calls of this case that 1000 requests of the mix cost in one layer


def load_matrix(name: str) -> BaselineMatrix:
    """A matrix by name (data/baselines/<name>.yaml) or by path. Raises UserError with what is wrong where."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not is_file(path):
        known = nearest(name, (p.stem for p in FOLDER.glob("*.yaml")))
        raise UserError(f"baseline matrix {shown(name)}: no file {path}; {known}")
    models = (BaselineMatrix, Families, FamilyAxes, KVLayout, Heads, DecodeBatches)
    return validated(BaselineMatrix, read_yaml(path), path, {field for model in models for field in model.model_fields})


def cells(matrix: BaselineMatrix, mix: Mix) -> list[MatrixCell]:
    """Every case that the matrix measures for a mix: families in their order, a family's heaviest buckets first.

    Raises UserError when the cut leaves nothing.
    """
    found = [cell for bucket in kept(matrix, mix.buckets()) for cell in _cells(matrix, bucket)]
    if not found:
        raise UserError(
            f"mix {mix.name}: no bucket has at least {matrix.min_weight:g} of its family's work and at most "
            f"{matrix.max_kv_len} keys; lower min_weight, raise max_kv_len or take another mix"
        )
    return found


def kept(matrix: BaselineMatrix, buckets: Sequence[Bucket]) -> list[Bucket]:
    """The buckets that the cut leaves, heaviest of a family first."""
    found: list[Bucket] = []
    for family in get_args(Family):
        mine = [b for b in buckets if b.family == family]
        mine = [b for b in mine if b.weight >= matrix.min_weight and b.kv_len <= matrix.max_kv_len]
        found += sorted(mine, key=lambda b: -b.weight)[: matrix.cells_per_family]
    return found


def covered(cells: Sequence[MatrixCell]) -> dict[Family, float]:
    """Share of each family's work that lies in the buckets of the cells; a family without cells is not there."""
    weights: dict[Family, float] = defaultdict(float)
    for bucket in dict.fromkeys(cell.bucket for cell in cells):
        weights[bucket.family] += bucket.weight
    return dict(weights)


def _cells(matrix: BaselineMatrix, bucket: Bucket) -> Iterator[MatrixCell]:
    axes: FamilyAxes = getattr(matrix.families, bucket.family)
    batches = matrix.decode_batches.at(bucket.kv_len) if bucket.family == "decode" else {1: 1.0}
    alternatives = product(matrix.dtypes, matrix.kv_dtypes, matrix.heads, axes.layouts, axes.executions)
    for dtype, kv_dtype, heads, layout, execution in alternatives:
        for batch, share in batches.items():
            case = AttentionCase(
                phase=bucket.family,
                batch=f"{batch}q{bucket.q_len}s{bucket.kv_len}",
                heads_q=heads.q,
                heads_kv=heads.kv,
                head_dim_qk=heads.dim_qk,
                head_dim_vo=heads.dim_vo,
                dtype=dtype,
                kv_dtype=kv_dtype,
                layout=layout.layout,
                page_size=layout.page_size,
                execution=execution,
            )
            work = batch if bucket.family == "decode" else case.num_pairs()
            yield MatrixCell(bucket, case, bucket.units * share / work)
