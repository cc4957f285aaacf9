"""Just-in-time kernels: what they are made from is hashed, without importing the package that makes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attention import jit


def test_an_edited_source_changes_the_hash_and_byte_code_does_not(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    source = tmp_path / "csrc" / "kernel.cu"
    source.write_text("int a = 1;")
    before = jit.tree_hash(tmp_path, "**/*")
    jit.tree_hash.cache_clear()
    (tmp_path / "csrc" / "kernel.cpython-312.pyc").write_bytes(b"byte code")
    assert jit.tree_hash(tmp_path, "**/*") == before
    jit.tree_hash.cache_clear()
    source.write_text("int a = 2;")
    assert jit.tree_hash(tmp_path, "**/*") != before
    jit.tree_hash.cache_clear()


@pytest.mark.parametrize(
    ("backend", "package"),
    [
        ("flashinfer:fa2", "flashinfer"),
        ("flash_attn:fa4", "flash_attn"),
        ("triton:paged", "triton"),
        ("flex_attention:triton", "torch"),
    ],
)
def test_a_named_family_brings_its_sources_and_the_compilers(
    backend: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stand-in for the package: only its place is looked up.
    monkeypatch.setattr(jit, "_root", lambda name: tmp_path if name == package else None)
    assert {name.split("/")[0] for name in jit.sources((backend,))} == {"attention", package}
    assert set(jit.compilers((backend,))) == {"nvcc", "c++"}


@pytest.mark.parametrize("backend", ["torch_sdpa:flash", "flash_attn:fa2"])
def test_what_is_compiled_ahead_needs_neither(backend: str) -> None:
    assert set(jit.sources((backend,))) == {"attention/backends"}
    assert jit.compilers((backend,)) == {}


def test_a_compiler_that_is_not_there_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    jit._version.cache_clear()
    assert jit.compilers(("triton:paged",)) == {"nvcc": "absent", "c++": "absent"}
    jit._version.cache_clear()


def test_sources_are_read_without_importing_anything_heavy() -> None:
    code = (
        "import sys; from attention import jit; jit.sources(('triton:paged', 'flex_attention:triton', 'flashinfer'));"
        "raise SystemExit(bool({'torch', 'triton', 'flashinfer'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_compiled_files_in_the_caches_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    assert jit.outputs() == {}
    (tmp_path / "triton" / "abc").mkdir(parents=True)
    (tmp_path / "triton" / "abc" / "kernel.cubin").write_bytes(b"x")
    (tmp_path / "triton" / "abc" / "kernel.ttir").write_text("x")
    assert jit.outputs() == {"triton": 1}
