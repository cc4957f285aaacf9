"""What FlashInfer compiles: its modules by name, and a warm-up that says how long each took."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attention.backends.base import AttentionSpec, Batch
from attention.backends.flashinfer import FlashInfer
from attention.backends.flashinfer_plan import imported, starts_of
from attention.cases import AttentionCase


@dataclass(frozen=True)
class JitModule:
    """One compiled module: what it is made of, and where it lies once compiled (None before)."""

    name: str
    source_hash: str  # sha256 over the sources' names and bytes
    flags: tuple[str, ...]
    library: Path | None


def jit_modules() -> list[JitModule]:
    """Modules that this process has asked FlashInfer for, by name (flashinfer.jit.core.jit_spec_registry)."""
    registry = imported("flashinfer", "flashinfer.jit.core").jit_spec_registry
    modules = []
    for name, spec in sorted(registry.get_all_specs().items()):
        digest = hashlib.sha256()
        for source in sorted(map(Path, spec.sources)):
            digest.update(source.name.encode())
            digest.update(source.read_bytes() if source.exists() else b"missing")
        flags = tuple(map(str, (*(spec.extra_cflags or ()), *(spec.extra_cuda_cflags or ()))))
        library = Path(spec.get_library_path()) if spec.is_compiled else None
        modules.append(JitModule(name, digest.hexdigest(), flags, library))
    return modules


def warm(backend: str, cases: Sequence[AttentionCase], device: str = "cuda") -> dict[str, float]:
    """Build and load every module that the cases need on a backend: seconds by module, in order.

    A module that this process has loaded already costs nothing and is not named; one that lies compiled on disk
    costs its loading. Cases that the backend does not serve are skipped.
    """
    made = FlashInfer(backend.partition(":")[2], device)
    seconds: dict[str, float] = {}
    with _timed_builds(made.name, seconds):
        for case in cases:
            if not made.check(case):
                made.plan(*_shape_of(case))
    return seconds


@contextmanager
def _timed_builds(backend: str, seconds: dict[str, float]) -> Iterator[None]:
    """FlashInfer builds in JitSpec.build_and_load and reports no times: it is wrapped meanwhile."""
    spec_class = imported(backend, "flashinfer.jit.core").JitSpec
    build = spec_class.build_and_load

    def timed(spec: Any) -> Any:
        started = time.perf_counter()
        module = build(spec)
        seconds[spec.name] = time.perf_counter() - started
        return module

    spec_class.build_and_load = timed
    try:
        yield
    finally:
        spec_class.build_and_load = build


def _shape_of(case: AttentionCase) -> tuple[Batch, AttentionSpec]:
    """A batch and spec of the case's shape, without keys: enough to plan."""
    from attention.replay.problems import spec_of

    q_lens, kv_lens = (tuple(getattr(m, name) for m in case.members) for name in ("q_len", "kv_len"))
    counts = [-(-kv // (case.page_size or 1)) for kv in kv_lens]
    starts = starts_of(counts)
    tables = tuple(tuple(range(start, start + n)) for start, n in zip(starts, counts, strict=False))
    masks = tuple(torch.ones(q, kv, dtype=torch.bool) for q, kv in zip(q_lens, kv_lens, strict=True))
    batch = Batch(
        q_lens,
        kv_lens,
        tables if case.page_size is not None else (),
        case.page_size,
        layout=case.layout,
        masks=masks if case.custom_mask else None,
    )
    return batch, spec_of(case)
