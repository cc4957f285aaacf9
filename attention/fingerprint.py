"""The configuration fingerprint: what decides which kernel runs, as an id that nodes can compare.

*Identity* is hashed: model, GPU and software, installed distributions by the hash of their RECORD,
policy, dtype, attention shape and features, execution, switches and relevant environment variables.
*Attestation* is not: node, clock, resolved and confirmed backends, mapped libraries. The id is
therefore the same before and after warm-up, in two processes, and on equal nodes.

Only named environment variables enter, so that no secret can.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from attention import half_weights
from attention.difference import difference
from attention.distributions import installed
from attention.policy import Policy

#: Variables that change which kernel runs or how; values of others are never read.
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "FLASHINFER_CUDA_ARCH_LIST",
    "FLASHINFER_DISABLE_JIT",
    "FLASH_ATTENTION_FORCE_BUILD",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "TRITON_INTERPRET",
    "VLLM_ATTENTION_BACKEND",
)


class Identity(BaseModel):
    """What is hashed. The first fields are the document's, in its words."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_id: str
    model_revision: str
    gpu: str
    compute_capability: str | None
    platform: str  # cpu | cuda | rocm
    machine: str
    cpu_features: str
    driver: str | None
    cuda: str | None
    cudnn: str | None
    torch: str
    python: str
    serving_engine: str
    attention_backend_policy: Policy
    dtype: str
    kv_cache_dtype: str
    attention_type: str  # mha | mqa | gqa
    num_heads: int
    num_kv_heads: int
    head_dim: int
    features: dict[str, bool]
    execution: dict[str, bool]
    kv_layout: str
    page_size: int
    tensor_parallel: int
    engine_limits: dict[str, int]
    num_threads: int
    fault: str | None
    distributions: dict[str, str]  # name -> version and RECORD hash
    switches: dict[str, bool]
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
    page_size: int = 16,
    engine_limits: dict[str, int] | None = None,
    fault: str | None = None,
    attestation: dict[str, Any] | None = None,
) -> Fingerprint:
    """Fingerprint of this process serving that model under that policy."""
    from attention.model import DTYPES, specs_of
    from attention.model_config import model_revision, read_config

    config, spec = read_config(model_path), specs_of(model_path, dtype)
    first = spec[0]
    identity = Identity(
        model_id=model_path.name,
        model_revision=model_revision(model_path),
        gpu=gpu_name(device),
        compute_capability=_capability(device),
        platform=_platform(device),
        machine=platform.machine(),
        cpu_features=str(torch.backends.cpu.get_cpu_capability()),
        driver=_driver() if device.startswith("cuda") else None,
        cuda=torch.version.cuda,
        cudnn=str(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None,
        torch=torch.__version__,
        python=platform.python_version(),
        serving_engine=f"attention-release {_version('attention-release')}",
        attention_backend_policy=policy,
        dtype=dtype,
        kv_cache_dtype="auto",
        attention_type="mha" if first.heads_q == first.heads_kv else "mqa" if first.heads_kv == 1 else "gqa",
        num_heads=first.heads_q,
        num_kv_heads=first.heads_kv,
        head_dim=first.head_dim_qk,
        features={
            "causal": True,
            "sliding_window": any(s.window != (None, None) for s in spec),
            "softcap": any(s.softcap is not None for s in spec),
            "alibi": bool(config.get("alibi", False)),
        },
        execution={
            "cuda_graph": False,
            "torch_compile": False,
            "half_weights": half_weights.supported(device, DTYPES[dtype]),
        },
        kv_layout="paged_nhd",
        page_size=page_size,
        tensor_parallel=1,
        engine_limits=engine_limits or {},
        num_threads=torch.get_num_threads(),
        fault=fault,
        distributions=installed(),
        switches={
            "flash_sdp": torch.backends.cuda.flash_sdp_enabled(),
            "mem_efficient_sdp": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "math_sdp": torch.backends.cuda.math_sdp_enabled(),
            "cudnn_sdp": torch.backends.cuda.cudnn_sdp_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "mkldnn": torch.backends.mkldnn.is_available(),
        },
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    )
    digest = hashlib.sha256(identity.model_dump_json().encode()).hexdigest()[:16]
    return Fingerprint(
        id=digest, identity=identity, attestation={"node": node(), "time": time.time(), **(attestation or {})}
    )


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
