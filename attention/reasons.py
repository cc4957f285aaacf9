"""Why a backend cannot run a case: a fixed vocabulary, so that reasons can be counted and compared.

The codes are those that the public reports of the field need (each names one failing dimension);
free text lives only in `message`.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Code(StrEnum):
    IMPORT_FAILED = "IMPORT_FAILED"
    ABI_MISMATCH = "ABI_MISMATCH"
    ARCH_UNSUPPORTED = "ARCH_UNSUPPORTED"
    DTYPE_UNSUPPORTED = "DTYPE_UNSUPPORTED"
    KV_DTYPE_UNSUPPORTED = "KV_DTYPE_UNSUPPORTED"
    HEAD_DIM_UNSUPPORTED = "HEAD_DIM_UNSUPPORTED"
    GQA_RATIO_UNSUPPORTED = "GQA_RATIO_UNSUPPORTED"
    PAGE_SIZE_UNSUPPORTED = "PAGE_SIZE_UNSUPPORTED"
    LAYOUT_UNSUPPORTED = "LAYOUT_UNSUPPORTED"
    STRIDE_UNSUPPORTED = "STRIDE_UNSUPPORTED"
    MASK_UNSUPPORTED = "MASK_UNSUPPORTED"
    SWA_UNSUPPORTED = "SWA_UNSUPPORTED"
    SWA_IGNORED = "SWA_IGNORED"
    SOFTCAP_UNSUPPORTED = "SOFTCAP_UNSUPPORTED"
    SOFTCAP_IGNORED = "SOFTCAP_IGNORED"
    ALIBI_UNSUPPORTED = "ALIBI_UNSUPPORTED"
    ALIBI_IGNORED = "ALIBI_IGNORED"
    SINK_UNSUPPORTED = "SINK_UNSUPPORTED"
    SINK_IGNORED = "SINK_IGNORED"
    KV_SCALE_IGNORED = "KV_SCALE_IGNORED"
    EMPTY_KV_UNSUPPORTED = "EMPTY_KV_UNSUPPORTED"
    EMPTY_ROW_SEMANTICS = "EMPTY_ROW_SEMANTICS"
    PAD_POISON = "PAD_POISON"
    LSE_BASE = "LSE_BASE"
    CAUSAL_ALIGNMENT = "CAUSAL_ALIGNMENT"
    INDEX_RANGE = "INDEX_RANGE"
    GRAPH_CAPTURE_FAILED = "GRAPH_CAPTURE_FAILED"
    GRAPH_REPLAY_STALE = "GRAPH_REPLAY_STALE"
    JIT_COMPILE_FAILED = "JIT_COMPILE_FAILED"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    TIMEOUT = "TIMEOUT"
    NUMERIC_DRIFT = "NUMERIC_DRIFT"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    BATCH_VARIANT = "BATCH_VARIANT"
    SUBKERNEL_CHANGED = "SUBKERNEL_CHANGED"
    UNCONFIRMED = "UNCONFIRMED"  # the execution layer named another backend, or none that we know
    NOT_PROBED = "NOT_PROBED"  # nothing was run, so nothing is known
    POLICY_EXCLUDED = "POLICY_EXCLUDED"  # the policy, not the backend, says no


#: Ends the message of a reason that holds in this process alone: a library remembers an earlier call.
IN_ANOTHER_PROCESS = "use another process"


class Reason(BaseModel):
    """One failing dimension: what was asked, what would be allowed, and who says so."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: Code
    dimension: str  # head_dim, dtype, window, gpu, ...
    observed: str
    allowed: str
    source: str  # where the rule stands, or `probe` for an observation
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message} ({self.dimension}={self.observed}, allowed {self.allowed})"
