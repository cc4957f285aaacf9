"""What just-in-time kernels are made from, and what was made: hashes of sources and compilers, free of torch.

The RECORD of a wheel does not change when a file of it is edited in place, and an editable install has none of
the sources in it. So the sources that a compiler turns into attention kernels are hashed themselves, found
without importing their package. Only families that the policy names are read. What compilers wrote (their
caches) differs before and after warm-up: it is attested, never hashed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

#: Family (or kernel) of a policy -> (package, glob inside it) of the sources that are compiled at first use.
SOURCES: dict[str, tuple[tuple[str, str], ...]] = {
    "flashinfer": (("flashinfer", "jit/**/*"), ("flashinfer", "data/csrc/**/*"), ("flashinfer", "data/include/**/*")),
    "flash_attn:fa4": (("flash_attn", "cute/**/*"),),
    "triton": (("triton", "language/**/*"), ("triton", "compiler/**/*"), ("triton", "backends/**/*.py")),
    "flex_attention": (("torch", "_inductor/kernel/flex/**/*"), ("triton", "compiler/**/*")),
}
_SUFFIXES = {".py", ".cu", ".cuh", ".h", ".hpp", ".cpp", ".jinja", ".inc", ".yaml"}

#: Compilers of those families: name -> command that prints the version.
COMPILERS: dict[str, tuple[str, ...]] = {"nvcc": ("nvcc", "--version"), "c++": ("c++", "--version")}


def sources(backends: Iterable[str]) -> dict[str, str]:
    """`<package>/<glob>` -> hash, for the families that compile at first use; our own backends always.

    A package that is not installed is left out: that it is missing shows in `distributions`.
    """
    found = {"attention/backends": tree_hash(Path(__file__).parent / "backends", "**/*")}
    for package, pattern in _wanted(backends):
        if root := _root(package):
            found[f"{package}/{pattern.removesuffix('/**/*')}"] = tree_hash(root, pattern)
    return dict(sorted(found.items()))


def compilers(backends: Iterable[str]) -> dict[str, str]:
    """Compiler -> version line, when a named family compiles at first use; `absent` for one that is not there."""
    if not _wanted(backends):
        return {}
    return {name: _version(command) for name, command in COMPILERS.items()}


def outputs() -> dict[str, int]:
    """JIT cache -> number of compiled files in it now; for the attestation."""
    home = Path.home()
    caches = {
        "flashinfer": Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", str(home))) / ".cache" / "flashinfer",
        "triton": Path(os.environ.get("TRITON_CACHE_DIR", str(home / ".triton" / "cache"))),
    }
    return {
        name: sum(1 for path in folder.rglob("*") if path.suffix in (".so", ".cubin", ".hsaco"))
        for name, folder in caches.items()
        if folder.is_dir()
    }


@cache
def tree_hash(root: Path, pattern: str) -> str:
    """Hash of names and contents of the source files under a folder; byte code and binaries do not count."""
    digest = hashlib.sha256()
    for path in sorted(root.glob(pattern)):
        if path.suffix in _SUFFIXES and path.is_file():
            digest.update(f"{path.relative_to(root).as_posix()}:{path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _wanted(backends: Iterable[str]) -> list[tuple[str, str]]:
    names = [f"{name}:" for name in backends]
    keys = [key for key in SOURCES if any(name.startswith(f"{key}:") for name in names)]
    return list(dict.fromkeys(source for key in keys for source in SOURCES[key]))


def _root(package: str) -> Path | None:
    """Folder of a top-level package, found without importing it."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


@cache
def _version(command: tuple[str, ...]) -> str:
    program = shutil.which(command[0])
    if program is None and command[0] == "nvcc":
        # nvcc is seldom on PATH; FlashInfer looks here too.
        program = shutil.which("nvcc", path=str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"))
    if program is None:
        return "absent"
    try:
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unreadable ({type(error).__name__})"
    lines = done.stdout.strip().splitlines() or [""]
    # nvcc's first line is a copyright, the last names the build; a C++ compiler's first line is its version.
    return (lines[-1] if command[0] == "nvcc" else lines[0]).strip()
