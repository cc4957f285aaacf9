"""A plan: how much evidence a release gathers, and the least that each gate accepts (data/plans/)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from attention.cases import REPLAY_INPUTS, Inputs, kv_dtype_of
from attention.errors import UserError, is_file, nearest, shown
from attention.yaml_file import read_yaml


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TrafficScale(_Section):
    """How the traffic file is played: real lengths are too long for a demo on two cores."""

    max_requests: int | None = Field(default=None, ge=1)  # of a longer log a stratified sample; None: all
    divide_lengths_by: int = Field(default=1, ge=1)
    max_output_tokens: int | None = Field(default=None, ge=1)
    requests_per_s: float = Field(gt=0)  # mean arrival rate; the file's gaps are scaled to it
    max_in_flight: int = Field(ge=1)


class ReplayPlan(_Section):
    seeds: int = Field(ge=1)  # tensor layer: seeds per case
    max_kv_len: int = Field(ge=16)
    inputs: tuple[Inputs, ...] = Field(default=REPLAY_INPUTS, min_length=1)  # tensor layer, each on every case and seed
    kv_dtypes: tuple[str, ...] = Field(default=("auto",), min_length=1)  # tensor layer: KV caches that are served
    model_prompts: int = Field(ge=1)
    model_tokens: int = Field(ge=8)  # teacher-forced tokens a prompt
    decode_tokens: int = Field(ge=1)  # of these, forced one by one through the KV cache
    golden_prompts: int | None = Field(default=None, ge=1)  # drawn from those that fit; None: all that fit
    golden_max_tokens: int = Field(ge=1)  # prompts that may need a longer answer are left out, never cut
    golden_max_chars: int | None = Field(default=None, ge=1)  # prompts longer than this are left out
    min_cases: int = Field(ge=1)
    min_positions: int = Field(ge=1)
    min_golden_passes: int = Field(ge=1)  # champion's successes, over all categories
    # Its successes in each category; None: the sample is too small to judge categories apart.
    min_category_passes: int | None = Field(default=None, ge=1)

    @property
    def golden_lengths(self) -> str:
        """The lengths of golden prompts that it allows, as it names them."""
        chars = "" if self.golden_max_chars is None else f", golden_max_chars {self.golden_max_chars}"
        return f"golden_max_tokens {self.golden_max_tokens}{chars}"

    @field_validator("inputs")
    @classmethod
    def _once(cls, value: tuple[Inputs, ...]) -> tuple[Inputs, ...]:
        return tuple(dict.fromkeys(value))

    @field_validator("kv_dtypes")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(kv_dtype_of, value)))


class StressPlan(_Section):
    """Open-loop load on an instance that serves nobody else: where is the knee, and who gives in first?"""

    levels: tuple[Annotated[float, Field(gt=0)], ...] = (0.5, 0.8, 1.0, 1.2)  # of the champion's saturation
    max_running: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)  # requests in a step: the concurrency
    saturation_requests: int = Field(ge=4)  # offered at once, to find the champion's saturation
    duration_s: float = Field(gt=0)  # of arrivals at each level
    slo_ttft_s: float = Field(gt=0)
    slo_tpot_s: float = Field(gt=0)


class BaselinePlan(_Section):
    cells_per_family: int = Field(ge=1)  # heaviest traffic buckets measured, of prefill, decode and extend each
    decode_batches: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)  # each is a cell of every bucket
    blocks: int = Field(ge=4)  # interleaved blocks a cell, before the first verdict
    processes: int = Field(ge=1)  # fresh ones in which every cell is measured: two equal ones differ for their lifetime
    max_blocks: int = Field(ge=4)  # of all processes; an ambiguous cell gets more, up to so many
    budget_s: float = Field(gt=0)  # for all cells: past it what is ambiguous stays so
    margin: float = Field(gt=0, lt=1)  # a smaller difference is SAME
    min_block_s: float = Field(gt=0)  # a block repeats the call until it lasts this long
    max_kv_len: int = Field(ge=16)
    model_steps: bool = True  # the model's own TTFT and TPOT too; without, canary alone measures them
    startup: bool = True  # first call of fresh processes, with empty caches and with warm ones
    stress: StressPlan | None = None
    min_weight: float = Field(ge=0, le=1)  # share of the traffic's work that the cells must cover


class ShadowPlan(_Section):
    requests: int = Field(ge=1)
    fraction: float = Field(gt=0, le=1)
    min_pairs: int = Field(ge=1)


class CanaryPlan(_Section):
    steps: tuple[Annotated[int, Field(ge=1, le=100)], ...]  # percent of live requests
    min_candidate_requests: int = Field(ge=1)
    window_requests: int = Field(ge=1)  # candidate requests a window
    max_extensions: int = Field(ge=0)  # times an inconclusive step may gather as much again
    hold_deadline_s: float = Field(ge=0)

    @model_validator(mode="after")
    def _rising(self) -> CanaryPlan:
        if list(self.steps) != sorted(set(self.steps)) or not self.steps or self.steps[-1] != 100:
            raise ValueError(f"steps must rise and end at 100, not {list(self.steps)}")
        return self


class ExpandPlan(_Section):
    requests: int = Field(ge=1)  # served by the candidate as the only backend, before the hand-over


class Plan(_Section):
    name: str
    traffic: TrafficScale
    replay: ReplayPlan
    baseline: BaselinePlan
    shadow: ShadowPlan
    canary: CanaryPlan
    expand: ExpandPlan


def load_plan(name: str) -> Plan:
    """A plan by name (data/plans/<name>.yaml) or by path. Raises UserError with what is wrong where."""
    folder = Path(__file__).parent / "plans"
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not is_file(path):
        raise UserError(f"plan {name!r}: no file {path}; {nearest(name, (p.stem for p in folder.glob('*.yaml')))}")
    try:
        return Plan.model_validate(read_yaml(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "plan"
        raise UserError(f"{path}: {where}: {first['msg']} (got {shown(first['input'])})") from error
