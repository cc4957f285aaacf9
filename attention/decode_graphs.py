"""Decode steps as CUDA graphs: captured once a batch size and KV length, replayed with the tokens and pages of a step.

    runner.graphs = DecodeGraphs(runner)
    hidden = runner.forward(chunks)         # replays where the step fits a graph, else runs as ever

A step fits when every member decodes one token, all on one backend, and nobody falls back. It is padded to the next
batch size by members that read and write a page of their own. The graph's kernels are read from it at capture, so
what runs is confirmed for every replay (attention.confirm.graph_nodes). A backend that cannot be captured, or a batch
that needs another launch than the captured one (FlashInfer), runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from attention import confirm
from attention.backends.base import Batch, Planned
from attention.dispatch import Dispatcher
from attention.errors import UserError

if TYPE_CHECKING:
    from attention.model import Chunk, Runner

SIZES = (1, 2, 4, 8, 16, 32, 64)
#: KV lengths that a graph is captured for grow by this factor: how a kernel splits its keys hangs on the longest.
_SHORTEST, _GROWTH = 512, 4


class Replay(Protocol):
    """A captured call: `output` is what its last replay left."""

    output: torch.Tensor
    backend: str  # that its kernels stand for

    def __call__(self) -> None: ...


@dataclass
class _CudaReplay:
    graph: Any
    output: torch.Tensor
    backend: str

    def __call__(self) -> None:
        self.graph.replay()


def captured(call: Callable[[], torch.Tensor]) -> Replay:
    """A call as a CUDA graph, after one run of it that does what is done once. UserError without cuda-bindings."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        output = call()
    backends = confirm.graph_nodes(graph).backends
    graph.instantiate()
    return _CudaReplay(graph, output, ", ".join(backends) or "unconfirmed(no kernel of attention)")


@dataclass
class _Graph:
    """One capture: its inputs in place, a plan a kind of layer, and the replay."""

    inputs: torch.Tensor  # int64 [3, members]: token ids, positions, slots
    plans: list[Planned]
    replay: Replay


class DecodeGraphs:
    """The graphs of one runner. `capture` makes one of a call; tests give another."""

    def __init__(
        self,
        runner: Runner,
        *,
        sizes: Sequence[int] = SIZES,
        capture: Callable[[Callable[[], torch.Tensor]], Replay] = captured,
    ) -> None:
        self._runner = runner
        self._sizes = tuple(sorted(sizes))
        self._capture = capture
        self._graphs: dict[tuple[str, int, int], _Graph | None] = {}  # None: cannot be captured
        self._spare = runner.spare_page  # of members that fill a batch up
        self.num_replayed = 0

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """Final hidden states [R, hidden] of a step that fits a graph, valid until the next replay; None where none
        fits."""
        size = next((size for size in self._sizes if size >= len(chunks)), None)
        if size is None or any(len(c.token_ids) != 1 or c.start == 0 or c.avoid for c in chunks):
            return None
        kv_lens = tuple(c.start + 1 for c in chunks)
        dispatcher = self._runner.dispatcher
        decision = dispatcher.decode_alone(kv_lens)
        if decision is None:
            return None
        graph = self._graph(decision, size, max(kv_lens))
        if graph is None:
            return None
        try:
            self._fill(graph, chunks, kv_lens)
        except UserError:
            return None
        graph.replay()
        self.num_replayed += 1
        dispatcher.note_replay(decision, kv_lens, graph.replay.backend)
        return graph.replay.output[: len(chunks)]

    def _fill(self, graph: _Graph, chunks: Sequence[Chunk], kv_lens: Sequence[int]) -> None:
        """Tokens and pages of this step. UserError for a batch that needs another launch than the captured one."""
        size, page = graph.inputs.shape[1], self._runner.page_size
        spare = size - len(chunks)
        ids = [c.token_ids[0] for c in chunks] + [0] * spare
        positions = [c.start for c in chunks] + [0] * spare
        slots = [c.block_table[c.start // page] * page + c.start % page for c in chunks] + [self._spare * page] * spare
        tables = (*(c.block_table for c in chunks), *[(self._spare,)] * spare)
        batch = Batch((1,) * size, (*kv_lens, *[1] * spare), tables, page)
        for planned in graph.plans:
            planned.replan(batch)
        graph.inputs.copy_(torch.tensor([ids, positions, slots]), non_blocking=True)

    def _graph(self, backend: str, size: int, longest: int) -> _Graph | None:
        """The graph of such steps, captured where it is new; None for a backend that cannot be."""
        room = min(_SHORTEST, self._runner.max_context)
        while room < longest:
            room = min(room * _GROWTH, self._runner.max_context)
        key = (backend, size, room)
        if key not in self._graphs:
            self._graphs[key] = self._captured(backend, size, room)
        return self._graphs[key]

    def _captured(self, backend: str, size: int, room: int) -> _Graph | None:
        runner = self._runner
        table = (self._spare,) * -(-room // runner.page_size)
        batch = Batch((1,) * size, (room,) * size, (table,) * size, runner.page_size)
        inputs = torch.zeros(3, size, dtype=torch.int64, device=runner.device)
        inputs[2] = self._spare * runner.page_size
        own = runner.dispatcher
        try:
            plans = own.plans_for_graph(backend, batch)
            stands_in: Any = _Plans(own, plans)
            runner.dispatcher = stands_in
            replay = self._capture(lambda: runner.hidden(inputs[0], inputs[1], inputs[2]))
        except UserError:
            return None
        finally:
            runner.dispatcher = own
        return _Graph(inputs, plans, replay)


class _Plans:
    """In a dispatcher's place while a step is captured: every layer on its kind's plan."""

    def __init__(self, dispatcher: Dispatcher, plans: list[Planned]) -> None:
        self._dispatcher = dispatcher
        self._plans = plans

    def run(self, layer: int, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor) -> torch.Tensor:
        planned = self._plans[self._dispatcher.kind_of(layer)]
        return planned.run(q_THD, k_NPGD, v_NPGD)[0]
