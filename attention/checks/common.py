"""What every check is made of: running a backend on a problem, comparing, and saying why not.

Shape suffixes as in `attention.backends.base`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from attention.backends.base import Backend
from attention.backends.oracle import Truth
from attention.cases import AttentionCase, Sequence, phase_of
from attention.errors import one_line
from attention.reasons import Code, Reason
from attention.replay.figures import compare
from attention.replay.members import Member
from attention.replay.problems import Problem, build, members_of, spec_of

Result = tuple[torch.Tensor, torch.Tensor | None]

# Sanity limits, in units of the dtype class's own error (R_rms). They catch what is plainly wrong within
# seconds; the replay gate, with its calibrated limits, judges the rest. float8 KV: kernels may also round Q and
# P to three mantissa bits, 32 times coarser than bfloat16; a scale that is lost makes hundreds.
MAX_RATIO = {"bfloat16": 10.0, "float16": 10.0, "float32": 100.0, "float8": 64.0}

# Relative L2 error within which two outputs are the same answer: far above any rounding, far below what a
# feature that is ignored does to the inputs of its check.
SAME_ANSWER = {"bfloat16": 0.05, "float16": 0.05, "float32": 0.02, "float8": 0.2}

# Absolute error of an LSE of a few units; scores accumulate in float32 in every class.
LSE_ERROR = {"bfloat16": 0.02, "float16": 0.02, "float32": 2e-3, "float8": 0.2}


class NotApplicable(list[Reason]):
    """An empty result that is no pass: the check had nothing to test, and `why` says so."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why


class Measured(list[Reason]):
    """An empty result with a figure that is reported, not judged."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


class Skip(Exception):
    """Raised inside a check that turns out not to apply; `run_check` answers NotApplicable."""


def dtype_class(case: AttentionCase) -> str:
    """The row of the limits that holds for a case: its dtype, or float8 where K and V are quantised."""
    return case.dtype if case.kv_dtype in ("auto", case.dtype) else "float8"


def reason(code: Code, dimension: str, observed: str, allowed: str, message: str) -> Reason:
    return Reason(code=code, dimension=dimension, observed=observed, allowed=allowed, source="probe", message=message)


#: (words in an exception's text, code): the dimension that a library's refusal names. The first match wins.
_WORDS: tuple[tuple[str, Code], ...] = (
    (r"undefined symbol|abi ", Code.ABI_MISMATCH),
    (r"ninja|nvcc|ptxas|failed to compile|compilation", Code.JIT_COMPILE_FAILED),
    (r"sm_?\d\d|compute capability|only supports? .*(hopper|ampere|blackwell)|no kernel image", Code.ARCH_UNSUPPORTED),
    (r"strides?\b|contiguous", Code.STRIDE_UNSUPPORTED),
    (r"head.?(dim|size)", Code.HEAD_DIM_UNSUPPORTED),
    (r"group.?size|gqa", Code.GQA_RATIO_UNSUPPORTED),
    (r"(page|block).?size", Code.PAGE_SIZE_UNSUPPORTED),
    (r"soft.?cap", Code.SOFTCAP_UNSUPPORTED),
    (r"\bsinks?\b", Code.SINK_UNSUPPORTED),
    (r"alibi", Code.ALIBI_UNSUPPORTED),
    (r"window", Code.SWA_UNSUPPORTED),
    (r"dtype|data ?type", Code.DTYPE_UNSUPPORTED),
    (r"layout", Code.LAYOUT_UNSUPPORTED),
    (r"mask", Code.MASK_UNSUPPORTED),
)


def raised(stage: str, error: Exception, default: Code = Code.LAUNCH_FAILED) -> Reason:
    """The reason of an exception: the dimension that its text names, else `default`."""
    text = one_line(error)[:400] or type(error).__name__
    named = next((code for words, code in _WORDS if re.search(words, text, re.IGNORECASE)), None)
    code = named or (Code.IMPORT_FAILED if isinstance(error, ImportError) else default)
    return reason(code, stage, type(error).__name__, "no exception", text)


def variant(backend: Backend, case: AttentionCase, **changes: Any) -> AttentionCase:
    """The case with other fields (its phase follows its batch). Skip when the backend declares that it refuses it."""
    # Validated anew: model_copy would not.
    other = AttentionCase.model_validate({**case.model_dump(), **changes})
    other = other.model_copy(update={"phase": longest_phase(other.members)})
    refused = backend.check(other)
    if refused:
        raise Skip(f"{backend.name} declares that it refuses {other.case_id}: {'; '.join(map(str, refused))}")
    return other


def longest_phase(members: tuple[Sequence, ...]) -> Any:
    """The phase of the member with the longest query."""
    longest = max(members, key=lambda m: m.q_len)
    return phase_of(longest.q_len, longest.kv_len)


def batch_text(members: Iterable[tuple[int, int]]) -> str:
    return "_".join(f"q{q}s{kv}" for q, kv in members)


def plain(case: AttentionCase, device: str, *, seed: int = 11, **changes: Any) -> tuple[Problem, list[Member]]:
    """A problem of random inputs, its unowned slots zero, so that a leak is not mistaken for what is tested."""
    spec = replace(spec_of(case), **changes)
    members = members_of(case, spec, "normal", seed)
    return build(case, spec, members, seed=seed, device=device, poison=(0.0, 0.0)), members


def run(backend: Backend, problem: Problem, **inputs: Any) -> Result:
    """Plan and run a problem once; `q_THD`, `k` and `v` may be others of the same values."""
    problem = replace(problem, **inputs)
    planned = backend.plan(problem.batch, problem.spec)
    with torch.inference_mode():
        result = planned.run(problem.q_THD, problem.k, problem.v)
    settle(problem.q_THD)
    return result


def settle(tensor: torch.Tensor) -> None:
    """Wait for the device, so that an illegal access is raised here and not in the next check."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def distance(out: torch.Tensor, other: torch.Tensor) -> float:
    """Relative L2 distance; infinite where `out` is not finite and `other` is."""
    error = float((out.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf


def non_finite(out_THD: torch.Tensor, truth: Truth) -> list[Reason]:
    """Reasons of an output that is not finite: rows that see no key, and all the others."""
    bad_T = (~torch.isfinite(out_THD)).flatten(1).any(-1)
    empty_T = torch.isinf(truth.lse_QH).all(-1)
    found = []
    if bool((bad_T & empty_T).any()):
        found.append(
            reason(
                Code.EMPTY_ROW_SEMANTICS,
                "rows without a visible key",
                f"NaN or Inf in {int((bad_T & empty_T).sum())} rows",
                "0",
                "a row that sees no key must give 0",
            )
        )
    if bool((bad_T & ~empty_T).any()):
        found.append(
            reason(
                Code.PAD_POISON,
                "finite mask",
                "NaN or Inf where the oracle is finite",
                "finite",
                "non-finite output: unused slots hold NaN, so they leak or the kernel overflows",
            )
        )
    return found


def judge(out_THD: torch.Tensor, problem: Problem, case: AttentionCase, message: str) -> list[Reason]:
    """Reasons of an output that is not the problem's truth within the sanity limits; empty when it is."""
    if out_THD.shape != problem.truth.out_QHD.shape:
        shapes = str(tuple(out_THD.shape)), str(tuple(problem.truth.out_QHD.shape))
        return [reason(Code.NUMERIC_DRIFT, "shape", *shapes, message)]
    if not out_THD.numel():
        return []
    found = non_finite(out_THD, problem.truth)
    limit = MAX_RATIO[dtype_class(case)]
    if not found:
        ratio = compare(out_THD, None, problem.truth, problem.spec.dtype).r_rms
        if not ratio <= limit:
            found.append(reason(Code.NUMERIC_DRIFT, "R_rms", f"{ratio:.3g}", f"<= {limit:g}", message))
    return found


def is_right(out_THD: torch.Tensor, problem: Problem, case: AttentionCase) -> bool:
    return not judge(out_THD, problem, case, "")


def same_bits(one: Result, other: Result) -> bool:
    return torch.equal(one[0], other[0]) and (one[1] is None or other[1] is None or torch.equal(one[1], other[1]))


def gap(one: Result, other: Result) -> str:
    """The size of a difference that rounding may explain, for messages; that of the LSE where it is another's."""
    found = f"max abs {float((one[0].double() - other[0].double()).abs().max()):.3g}"
    if one[1] is None or other[1] is None or torch.equal(one[1], other[1]):
        return found
    return f"{found}, of the LSE {float((one[1].double() - other[1].double()).abs().max()):.3g}"


def sinks_over(kv_len: int, heads_q: int) -> tuple[float, ...]:
    """Sinks that take about nine tenths of every row of `kv_len` random logits."""
    return (math.log(max(1, kv_len)) + 2.5,) * heads_q
