"""Confirmation: which backend the execution layer says ran, not which one was asked for.

On the CPU that is the operator that PyTorch dispatched to, on a GPU the kernel that was launched, and for a CUDA
graph the kernels in its nodes, read once at capture (a replay shows nothing to ask). What names mean is data
(`kernel_names.yaml`); a name that matches nothing there is `unconfirmed(<name>)`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, field_validator

from attention.errors import UserError

# The profiler library writes a line per start and stop to stderr otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

T = TypeVar("T")

_MATH = "torch_sdpa:math"


class Pattern(BaseModel):
    """One entry of kernel_names.yaml; keys that this version does not know are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    backend: str
    contains: tuple[str, ...]
    phase: str = ""
    operator: str | None = None
    otherwise: str | None = None
    weak: bool = False

    @field_validator("contains", mode="before")
    @classmethod
    def _one_or_all(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    def matches(self, name: str) -> bool:
        return all(part in name for part in self.contains)

    def caller(self, names: Iterable[str]) -> str:
        """The backend that launched the kernel, where two launch the same one: told by the operators beside it."""
        operators = [name for name in names if name.startswith("aten::")]
        if self.operator is None or self.otherwise is None or not operators:
            return self.backend
        return self.backend if any(self.operator in name for name in operators) else self.otherwise


class KernelNames(BaseModel):
    """kernel_names.yaml: patterns in the order in which they are tried, and what is not attention."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    patterns: tuple[Pattern, ...]
    attention_words: tuple[str, ...] = ()
    helpers: tuple[str, ...] = ()
    host: tuple[str, ...] = ()

    @field_validator("patterns")
    @classmethod
    def _math_last(cls, value: tuple[Pattern, ...]) -> tuple[Pattern, ...]:
        # Wherever an entry was added: math never wins over a fused kernel beside it.
        return tuple(sorted(value, key=lambda pattern: pattern.backend == _MATH))

    def rank(self, name: str) -> int | None:
        """Place of the first pattern that a name matches; None for a name that matches none."""
        return next((i for i, pattern in enumerate(self.patterns) if pattern.matches(name)), None)

    def is_helper(self, name: str) -> bool:
        return any(part in name for part in self.helpers)

    def is_host(self, name: str) -> bool:
        return name.startswith(self.host)

    def may_be_attention(self, name: str) -> bool:
        lower = name.lower()
        return any(word in lower for word in self.attention_words) and not self.is_helper(name)


NAMES = KernelNames.model_validate(yaml.safe_load((Path(__file__).parent / "kernel_names.yaml").read_text()))
PATTERNS = NAMES.patterns


def backend_of(names: Iterable[str]) -> str:
    """The backend that a set of operator and kernel names stands for; `unconfirmed(...)` names those it may be."""
    seen = sorted(set(names))
    ranks = {name: NAMES.rank(name) for name in seen}
    unknown = [name for name in seen if ranks[name] is None and not NAMES.is_host(name)]
    suspects = [name for name in unknown if NAMES.may_be_attention(name)]
    first = min((rank for rank in ranks.values() if rank is not None), default=None)
    if first is not None and not (PATTERNS[first].weak and suspects):
        return PATTERNS[first].caller(seen)
    kernels = [name for name in unknown if not NAMES.is_helper(name)]
    operators = [name for name in seen if NAMES.may_be_attention(name)]
    return f"unconfirmed({', '.join((suspects or kernels or operators)[:3]) or 'nothing ran'})"


def same_kernels(in_graph: str, seen: str) -> bool:
    """Whether the backend that a graph's kernels stand for is `seen`, or launches the same kernels as it: a graph has
    no operators that would tell two callers of one library apart."""
    return in_graph == seen or any((p.backend, p.otherwise) == (in_graph, seen) for p in PATTERNS)


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


@dataclass(frozen=True)
class GraphNodes:
    """What a captured CUDA graph launches: demangled kernel names in node order, and all nodes, copies too."""

    kernels: tuple[str, ...]
    num_nodes: int

    @property
    def backend(self) -> str:
        """The backend that its kernels stand for, as `backend_of`."""
        return backend_of(self.kernels)

    @property
    def backends(self) -> dict[str, int]:
        """Backend -> its kernels in the graph: a whole model's graph may hold several."""
        ranks = (NAMES.rank(kernel) for kernel in self.kernels)
        return dict(Counter(PATTERNS[rank].backend for rank in ranks if rank is not None))


def graph_nodes(graph: Any) -> GraphNodes:
    """Nodes of a torch.cuda.CUDAGraph, after capture. It must have been made with `keep_graph=True`.

    Nodes of child graphs count; bodies of conditional nodes do not. Needs the package cuda-bindings (UserError
    without). Source: cuda.bindings.driver (CUDA driver API, graph management).
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UserError("kernels of a CUDA graph are read with cuda-bindings: pip install cuda-bindings") from error
    kernels: list[str] = []
    num_nodes = _walk(driver, driver.CUgraph(init_value=graph.raw_cuda_graph()), kernels)
    return GraphNodes(tuple(map(demangled, kernels)), num_nodes)


def _walk(driver: Any, graph: Any, kernels: list[str]) -> int:
    kinds = driver.CUgraphNodeType
    _, num_nodes = _checked(driver, "cuGraphGetNodes", graph, 0)
    if not num_nodes:
        return 0
    nodes, _ = _checked(driver, "cuGraphGetNodes", graph, num_nodes)
    total = 0
    for node in nodes:
        (kind,) = _checked(driver, "cuGraphNodeGetType", node)
        if kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
            (child,) = _checked(driver, "cuGraphChildGraphNodeGetGraph", node)
            total += _walk(driver, child, kernels)
            continue
        total += 1
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            (params,) = _checked(driver, "cuGraphKernelNodeGetParams", node)
            kernels.append(_kernel_name(driver, params))
    return total


def _kernel_name(driver: Any, params: Any) -> str:
    """A node holds a CUfunction, or a CUkernel (of a library that no context has loaded) with func 0."""
    if int(params.func):
        error, name = driver.cuFuncGetName(params.func)
    else:
        error, name = driver.cuKernelGetName(params.kern)
    if error != driver.CUresult.CUDA_SUCCESS or name is None:
        return f"kernel without a name ({error})"
    return name.decode() if isinstance(name, bytes) else str(name)


def _checked(driver: Any, function: str, *arguments: Any) -> tuple[Any, ...]:
    """Results of a driver call after its error code; RuntimeError when that is no success."""
    error, *results = getattr(driver, function)(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function}: {error}")
    return tuple(results)


def demangled(name: str) -> str:
    """The driver names C++ kernels mangled, the profiler does not; the patterns are written for the latter."""
    if not name.startswith("_Z"):
        return name
    import torch

    return str(torch._C._demangle(name))
