"""What PyTorch itself says about one of its SDPA kernels on a CUDA device: a cross-check of our own rules.

`torch.backends.cuda.can_use_*` answers with its first failing reason only, as a C++ warning on stderr that may
be given once a process; so it is told beside our reasons and replaces none of them.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attention.cases import AttentionCase


def refusal(backend: str, case: AttentionCase, device: str) -> str | None:
    """PyTorch's reason to refuse `torch_sdpa:{flash,efficient,cudnn}` for the case's longest member; None when it
    does not refuse, or cannot be asked (another backend, a CPU)."""
    family, _, kernel = backend.partition(":")
    if family != "torch_sdpa" or kernel not in ("flash", "efficient", "cudnn") or not device.startswith("cuda"):
        return None
    import torch
    from torch.backends import cuda

    longest = max(case.members, key=lambda m: m.q_len)
    dtype = getattr(torch, case.dtype)

    def empty(heads: int, tokens: int, dim: int) -> torch.Tensor:
        return torch.empty(1, heads, tokens, dim, dtype=dtype, device=device)

    q = empty(case.heads_q, longest.q_len, case.head_dim_qk)
    k = empty(case.heads_kv, longest.kv_len, case.head_dim_qk)
    v = empty(case.heads_kv, longest.kv_len, case.head_dim_vo)
    square = longest.q_len == longest.kv_len
    masked = case.window != (None, None) or (case.causal and not square and longest.q_len > 1)
    mask = torch.ones(longest.q_len, longest.kv_len, dtype=torch.bool, device=device) if masked else None
    causal = case.causal and square and mask is None
    # The class is re-exported from C++ without types.
    params: Any = cuda.SDPAParams(q, k, v, mask, 0.0, causal, case.gqa_ratio > 1)
    ask = getattr(cuda, f"can_use_{kernel}_attention")
    with _stderr() as said:
        allowed = ask(params, True)
    return None if allowed else tidy(said[0]) or "refused without a reason"


def tidy(text: str) -> str:
    """One line of C++ warnings, without their places and counts."""
    without = re.sub(r"\[W[^\]]*\]|\(Triggered internally at [^)]*\)|\(function [^)]*\)|Warning:", " ", text)
    return " ".join(without.split())[:300]


@contextmanager
def _stderr() -> Iterator[list[str]]:
    """What C++ code writes to file descriptor 2 meanwhile; the list holds it at the end."""
    said: list[str] = []
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
