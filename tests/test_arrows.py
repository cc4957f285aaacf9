"""Who may import whom: flows -> tasks -> gates -> data -> attention, and nothing points back."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
ORDER = ("attention", "data", "gates", "tasks", "flows")  # each may import itself and what stands before it
CONTROL_PLANE = {"prefect", "mlflow", "great_expectations", "duckdb"}
SERVING = {"transformers", "fastapi", "prometheus_client", "opentelemetry", "uvicorn"}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of a file, wherever it stands; relative ones as absolute."""
    package = path.relative_to(REPO).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield node.lineno, ".".join([*base, node.module or ""]).rstrip(".")


def files(package: str) -> list[Path]:
    return sorted((REPO / package).rglob("*.py"))


def test_every_package_is_looked_at() -> None:
    assert all(len(files(package)) > 1 for package in ORDER)


@pytest.mark.parametrize("package", ORDER)
def test_no_arrow_points_back(package: str) -> None:
    forbidden = set(ORDER[ORDER.index(package) + 1 :]) | {"tests"}
    found = [
        f"{path.relative_to(REPO)}:{line} imports {name}"
        for path in files(package)
        for line, name in imports(path)
        if name.split(".")[0] in forbidden
    ]
    assert not found


def test_attention_imports_nothing_of_the_control_plane() -> None:
    found = [
        f"{path.relative_to(REPO)}:{line} imports {name}"
        for path in files("attention")
        for line, name in imports(path)
        if name.split(".")[0] in CONTROL_PLANE
    ]
    assert not found


def test_only_the_model_its_recorder_their_bench_and_the_server_import_what_serving_needs() -> None:
    found = [
        f"{path.relative_to(REPO)}:{line} imports {name}"
        for path in files("attention")
        if "serve" not in path.parts
        and path.relative_to(REPO / "attention").as_posix()
        not in ("model.py", "governed.py", "replay/model.py", "bench_replay.py", "bench_serving.py")
        for line, name in imports(path)
        if name.split(".")[0] in SERVING
    ]
    assert not found


def test_gates_read_tables_and_never_an_engine() -> None:
    found = [
        f"{path.relative_to(REPO)}:{line} imports {name}"
        for path in files("gates")
        for line, name in imports(path)
        if name.split(".")[0] in {"torch", "transformers", "prefect", "mlflow"}
    ]
    assert not found


@pytest.mark.parametrize("module", ["attention.probe", "tasks.record", "attention.serve.protocol"])
def test_importing_it_pulls_no_more_than_it_may(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120, check=True
    )
    loaded = set(done.stdout.split())
    assert module.split(".")[0] in loaded
    forbidden = CONTROL_PLANE | SERVING | (set() if module == "attention.probe" else {"torch"})
    assert not loaded & forbidden
