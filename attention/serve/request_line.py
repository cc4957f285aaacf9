"""The log's line of a request that has ended: what it really ran, by the execution layer. No prompt and no output."""

from __future__ import annotations

from typing import Any

from attention.cases import Phase, shape_bucket
from attention.fingerprint import Identity
from attention.scheduler import Generation
from attention.serve.request_log import RequestRow

#: The distribution that brings a family's kernels.
_PACKAGES = {
    "torch_sdpa": "torch",
    "flex_attention": "torch",
    "flash_attn": "flash-attn",
    "flashinfer": "flashinfer-python",
    "triton": "triton",
}
_KEPT = (
    "request_id", "session_id", "role", "shadow", "endpoint", "stream", "status", "finish_reason", "prompt_tokens",
    "output_tokens", "queue_s", "ttft_s", "tpot_s", "e2e_s", "requested_backend", "fallback", "fallback_reason",
    "num_nonfinite", "fingerprint_id", "error",
)  # fmt: skip


def request_line(row: RequestRow, generation: Generation, identity: Identity | None) -> dict[str, Any]:
    """Fields of the event `request_finished`. `identity`: of the fingerprint; None before the start is complete."""
    lengths: dict[Phase, int] = {
        "prefill": len(generation.prompt_ids),
        "extend": len(generation.prompt_ids),
        "decode": len(generation.prompt_ids) + len(generation.output_ids),
    }
    dtype = identity.dtype if identity else None
    return {
        **{name: getattr(row, name) for name in _KEPT},
        "model": identity.model_id if identity else None,
        "model_revision": identity.model_revision if identity else None,
        "reused_prompt_tokens": generation.num_reused,
        "graph_hits": generation.num_graph_steps,
        "phases": {
            phase: {
                "resolved": resolved,
                "confirmed": generation.confirmed[phase],
                "package": _package(generation.confirmed[phase], identity),
                "shape_bucket": (bucket := shape_bucket(phase, lengths[phase])),
                "kernel_signature": f"{generation.confirmed[phase]} {bucket} {dtype}",
            }
            for phase, resolved in generation.resolved.items()
        },
    }


def _package(backend: str, identity: Identity | None) -> str | None:
    """`flash-attn 2.8.3`: what the backend that ran came with."""
    name = _PACKAGES.get(backend.partition(":")[0])
    if identity is None or name is None:
        return None
    version = identity.torch if name == "torch" else identity.distributions.get(name, "").rpartition("+")[0]
    return f"{name} {version}".strip()
