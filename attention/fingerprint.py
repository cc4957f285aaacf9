"""The configuration fingerprint: what decides which kernel runs, as an id that nodes can compare.

*Identity* is hashed: model, GPU and software, installed distributions by the hash of their RECORD, sources and
compilers of just-in-time kernels, policy, dtype, attention shape and features, execution, engine limits, switches
and relevant environment variables. *Attestation* is not: node, clock, resolved and confirmed backends, mapped
libraries, JIT outputs, PyTorch's SDPA order (set at its first call). The id is therefore the same before and
after warm-up, in two processes, and on equal nodes: which of several equal GPUs a process sees is not in it.

Only named environment variables enter, and a value of theirs that could hold a secret enters as a hash.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from attention import half_weights, jit
from attention.difference import difference
from attention.distributions import installed
from attention.model_config import LayerKind, layer_kinds, model_revision
from attention.policy import Policy

#: Variables that change which kernel runs or how; values of others are never read.
ENVIRONMENT = (
    # CUDA, PyTorch and CPU libraries
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    # flags of just-in-time compilers
    "CC",
    "CXX",
    "FLASHINFER_CUDA_ARCH_LIST",
    "FLASHINFER_DISABLE_JIT",
    "FLASHINFER_DISABLE_VERSION_CHECK",
    "FLASHINFER_EXTRA_CFLAGS",
    "FLASHINFER_EXTRA_CUDAFLAGS",
    "FLASHINFER_TRACE_APPLY",
    "FLASH_ATTENTION_FORCE_BUILD",
    "NVCC_APPEND_FLAGS",
    "NVCC_PREPEND_FLAGS",
    "TORCH_CUDA_ARCH_LIST",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_INTERPRET",
    "TRITON_PTXAS_PATH",
    # engines
    "SGLANG_TRITON_DECODE_ATTN_STATIC_KV_SPLITS",
    "SGLANG_USE_AITER",
    "TLLM_FMHA_LIBS",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_BATCH_INVARIANT",
    "VLLM_FLASH_ATTN_VERSION",
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_ROCM_USE_AITER",
    "VLLM_USE_TRTLLM_ATTENTION",
)

# Words, numbers, versions, paths and flags, with single blanks between; no `=`, `@` or quotes.
_PLAIN = re.compile(r"[\w.,:;+/-]+( [\w.,:;+/-]+)*", re.ASCII)
_SECRETIVE = re.compile(r"://|auth|bearer|cred|key|passw|pwd|secret|token", re.IGNORECASE)


class Identity(BaseModel):
    """What is hashed. The first fields are the document's, in its words."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_id: str
    model_revision: str
    gpu: str
    gpu_memory_mib: int | None
    compute_capability: str | None
    platform: str  # cpu | cuda | rocm
    machine: str
    cpu_features: str
    driver: str | None
    cuda: str | None
    rocm: str | None
    cudnn: str | None
    torch: str
    python: str
    serving_engine: str
    attention_backend_policy: Policy
    dtype: str
    kv_cache_dtype: str
    attention_type: str  # mha | mqa | gqa | mla
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_vo: int
    features: dict[str, bool]
    execution: dict[str, bool]
    kv_layout: str
    page_size: int
    tensor_parallel: int
    engine_limits: dict[str, int | float]
    num_threads: int
    fault: str | None
    distributions: dict[str, str]  # name -> version and RECORD hash
    jit_sources: dict[str, str]  # folder of sources -> hash
    compilers: dict[str, str]  # of just-in-time kernels
    switches: dict[str, bool]
    flash_attention_impl: str | None  # torch.nn.attention.activate_flash_attention_impl: FA3, FA4
    matmul_precision: str
    environment: dict[str, str]


class Fingerprint(BaseModel):
    """Identity, its id, and the attestation beside it."""

    model_config = ConfigDict(extra="forbid")

    id: str
    identity: Identity
    attestation: dict[str, Any]


def fingerprint(
    model_path: Path,
    policy: Policy,
    *,
    dtype: str,
    device: str = "cpu",
    kv_cache_dtype: str = "auto",
    kv_layout: str = "paged_nhd",
    page_size: int = 16,
    tensor_parallel: int = 1,
    cuda_graph: bool = False,
    torch_compile: bool = False,
    engine_limits: dict[str, int | float] | None = None,
    fault: str | None = None,
    attestation: dict[str, Any] | None = None,
) -> Fingerprint:
    """Fingerprint of this process serving that model under that policy.

    engine_limits: what bounds the shapes that can come (attention.limits, pages). attestation: further facts that
    are recorded and not hashed.
    """
    layers = layer_kinds(model_path)
    first = layers[0]
    identity = Identity(
        model_id=model_path.resolve().name,  # `.` and a link have the name, and so the id, of the folder itself
        model_revision=model_revision(model_path),
        gpu=gpu_name(device),
        gpu_memory_mib=_memory_mib(device),
        compute_capability=_capability(device),
        platform=_platform(device),
        machine=platform.machine(),
        cpu_features=str(torch.backends.cpu.get_cpu_capability()),
        driver=_driver() if device.startswith("cuda") else None,
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        cudnn=str(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None,
        torch=torch.__version__,
        python=platform.python_version(),
        serving_engine=f"attention-release {_version('attention-release')}",
        attention_backend_policy=policy,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        attention_type=_attention_type(first),
        num_layers=len(layers),
        num_heads=first.heads_q,
        num_kv_heads=first.heads_kv,
        head_dim=first.head_dim_qk,
        head_dim_vo=first.head_dim_vo,
        features={
            "causal": True,
            "sliding_window": any(kind.window != (None, None) for kind in layers),
            "softcap": any(kind.softcap is not None for kind in layers),
            "alibi": any(kind.alibi for kind in layers),
            "sinks": any(kind.sinks for kind in layers),
        },
        execution={
            "cuda_graph": cuda_graph,
            "torch_compile": torch_compile,
            "half_weights": half_weights.supported(device, getattr(torch, dtype)),
        },
        kv_layout=kv_layout,
        page_size=page_size,
        tensor_parallel=tensor_parallel,
        engine_limits=engine_limits or {},
        num_threads=torch.get_num_threads(),
        fault=fault,
        distributions=installed(),
        jit_sources=jit.sources(policy.backends()),
        compilers=jit.compilers(policy.backends()),
        switches={
            "flash_sdp": torch.backends.cuda.flash_sdp_enabled(),
            "mem_efficient_sdp": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "math_sdp": torch.backends.cuda.math_sdp_enabled(),
            "cudnn_sdp": torch.backends.cuda.cudnn_sdp_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "mkldnn": torch.backends.mkldnn.is_available(),
        },
        flash_attention_impl=_flash_attention_impl(),
        matmul_precision=torch.get_float32_matmul_precision(),
        environment={name: entered(os.environ[name]) for name in ENVIRONMENT if name in os.environ},
    )
    facts = {
        "node": node(),
        "time": time.time(),
        "libraries": mapped_libraries(),
        "jit_outputs": jit.outputs(),
        "sdpa_order": torch._C._get_sdp_priority_order(),
        **(attestation or {}),
    }
    return Fingerprint(id=identity_hash(identity), identity=identity, attestation=facts)


def entered(value: str) -> str:
    """A variable's value as it enters a fingerprint: plain text as it is, any other as `sha256:` and 12 hex digits.

    A flag that sets something (`--token=abc`), a URL or a value that speaks of a password may hold a secret; its hash
    still tells two values apart. What looks like a plain word is taken for one.
    """
    if not value or (_PLAIN.fullmatch(value) and not _SECRETIVE.search(value)):
        return value
    return f"sha256:{hashlib.sha256(os.fsencode(value)).hexdigest()[:12]}"


def identity_hash(identity: Identity) -> str:
    """The id: 16 hex digits over every field of the identity."""
    return hashlib.sha256(identity.model_dump_json().encode()).hexdigest()[:16]


def node() -> str:
    return socket.gethostname()


def gpu_name(device: str) -> str:
    """`nvidia-h200` for a CUDA device, `cpu` without one: the name that waves and records use."""
    if not device.startswith("cuda"):
        return "cpu"
    return str(torch.cuda.get_device_name(device)).lower().replace(" ", "-")


def changed_fields(old: Identity, new: Identity) -> list[str]:
    """What changed, one line a field."""
    return difference(old.model_dump(mode="json"), new.model_dump(mode="json"))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "source"


def _platform(device: str) -> str:
    if not device.startswith("cuda"):
        return "cpu"
    return "rocm" if torch.version.hip else "cuda"


def _capability(device: str) -> str | None:
    if not device.startswith("cuda"):
        return None
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


def _memory_mib(device: str) -> int | None:
    if not device.startswith("cuda"):
        return None
    return int(torch.cuda.get_device_properties(device).total_memory) >> 20


def _attention_type(kind: LayerKind) -> str:
    if kind.latent is not None:
        return "mla"
    if kind.heads_q == kind.heads_kv:
        return "mha"
    return "mqa" if kind.heads_kv == 1 else "gqa"


def _flash_attention_impl() -> str | None:
    """What replaces PyTorch's own flash kernel in this process; a function of PyTorch 2.11 and later."""
    from torch.nn import attention

    current = getattr(attention, "current_flash_attention_impl", None)
    return current() if current else None


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    if not path.is_file():
        return None
    words = path.read_text().split("Kernel Module", 1)[-1].split()
    return next((word for word in words if word[:1].isdigit()), None)


def mapped_libraries() -> list[str]:
    """Attention-relevant shared libraries mapped into this process, by base name."""
    if sys.platform != "linux":
        return []
    wanted = ("cudnn", "cublas", "flash", "torch", "mkl", "dnnl", "gomp")
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {line.rsplit("/", 1)[-1] for line in lines if ".so" in line}
    return sorted(name for name in names if any(part in name for part in wanted))
