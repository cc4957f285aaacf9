"""Confirmation: what kernel names mean, from the profiler and from the nodes of a CUDA graph."""

# ruff: noqa: N802 - the fake has the names of the CUDA driver API

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attention.backends import NAMES as BACKENDS
from attention.confirm import NAMES, PATTERNS, GraphNodes, KernelNames, backend_of, demangled, graph_nodes
from attention.errors import UserError

# As the profiler names them on an H200 (torch 2.11, flashinfer 0.6.13), helpers beside them.
EXECUTED = [
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4> >(...)", "torch_sdpa:flash"),
    ("void pytorch_flash::flash_fwd_splitkv_combine_kernel<...>", "torch_sdpa:flash"),
    ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::...)", "torch_sdpa:efficient"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", "torch_sdpa:cudnn"),
    ("cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob", "torch_sdpa:cudnn"),
    ("void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, float>(...)", "torch_sdpa:math"),
    ("void flashinfer::SinglePrefillWithKVCacheKernel<...>", "flashinfer:fa2"),
    ("void flashinfer::SingleDecodeWithKVCacheKernel<...>", "flashinfer:fa2"),
    ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>", "flashinfer:fa2"),
    ("void flashinfer::PrefillWithKVCacheKernel<flashinfer::CollectiveMainloop...>", "flashinfer:fa3"),
    ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128> >(...)", "flash_attn:fa2"),
    ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...> > >(...)", "flash_attn:fa3"),
    ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at_", "flash_attn:fa4"),
    ("triton_tem_fused_flex_attention_0", "flex_attention:triton"),
    ("triton_tem_fused_flex_decoding_1", "flex_attention:triton"),
    ("attention_release_paged_decode", "triton:paged"),
    ("void flashinfer::mla::BatchMLAPagedAttentionKernel<...>", "flashinfer:fa2"),
    ("kernel_unified_attention_2d", "vllm_triton:unified"),
]
COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >"
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas"


@pytest.mark.parametrize(("kernel", "backend"), EXECUTED)
def test_an_executed_kernel_stands_for_its_backend_whatever_runs_beside_it(kernel: str, backend: str) -> None:
    assert backend_of([COPY, GEMM, kernel, FILL, "Memcpy DtoD (Device -> Device)"]) == backend


@pytest.mark.parametrize(("kernel", "backend"), [pair for pair in EXECUTED if pair[1] != "torch_sdpa:math"])
def test_math_never_wins_over_a_fused_kernel(kernel: str, backend: str) -> None:
    assert backend_of([GEMM, "softmax_warp_forward<float>", kernel]) == backend


def test_an_unknown_kernel_is_unconfirmed_by_its_name() -> None:
    assert backend_of([COPY, FILL, "my_paged_mha_kernel", GEMM]) == "unconfirmed(my_paged_mha_kernel)"
    assert backend_of(["some_kernel", COPY]) == "unconfirmed(some_kernel)"


def test_copies_and_fills_are_no_attention() -> None:
    assert backend_of([COPY, FILL, "Memset (Device)", "triton_poi_fused_add_0"]) == "unconfirmed(nothing ran)"
    assert backend_of(["cudaLaunchKernel", "aten::copy_", "aten::empty"]) == "unconfirmed(nothing ran)"


def test_a_samplers_softmax_does_not_turn_an_unknown_attention_kernel_into_math() -> None:
    names = ["new_attention_kernel_sm90", "softmax_warp_forward<float>", GEMM]
    assert backend_of(names) == "unconfirmed(new_attention_kernel_sm90)"


def test_the_order_of_the_patterns_is_explicit_and_math_is_last() -> None:
    backends = [pattern.backend for pattern in PATTERNS]
    assert backends[backends.index("torch_sdpa:math") :] == ["torch_sdpa:math"] * backends.count("torch_sdpa:math")
    moved = KernelNames(patterns=(PATTERNS[-1], *PATTERNS[:-1]))
    assert [p.backend for p in moved.patterns] == backends
    for i, pattern in enumerate(PATTERNS):
        assert NAMES.rank(" ".join(pattern.contains)) == i, f"{pattern.contains} is hidden by an earlier pattern"


def test_every_backend_of_ours_has_a_pattern() -> None:
    known = {name for pattern in PATTERNS for name in (pattern.backend, pattern.otherwise)}
    assert set(BACKENDS) <= known


def test_cudnns_kernel_is_told_by_the_operator_that_called_it() -> None:
    kernel = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop"
    assert backend_of([kernel, "aten::empty", "aten::_scaled_dot_product_cudnn_attention"]) == "torch_sdpa:cudnn"
    assert backend_of([kernel, "aten::empty"]) == "flashinfer:cudnn"
    assert backend_of([kernel]) == "torch_sdpa:cudnn", "a graph's nodes show no operators"


def test_entries_that_others_add_are_read_tolerantly() -> None:
    sheet = {"patterns": [{"backend": "x:y", "contains": "abc", "a_key_of_tomorrow": 1}], "more": []}
    names = KernelNames.model_validate(sheet)
    assert (names.patterns[0].contains, names.rank("zabcz"), names.rank("ab")) == (("abc",), 0, None)


class _Result:
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class _Type:
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_GRAPH = 4


@dataclass
class FakeDriver:
    """cuda.bindings.driver as far as it is used: graphs by handle, each a list of (type, content) nodes."""

    graphs: dict[int, list[tuple[int, Any]]] = field(default_factory=dict)
    fails: str = ""
    CUresult = _Result
    CUgraphNodeType = _Type

    def CUgraph(self, init_value: int) -> int:
        return init_value

    def cuGraphGetNodes(self, graph: int, num_nodes: int = 0) -> tuple[Any, ...]:
        if self.fails == "cuGraphGetNodes":
            return _Result.CUDA_ERROR_INVALID_VALUE, None, None
        # As the bindings: without room no nodes, but their number.
        nodes = self.graphs[graph]
        return _Result.CUDA_SUCCESS, nodes[:num_nodes], num_nodes or len(nodes)

    def cuGraphNodeGetType(self, node: tuple[int, Any]) -> tuple[int, int]:
        return _Result.CUDA_SUCCESS, node[0]

    def cuGraphChildGraphNodeGetGraph(self, node: tuple[int, Any]) -> tuple[int, int]:
        return _Result.CUDA_SUCCESS, node[1]

    def cuGraphKernelNodeGetParams(self, node: tuple[int, Any]) -> tuple[int, Any]:
        return _Result.CUDA_SUCCESS, node[1]

    def cuFuncGetName(self, handle: Any) -> tuple[int, bytes | None]:
        return (_Result.CUDA_SUCCESS, handle.name) if handle.name else (_Result.CUDA_ERROR_INVALID_VALUE, None)

    cuKernelGetName = cuFuncGetName


class Handle:
    """CUfunction or CUkernel: an address and its name."""

    def __init__(self, name: bytes | None, address: int = 1) -> None:
        self.name, self.address = name, address

    def __int__(self) -> int:
        return self.address


def function(name: str) -> tuple[int, Any]:
    return _Type.CU_GRAPH_NODE_TYPE_KERNEL, SimpleNamespace(func=Handle(name.encode()), kern=Handle(None, 0))


def library_kernel(name: str) -> tuple[int, Any]:
    return _Type.CU_GRAPH_NODE_TYPE_KERNEL, SimpleNamespace(func=Handle(None, 0), kern=Handle(name.encode()))


MEMCPY = (_Type.CU_GRAPH_NODE_TYPE_MEMCPY, None)
FLASH_MANGLED = "_ZN13pytorch_flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsILi128EEEEvi"


class FakeGraph:
    def raw_cuda_graph(self) -> int:
        return 7


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    bindings = ModuleType("cuda.bindings")
    bindings.driver = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return fake


def test_the_kernels_of_a_graph_are_read_from_its_nodes_and_named_as_the_profiler_does(driver: FakeDriver) -> None:
    driver.graphs = {7: [MEMCPY, function(FLASH_MANGLED), function("triton_poi_fused_0"), MEMCPY]}
    found = graph_nodes(FakeGraph())
    assert found.num_nodes == 4
    assert found.kernels == (demangled(FLASH_MANGLED), "triton_poi_fused_0")
    assert found.kernels[0].startswith("void pytorch_flash::flash_fwd_kernel<")
    assert found.backend == "torch_sdpa:flash"
    assert found.backends == {"torch_sdpa:flash": 1}


def test_child_graphs_and_kernels_of_libraries_count(driver: FakeDriver) -> None:
    child = (_Type.CU_GRAPH_NODE_TYPE_GRAPH, 8)
    cudnn = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop"
    driver.graphs = {7: [function("kernel_mha"), child, child], 8: [library_kernel(cudnn), MEMCPY]}
    found = graph_nodes(FakeGraph())
    assert found.kernels == ("kernel_mha", cudnn, cudnn)
    assert found.num_nodes == 5
    assert found.backends == {"flashinfer:xqa": 1, "torch_sdpa:cudnn": 2}


def test_an_empty_graph_ran_nothing(driver: FakeDriver) -> None:
    driver.graphs = {7: []}
    assert graph_nodes(FakeGraph()) == GraphNodes((), 0)
    assert graph_nodes(FakeGraph()).backend == "unconfirmed(nothing ran)"


def test_a_kernel_without_a_name_is_unconfirmed_and_a_failing_driver_an_error(driver: FakeDriver) -> None:
    nameless = (_Type.CU_GRAPH_NODE_TYPE_KERNEL, SimpleNamespace(func=Handle(None, 1), kern=Handle(None, 0)))
    driver.graphs = {7: [nameless]}
    assert graph_nodes(FakeGraph()).backend == "unconfirmed(kernel without a name (1))"
    driver.fails = "cuGraphGetNodes"
    with pytest.raises(RuntimeError, match="cuGraphGetNodes: 1"):
        graph_nodes(FakeGraph())


def test_without_cuda_bindings_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UserError, match="pip install cuda-bindings"):
        graph_nodes(FakeGraph())


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_a_captured_graph_names_the_kernel_that_it_replays(kernel: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from attention.bench_dispatch import captured

    forced = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[kernel]
    q, k, v = (torch.randn(1, 8, n, 128, device="cuda", dtype=torch.bfloat16) for n in (1, 512, 512))

    def call() -> None:
        with sdpa_kernel([forced]):
            torch.nn.functional.scaled_dot_product_attention(q, k, v)

    assert graph_nodes(captured(call)).backend == f"torch_sdpa:{kernel}"
