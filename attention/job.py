"""What a measuring command is told: a JSON file, checked before any work (`--job job.json --out DIR`).

Every verb shares `Setup`, so that all of them, and the serving process, have one fingerprint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from attention.cases import REPLAY_INPUTS, AttentionCase, Inputs
from attention.errors import UserError
from attention.limits import Limits
from attention.outcomes import Outcome


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Setup(_Strict):
    """One side of a release: the model, the policy and how the process runs."""

    model: Path
    policy: Path
    device: str = "cpu"
    dtype: str = "auto"
    page_size: int = 16
    num_pages: int = 1024
    # One thread a process: sides run side by side on the same cores, and OpenMP teams that
    # share cores wait for each other (measured on two cores: 10 times slower, not faster).
    num_threads: int = 1
    limits: Limits = Limits()  # of the serving process; in every verb's fingerprint, so that their ids agree
    fault: str | None = None


class Evidence(_Strict):
    """Where rows go and whose they are."""

    lake: Path
    release_id: str
    side: Literal["champion", "control", "candidate"]
    gpu: str = "cpu"


class FingerprintJob(_Strict):
    verb: Literal["fingerprint"] = "fingerprint"
    setup: Setup
    evidence: Evidence | None = None


class ProbeJob(_Strict):
    verb: Literal["probe"] = "probe"
    setup: Setup
    evidence: Evidence | None = None
    timeout_s: float = 120.0
    level: Literal["startup", "full"] = "startup"


class Prompt(_Strict):
    prompt_id: str
    category: str
    language: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    max_tokens: int = 16


class TensorPlan(_Strict):
    """Tensor layer: every case x inputs x seed on the backends that the policy resolves to.

    `window_edge` inputs run where the case has a window. `activations` is the file that holds them; who finds it
    missing writes it, so both sides of a release name one and run on equal inputs.
    """

    seeds: tuple[int, ...]
    max_kv_len: int
    inputs: tuple[Inputs, ...] = REPLAY_INPUTS
    kv_dtypes: tuple[str, ...] = ("auto",)  # of the cache: auto is q's dtype; float8_e4m3fn where a service quantises
    activations: Path | None = None  # default: activations.safetensors beside the job's results
    truths: Path | None = None  # folder of the oracle's answers, shared by whoever names it; default: compute anew


class ModelPlan(_Strict):
    """Model layer: final hidden states, teacher-forced, as prefill scoring and as forced decode.

    With `floors`, a folder that outlives the release, the side is recorded a second sound way too, unless that folder
    knows already how far the two are apart.
    """

    prompts: tuple[Prompt, ...]
    max_tokens: int  # tokens kept of each prompt
    decode_tokens: int  # the last of these are forced one by one through the cache
    floors: Path | None = None


class BusinessPlan(_Strict):
    """Business layer: greedy answers to the golden set, batched as in serving."""

    prompts: tuple[Prompt, ...]
    batch: int = 16


class ReplayJob(_Strict):
    """One side's recording of all three layers, in one process: the model is loaded once."""

    verb: Literal["replay"] = "replay"
    setup: Setup
    evidence: Evidence
    tensor: TensorPlan
    model: ModelPlan
    business: BusinessPlan


class CompareJob(_Strict):
    """Compare recordings of the model layer through one lm_head: both sides, and the champion with its floor."""

    verb: Literal["compare"] = "compare"
    setup: Setup
    evidence: Evidence
    champion: Path
    candidate: Path
    floor: Path | None = None  # the champion's second recording, where it made one
    known_floor: Path | None = None  # where the floor's figures are, or are to be kept
    top_k: int = 10


class BenchJob(_Strict):
    """A resident worker that times what its stdin asks for."""

    verb: Literal["bench"] = "bench"
    setup: Setup
    with_model: bool = False


class BenchCommand(_Strict):
    """One request of the caller: time `case` for at least `min_s`, as attention, as a model step, or a ceiling.

    `backend`: default the one that the policy resolves to. `replicas` of the buffers, at most, that calls rotate over.
    `slowdown`, a drill's, is the share that each call takes longer.
    """

    metric: Literal["kernel_s", "ttft_s", "tpot_s", "matmul_s", "read_s"]
    case: AttentionCase
    min_s: float = Field(ge=0, allow_inf_nan=False)
    backend: str | None = None
    replicas: int = Field(default=2, ge=1, le=64)
    slowdown: float = Field(default=0.0, ge=0, le=10)


class BenchSample(BaseModel):
    """Answer of the worker: raw seconds of the calls, what ran, and, once a case, what its first run showed
    (`attention.contender.Ready`)."""

    seconds: tuple[float, ...] = ()
    num_replicas: int = 1  # call i was on replica i modulo this
    outcome: Outcome = "measured"
    error: str | None = None
    backend: str | None = None
    confirmed: str | None = None
    work: float | None = None  # of a ceiling: FLOPs or bytes of one call
    first_call_s: float | None = None
    cold_ratio: float | None = None
    workspace_bytes: int | None = None
    peak_bytes: int | None = None
    graph_capture: str | None = None
    num_waited: int = 0  # blocks so far in which the device waited for the host: its time is in their seconds


class StressJob(_Strict):
    """Load on the scheduler of one side at one bound on running requests (attention/stress.py).

    `saturation_per_s` is the champion's, whose shares `levels` are; without it the side's own, measured first.
    """

    verb: Literal["bench stress"] = "bench stress"
    setup: Setup
    #: To draw from: prompt tokens, output tokens, and how many requests it stands for.
    lengths: tuple[tuple[PositiveInt, PositiveInt, PositiveFloat], ...] = Field(min_length=1)
    max_running: int = Field(ge=1)
    saturation_requests: int  # offered at once
    saturation_per_s: float | None = Field(default=None, gt=0)
    levels: tuple[PositiveFloat, ...] = Field(min_length=1)
    duration_s: float = Field(gt=0)  # of arrivals at each level
    slo_ttft_s: float = Field(gt=0)
    slo_tpot_s: float = Field(gt=0)
    seed: int = Field(default=0, ge=0)
    random_weights: bool = False  # those of the model are not read: speed does not depend on them

    @field_validator("saturation_requests")
    @classmethod
    def _has_a_middle(cls, value: int, info: ValidationInfo) -> int:
        running = info.data.get("max_running", 0)
        if value < 4 * running:
            raise ValueError(
                f"give {4 * running} or more, four times max_running: the first and the last of a burst find "
                "no full batch and are left out"
            )
        return value


JobT = TypeVar("JobT", bound=BaseModel)


def read_job(path: Path, kind: type[JobT]) -> JobT:
    """A job file as its model. UserError names the file, the key and the problem."""
    try:
        return kind.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise UserError(f"job {path}: cannot be read ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise UserError(f"job {path}: not JSON ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"job {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def write_result(out: Path, result: BaseModel | dict[str, Any]) -> None:
    """`result.json`, whole or not at all; its presence means that the job is done."""
    out.mkdir(parents=True, exist_ok=True)
    text = result.model_dump_json(indent=1) if isinstance(result, BaseModel) else json.dumps(result, indent=1)
    temporary = out / ".result.json.tmp"
    temporary.write_text(text + "\n")
    temporary.rename(out / "result.json")
