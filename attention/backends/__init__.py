"""Attention backends, one module each behind the interface of `base`."""

from __future__ import annotations

from attention.backends.base import Backend
from attention.errors import UserError, nearest

#: Every backend that a policy may name here, in the order in which a family name lists its kernels.
NAMES: tuple[str, ...] = (
    "flashinfer:fa3",
    "flashinfer:fa2",
    "flashinfer:cudnn",
    "flashinfer:xqa",
    "flashinfer:trtllm-gen",
    "flash_attn:fa4",
    "flash_attn:fa3",
    "flash_attn:fa2",
    "flex_attention:triton",
    "triton:paged",
    "torch_sdpa:cudnn",
    "torch_sdpa:flash",
    "torch_sdpa:efficient",
    "torch_sdpa:math",
)

#: The document's names. `math` is one kernel; the others are families.
ALIASES: dict[str, str] = {
    "flashattention": "flash_attn",
    "pytorch_sdpa": "torch_sdpa",
    "math": "torch_sdpa:math",
}


def expand(name: str) -> tuple[str, ...]:
    """Kernels of a backend or family name, in the family's own order. UserError for an unknown name."""
    canonical = ALIASES.get(name, name)
    found = tuple(n for n in NAMES if n == canonical or n.split(":")[0] == canonical)
    if not found:
        known = {*NAMES, *ALIASES, *(n.split(":")[0] for n in NAMES)}
        raise UserError(f"unknown backend {name!r}: {nearest(name, known)}")
    return found


def chosen(text: str) -> tuple[str, ...]:
    """Kernels of a comma-separated list of backends and families, or of `all`. UserError for an unknown name."""
    names = NAMES if text == "all" else [part.strip() for part in text.split(",")]
    return tuple(dict.fromkeys(kernel for name in names for kernel in expand(name)))


def create(name: str, device: str = "cpu") -> Backend:
    """The backend of that exact name on a device. UserError when this build cannot call it."""
    family, _, kernel = name.partition(":")
    if family == "torch_sdpa":
        from attention.backends.torch_sdpa import TorchSdpa

        return TorchSdpa(kernel, device)
    if family == "flashinfer":
        from attention.backends.flashinfer import FlashInfer

        return FlashInfer(kernel, device)
    if family == "flash_attn":
        from attention.backends.flash_attn import FlashAttention

        return FlashAttention(kernel, device)
    if family == "flex_attention":
        from attention.backends.flex import FlexAttention

        return FlexAttention(kernel, device)
    if family == "triton":
        from attention.backends.triton_paged import TritonPaged

        return TritonPaged(device)
    raise UserError(f"{name}: unknown backend")
