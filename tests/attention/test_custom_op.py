"""`torch.ops.attention.governed`: a planned layer as one operator, in graphs of torch.compile and of CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import attention.custom_op as custom_op
from attention import confirm
from attention.backends.base import AttentionSpec, Batch
from attention.bench_dispatch import captured
from attention.dispatch import Dispatcher
from attention.errors import UserError
from attention.policy import Policy

FLASH, MATH = "torch_sdpa:flash", "torch_sdpa:math"
SPECS = [
    AttentionSpec(4, 2, 16, 16, torch.float32, 0.25),
    AttentionSpec(4, 2, 16, 16, torch.float32, 0.25, window=(7, 0)),
]
STEP = Batch((1, 1), (40, 21), ((3, 0, 4), (1, 2)), 16)
LATER = Batch((1, 1), (17, 30), ((0, 2), (4, 3)), 16)


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(Policy(preferred=(FLASH,), fallback=(MATH,)), SPECS)


@pytest.fixture
def handles(dispatcher: Dispatcher) -> Iterator[tuple[int, ...]]:
    found = custom_op.handles(dispatcher, len(SPECS))
    yield found
    custom_op.release(*found)


def inputs(seed: int, tokens: int = 2) -> tuple[torch.Tensor, ...]:
    """q [T, H, D], and a cache of 5 pages of 16 tokens."""
    torch.manual_seed(seed)
    return torch.randn(tokens, 4, 16), torch.randn(5, 16, 2, 16), torch.randn(5, 16, 2, 16)


class Layers(torch.nn.Module):
    """Two layers as a service would write them: project, write into the cache, attend, project."""

    def __init__(self, handles: tuple[int, ...]) -> None:
        super().__init__()
        self.handles = handles
        self.project = torch.nn.Linear(64, 64)
        self.out = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for handle in self.handles:
            q_THD = self.project(x).view(-1, 4, 16)
            k.view(-1, 2, 16).index_copy_(0, slots, q_THD[:, :2].contiguous())
            x = x + self.out(torch.ops.attention.governed(q_THD, k, v, handle).flatten(1))
        return x


def test_it_is_the_planned_step_that_runs(dispatcher: Dispatcher, handles: tuple[int, ...]) -> None:
    q, k, v = inputs(0)
    with torch.inference_mode():
        for batch in (STEP, LATER):
            dispatcher.plan(batch)
            for layer, handle in enumerate(handles):
                out = torch.ops.attention.governed(q, k, v, handle)
                assert torch.equal(out, dispatcher.run(layer, q, k, v))
            assert dispatcher.last_step().phases[0].layers == 4
    assert not torch.equal(*(torch.ops.attention.governed(q, k, v, handle) for handle in handles)), "a window"
    assert dispatcher.confirmed["decode"] == FLASH


@pytest.mark.parametrize("batch", [STEP, Batch((20, 1), (20, 33), ((0, 1), (2, 3, 4)), 16)])
def test_it_keeps_the_rules_of_an_operator(dispatcher: Dispatcher, handles: tuple[int, ...], batch: Batch) -> None:
    dispatcher.plan(batch)
    q, k, v = inputs(0, sum(batch.q_lens))
    for handle in handles:
        seen = torch.library.opcheck(torch.ops.attention.governed.default, (q, k, v, handle))
        assert set(seen.values()) == {"SUCCESS"}


def compiled_steps(backend: str, dispatcher: Dispatcher, handles: tuple[int, ...]) -> int:
    """Two steps of other lengths and pages through a compiled module, equal to eager ones; how often it compiled."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    layers = Layers(handles).eval()
    compiled = torch.compile(layers, fullgraph=True, backend=counter)
    for seed, batch in enumerate((STEP, LATER)):
        x, (_, k, v) = torch.randn(2, 64), inputs(seed)
        lasts = [kv_len - 1 for kv_len in batch.kv_lens]
        slots = torch.tensor(
            [t[last // 16] * 16 + last % 16 for t, last in zip(batch.block_tables, lasts, strict=True)]
        )
        with torch.inference_mode():
            dispatcher.plan(batch)
            expected = layers(x, slots, k.clone(), v)
            dispatcher.plan(batch)
            torch.testing.assert_close(compiled(x, slots, k.clone(), v), expected)
    assert dispatcher.last_step().phases[0].layers == len(SPECS)
    torch._dynamo.reset()
    return counter.frame_count


def test_a_compiled_module_has_no_break_and_another_plan_compiles_nothing(
    dispatcher: Dispatcher, handles: tuple[int, ...]
) -> None:
    assert compiled_steps("aot_eager", dispatcher, handles) == 1


@pytest.mark.slow
def test_inductor_takes_it_too(dispatcher: Dispatcher, handles: tuple[int, ...]) -> None:
    assert compiled_steps("inductor", dispatcher, handles) == 1


def test_its_shape_is_known_without_running_it() -> None:
    with FakeTensorMode():
        q, k, v = torch.empty(7, 4, 24), torch.empty(5, 16, 2, 24), torch.empty(5, 16, 2, 8)
        out = torch.ops.attention.governed(q, k, v, 10**9)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((7, 4, 8), torch.float32, True)


def test_a_handle_that_nobody_has_is_refused(dispatcher: Dispatcher) -> None:
    (handle,) = custom_op.handles(dispatcher, 1)
    custom_op.release(handle)
    with pytest.raises(UserError, match=f"no layer has the handle {handle}: ask custom_op.handles"):
        torch.ops.attention.governed(*inputs(0), handle)


def test_what_a_backend_gives_in_other_strides_is_made_what_was_promised() -> None:
    handle = custom_op.handle_of(lambda q, k, v: q.transpose(0, 1).contiguous().transpose(0, 1))
    q, k, v = inputs(0)
    assert torch.ops.attention.governed(q, k, v, handle).is_contiguous()
    custom_op.release(handle)


@pytest.mark.gpu
def test_a_cuda_graph_holds_the_planned_runs_kernels_and_replays_them() -> None:
    spec = AttentionSpec(4, 2, 64, 64, torch.bfloat16, 0.125)
    one = Dispatcher(Policy(mode="pinned", preferred=(FLASH,)), [spec], device="cuda")
    one.plan(STEP)
    (handle,) = custom_op.handles(one, 1)
    q, k, v = (
        torch.randn(*shape, 64, device="cuda", dtype=torch.bfloat16) for shape in ((2, 4), (5, 16, 2), (5, 16, 2))
    )
    out = torch.empty_like(q)
    with torch.inference_mode():
        one.run(0, q, k, v)  # confirmed before it is captured
        graphs = [
            captured(lambda: out.copy_(one.run(0, q, k, v))),
            captured(lambda: out.copy_(torch.ops.attention.governed(q, k, v, handle))),
        ]
        direct, through = map(confirm.graph_nodes, graphs)
        assert direct == through
        assert through.backend == FLASH
        q.normal_()
        graphs[1].replay()
        torch.testing.assert_close(out, one.run(0, q, k, v))
    custom_op.release(handle)
