"""Confirmation: which backend the execution layer says ran, not which one was asked for.

On the CPU that is the operator that PyTorch dispatched to, on a GPU the kernel that was launched.
Patterns are data; a name that matches none is `unconfirmed(<name>)`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

# The profiler library writes a line per start and stop to stderr otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

T = TypeVar("T")

#: (substring of an operator or kernel name, backend). The first match in this order wins: math is
#: last, since its matrix products and softmax also appear beside fused kernels.
PATTERNS: tuple[tuple[str, str], ...] = (
    ("attention_release_paged_", "triton:paged"),
    ("pytorch_flash::flash_fwd", "torch_sdpa:flash"),
    ("fmha_cutlassF_", "torch_sdpa:efficient"),
    ("cudnn_generated_fort_native_sdpa", "torch_sdpa:cudnn"),
    ("flashinfer::", "flashinfer:fa2"),
    ("aten::_scaled_dot_product_flash_attention", "torch_sdpa:flash"),
    ("aten::_scaled_dot_product_efficient_attention", "torch_sdpa:efficient"),
    ("aten::_scaled_dot_product_cudnn_attention", "torch_sdpa:cudnn"),
    ("aten::_scaled_dot_product_attention_math", "torch_sdpa:math"),
)


def backend_of(names: Iterable[str]) -> str:
    """The backend that a set of operator and kernel names stands for."""
    seen = sorted(set(names))
    for pattern, backend in PATTERNS:
        if any(pattern in name for name in seen):
            return backend
    attention_like = [n for n in seen if "attention" in n or "softmax" in n or "gemm" in n]
    return f"unconfirmed({', '.join((attention_like or seen)[:3]) or 'nothing ran'})"


def watch(call: Callable[[], T], *, device: str = "cpu") -> tuple[T, str]:
    """Run `call` under the profiler: its result, and the backend that the execution layer names."""
    if device.startswith("cuda"):
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            result = call()
        return result, backend_of(event.key for event in seen.key_averages())
    # The older profiler starts in microseconds and needs no tracing library.
    from torch.autograd.profiler import profile as operators

    with operators(use_kineto=False) as recorded:
        result = call()
    return result, backend_of(event.name for event in recorded.function_events)
