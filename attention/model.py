"""The model runner: a transformers causal LM whose attention is ours, over a paged KV cache.

    runner = Runner(Path("data/models/smollm2-135m-instruct"), policy=policy)
    pages = runner.pool.alloc(1)
    hidden = runner.forward([Chunk(token_ids=(1, 2, 3), start=0, block_table=tuple(pages))])
    logits = runner.logits(hidden)

A forward takes any mix of prefills, extends and decodes as one packed row of tokens. The attention
function is registered with transformers' attention interface as `governed_paged`, so that any causal LM
that goes through the interface works; it writes K and V into the pages, then asks the dispatcher.
(`governed`, without pages and without this runner: attention/governed.py.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch

from attention import fused_norms, half_weights
from attention.backends.base import AttentionSpec, Batch
from attention.dispatch import Dispatcher
from attention.model_config import DTYPES as DTYPE_NAMES
from attention.model_config import layer_kinds, read_config, resolve_dtype
from attention.reasons import Reason

#: Its name in transformers' attention interface. It has no mask function there: a step makes no mask.
PAGED = "governed_paged"
if TYPE_CHECKING:
    from attention.decode_graphs import DecodeGraphs

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


class OutOfPages(RuntimeError):
    """The page pool cannot give as many pages as were asked for."""


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence to run now; `start` of its tokens are in the cache already."""

    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    avoid: Mapping[str, Reason] = field(default_factory=dict)  # backends that must not run it, with the reasons


class PagePool:
    """Free list of KV pages. The last page freed is the first given, so that few are ever touched."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        """`count` pages, or OutOfPages and none."""
        if count > len(self._free):
            raise OutOfPages(f"{count} KV pages wanted, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.pop() for _ in range(count)]
        self._taken.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. Raises ValueError, and frees none, for a page that is not taken."""
        if wrong := [page for page in pages if page not in self._taken]:
            raise ValueError(f"pages {wrong[:5]} are not taken: freeing one twice would give it to two sequences")
        self._taken.difference_update(pages)
        self._free.extend(reversed(pages))


def specs_of(model_path: Path, dtype: str) -> list[AttentionSpec]:
    """One AttentionSpec a layer, read from config.json without loading weights."""
    return [
        AttentionSpec(
            heads_q=kind.heads_q,
            heads_kv=kind.heads_kv,
            head_dim_qk=kind.head_dim_qk,
            head_dim_vo=kind.head_dim_vo,
            dtype=DTYPES[dtype],
            scale=kind.scale,
            window=kind.window,
            softcap=kind.softcap,
        )
        for kind in layer_kinds(model_path)
    ]


class Runner:
    """One loaded model with its pages. Not thread-safe: one engine thread drives it."""

    def __init__(
        self,
        model_path: Path,
        dispatcher: Dispatcher,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        page_size: int = 16,
        num_pages: int = 1024,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        _register()
        read_config(model_path)
        self.name = model_path.resolve().name
        self.device = device
        self.dtype = DTYPES[resolve_dtype(dtype, device)]
        self.dispatcher = dispatcher
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.spare_page = num_pages  # for members of a step that stand for nobody
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=self.dtype, attn_implementation=PAGED)
        self._model.to(device).eval()
        if half_weights.supported(device, self.dtype):
            half_weights.pack(self._model)
        if device.startswith("cuda"):
            fused_norms.fuse(self._model)
        self.eos_token_ids = _eos(self._model, GenerationConfig.from_pretrained(model_path), self.tokenizer)
        self.max_context = int(self._model.config.max_position_embeddings)
        self.hidden_size = int(self._model.config.hidden_size)
        self._k = [self._pages(spec.heads_kv, spec.head_dim_qk) for spec in dispatcher.specs]
        self._v = [self._pages(spec.heads_kv, spec.head_dim_vo) for spec in dispatcher.specs]
        # Sees q_THD, k_TGD, v_TGD of every layer before attention; what it raises ends the step.
        self.tap: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None
        self.graphs: DecodeGraphs | None = None  # set by who serves on a GPU

    def _pages(self, heads_kv: int, head_dim: int) -> torch.Tensor:
        shape = (self.pool.num_pages + 1, self.page_size, heads_kv, head_dim)  # one is nobody's: `spare_page`
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], *, rows: Literal["last", "all"] = "last") -> torch.Tensor:
        """Run one step. Final hidden states [R, hidden]: of each chunk's last token, or of all tokens."""
        if self.graphs is not None and self.tap is None and (replayed := self.graphs.forward(chunks)) is not None:
            return replayed
        batch = Batch(
            tuple(len(c.token_ids) for c in chunks),
            tuple(c.start + len(c.token_ids) for c in chunks),
            tuple(c.block_table for c in chunks),
            self.page_size,
        )
        ids, positions, slots = self._sent(_packed(chunks, self.page_size))
        self.dispatcher.plan(batch, [c.avoid for c in chunks])
        hidden = self.hidden(ids, positions, slots)
        if rows == "all" or len(chunks) == len(hidden):
            return hidden
        ends = torch.tensor(batch.q_lens, device=self.device).cumsum(0) - 1
        return hidden.index_select(0, ends)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Final hidden states [T, hidden] of a planned step's tokens, whose K and V go into their slots."""
        out = self._model.base_model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, governed=_Step(self, slots)
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def _sent(self, numbers: np.ndarray[Any, Any]) -> torch.Tensor:
        """Numbers as a tensor on the device; the host does not wait for what runs there."""
        host = torch.from_numpy(numbers)
        if not self.device.startswith("cuda"):
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    @torch.inference_mode()
    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Next-token logits [R, vocab] in float32."""
        head = self._model.get_output_embeddings()
        logits: torch.Tensor = head(hidden_RD.to(self.dtype)).float()
        cap = getattr(self._model.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def confirm_idle(self, age_s: float) -> bool:
        """Have the execution layer name a backend again, if one was named longest ago by `age_s` at least. Raises
        BackendFailedError."""
        with torch.inference_mode():
            return self.dispatcher.confirm_idle(self._k[0], self._v[0], age_s)

    def attend(
        self, layer: int, slots: torch.Tensor, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor
    ) -> torch.Tensor:
        """Write K and V of the step's tokens into their slots, then attend: [T, H, D_vo]."""
        if self.tap is not None:
            self.tap(layer, q_THD, k_TGD, v_TGD)
        self._k[layer].view(-1, *k_TGD.shape[1:]).index_copy_(0, slots, k_TGD)
        self._v[layer].view(-1, *v_TGD.shape[1:]).index_copy_(0, slots, v_TGD)
        return self.dispatcher.run(layer, q_THD, self._k[layer], self._v[layer])


def _packed(chunks: Sequence[Chunk], page_size: int) -> np.ndarray[Any, Any]:
    """Token ids, positions and slots of all tokens, int64 [3, T]."""
    lens, starts = (np.array(numbers) for numbers in ([len(c.token_ids) for c in chunks], [c.start for c in chunks]))
    ids = np.fromiter(chain.from_iterable(c.token_ids for c in chunks), np.int64, lens.sum())
    positions = np.arange(len(ids)) + np.repeat(starts - (lens.cumsum() - lens), lens)
    firsts = starts // page_size
    counts = (starts + lens - 1) // page_size - firsts + 1  # pages that a chunk writes
    touched = (c.block_table[first : first + n] for c, first, n in zip(chunks, firsts, counts, strict=True))
    pages = np.fromiter(chain.from_iterable(touched), np.int64)
    at = np.repeat(counts.cumsum() - counts - firsts, lens) + positions // page_size
    return np.stack([ids, positions, pages[at] * page_size + positions % page_size])


@dataclass(frozen=True)
class _Step:
    runner: Runner
    slots: torch.Tensor


def _governed(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: q, k, v as [1, heads, T, D]; returns [1, T, H, D]."""
    step: _Step = kwargs["governed"]
    q_THD, k_TGD, v_TGD = (t[0].transpose(0, 1) for t in (query, key, value))
    out_THD = step.runner.attend(module.layer_idx, step.slots, q_THD, k_TGD, v_TGD)
    return out_THD[None], None


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, _governed)


def _eos(model: Any, generation: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for value in (model.config.eos_token_id, generation.eos_token_id, tokenizer.eos_token_id):
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    return frozenset(found)
