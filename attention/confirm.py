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

_CUDNN_KERNEL = "cudnn_generated_fort_native_sdpa"

#: (substring of an operator or kernel name, backend). The first match in this order wins: math is
#: last, since its matrix products and softmax also appear beside fused kernels.
PATTERNS: tuple[tuple[str, str], ...] = (
    ("pytorch_flash::flash_fwd", "torch_sdpa:flash"),
    ("fmha_cutlassF_", "torch_sdpa:efficient"),
    (_CUDNN_KERNEL, "torch_sdpa:cudnn"),
    # FlashInfer: the Hopper sources (hopper/prefill_sm90.cuh, mla_hopper.cuh) are its fa3. Its fa2 names end
    # in the same words, so the namespace belongs to the pattern.
    ("flashinfer::PrefillWithKVCacheKernel", "flashinfer:fa3"),
    ("flashinfer::FP8PrefillWithKVCacheKernel", "flashinfer:fa3"),
    ("BatchMLAPageAttentionHopperKernel", "flashinfer:fa3"),
    ("flashinfer::SinglePrefillWithKVCacheKernel", "flashinfer:fa2"),
    ("flashinfer::BatchPrefillWithPagedKVCacheKernel", "flashinfer:fa2"),
    ("flashinfer::BatchPrefillWithRaggedKVCacheKernel", "flashinfer:fa2"),
    ("flashinfer::SingleDecodeWithKVCacheKernel", "flashinfer:fa2"),
    ("flashinfer::BatchDecodeWithPagedKVCacheKernel", "flashinfer:fa2"),
    ("flashinfer::mla::BatchMLAPagedAttentionKernel", "flashinfer:fa2"),
    ("fmhaSm100", "flashinfer:trtllm-gen"),
    ("kernel_mha", "flashinfer:xqa"),
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
            return _caller_of_cudnn(seen) if pattern == _CUDNN_KERNEL else backend
    attention_like = [n for n in seen if "attention" in n or "softmax" in n or "gemm" in n]
    return f"unconfirmed({', '.join((attention_like or seen)[:3]) or 'nothing ran'})"


def _caller_of_cudnn(names: list[str]) -> str:
    """cuDNN's kernel has one name whoever calls it: PyTorch's call shows its operator, FlashInfer's does not.

    Kernels alone (of a captured graph, say) do not tell; they count as PyTorch's, the usual caller.
    """
    operators = [name for name in names if name.startswith("aten::")]
    by_torch = any("cudnn_attention" in name for name in operators)
    return "flashinfer:cudnn" if operators and not by_torch else "torch_sdpa:cudnn"


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
