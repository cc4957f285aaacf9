"""A recording of the model layer on disk: final hidden states of teacher-forced prompts, and who made them.

A folder of `manifest.json`, written last, and three NumPy files whose rows follow the manifest's prompts:

    tokens.npy    int32 [N]      the tokens of all prompts
    prefill.npy   [N, hidden]    the states of every token, scored in prefill
    decode.npy    [M, hidden]    the states of each prompt's last tokens, forced through the KV cache

States are kept in the dtype of the model, bit by bit (NumPy has no bfloat16: 16-bit states are stored as uint16).
Only states are kept (1.2 kB a token of SmolLM2-135M in bfloat16), from which one comparer computes exact
distributions with one lm_head: logits of two environments never meet two different matrix products.

The manifest has a digest of each file and of that lm_head. What was exchanged, edited or is of another model is
refused: tokens when they are read, states when they are compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from attention.errors import UserError
from attention.held import held
from attention.private import private_folder
from attention.replaced import replaced
from attention.replay.digest import Running, digest
from attention.replay.environment import Environment
from attention.yaml_file import read_json

MANIFEST = "manifest.json"
Mode = Literal["prefill", "decode"]
MODES: tuple[Mode, ...] = ("prefill", "decode")

_STORED: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.bfloat16: np.dtype("<u2"),
    torch.float16: np.dtype("<u2"),
}
_SAME_BITS = {np.dtype("<f4"): torch.float32, np.dtype("<u2"): torch.uint16}
_MAX_WAITING = 4  # blocks of rows that may wait for the disk


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Recorded(_Strict):
    """One prompt: how many tokens it has, and how many of them were forced one by one."""

    prompt_id: str
    category: str
    language: str
    num_tokens: int = Field(ge=1)
    num_decoded: int = Field(ge=0)

    @model_validator(mode="after")
    def _decoded_of_its_tokens(self) -> Recorded:
        if self.num_decoded > self.num_tokens:
            raise ValueError("more decoded tokens than tokens")
        return self


class Manifest(Environment):
    """The environment that ran, the backends that ran there, and the prompts in the order of their rows."""

    kind: Literal["model"] = "model"
    model: Path  # folder whose lm_head belongs to these states
    model_id: str
    head: str  # digest of that lm_head
    dtype: Literal["float32", "bfloat16", "float16"]
    resolved: dict[str, str] = Field(default_factory=dict)  # by phase
    confirmed: dict[str, str] = Field(default_factory=dict)
    prompts: tuple[Recorded, ...] = ()
    digests: dict[str, str] = Field(default_factory=dict)  # by file


class States:
    """A recording that was read; UserError where it is none or not whole. Rows stay on the disk until asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.manifest = Manifest.model_validate_json((folder / MANIFEST).read_text())
            self.tokens: np.ndarray[Any, Any] = np.load(folder / "tokens.npy")
            self._rows = {mode: np.load(folder / f"{mode}.npy", mmap_mode="r") for mode in MODES}
        except OSError as error:
            raise UserError(f"recording {folder}: {error.strerror}: {error.filename}; record it again") from error
        except (ValueError, EOFError) as error:
            raise UserError(f"recording {folder}: not a whole recording of prompts; record it again") from error
        self.dtype: torch.dtype = getattr(torch, self.manifest.dtype)
        prompts = self.manifest.prompts
        if not prompts:
            raise UserError(f"recording {folder}: holds no prompt; record it again")
        stored = _STORED[self.dtype]
        widths = {rows.shape[1] if rows.ndim == 2 and rows.dtype == stored else None for rows in self._rows.values()}
        if len(widths) != 1 or None in widths or not {*MODES} <= {*self.manifest.resolved} & {*self.manifest.confirmed}:
            raise UserError(f"recording {folder}: its files are not what its manifest says; record it again")
        self.width = int(widths.pop() or 0)
        if self.tokens.ndim != 1 or self._digest_of_tokens() != self.manifest.digests.get("tokens"):
            raise UserError(f"recording {folder}: tokens.npy is not as it was recorded; record it again")
        wanted = {"prefill": sum(p.num_tokens for p in prompts), "decode": sum(p.num_decoded for p in prompts)}
        found = {mode: len(rows) for mode, rows in self._rows.items()}
        if found != wanted or len(self.tokens) != wanted["prefill"]:
            raise UserError(f"recording {folder}: {found} rows for {wanted} of its prompts; record it again")

    def _digest_of_tokens(self) -> str:
        return digest(torch.from_numpy(self.tokens)) if self.tokens.dtype == np.int32 else ""

    def check(self, mode: Mode, found: Running) -> None:
        """UserError where the rows of a mode, all of which `found` has seen, are not those that were recorded."""
        if found.hex() != self.manifest.digests.get(mode):
            raise UserError(f"recording {self.folder}: {mode}.npy is not as it was recorded; record it again")

    def rows(self, mode: Mode, start: int, stop: int) -> torch.Tensor:
        """States [stop - start, hidden] on the CPU, in the model's dtype."""
        found = torch.empty(stop - start, self.width, dtype=self.dtype)
        self.read(mode, start, found)
        return found

    def read(self, mode: Mode, start: int, into_RD: torch.Tensor) -> None:
        """States from row `start` on, into memory on the CPU that is there: no copy of a copy."""
        numbers = self._rows[mode]
        into_RD.view(_SAME_BITS[numbers.dtype]).numpy()[:] = numbers[start : start + len(into_RD)]

    def num_rows(self, mode: Mode) -> int:
        return len(self._rows[mode])


class Sink:
    """Rows of one file, appended by a thread while the device computes the next ones."""

    def __init__(self, path: Path, num_rows: int, width: int, dtype: torch.dtype) -> None:
        self._file = path.open("wb")
        header = {"descr": np.lib.format.dtype_to_descr(_STORED[dtype]), "fortran_order": False}
        np.lib.format.write_array_header_1_0(self._file, {**header, "shape": (num_rows, width)})
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._waiting: deque[Future[None]] = deque()
        self.digest = Running()

    def append(self, states_RD: torch.Tensor) -> None:
        """Copy rows from the device without waiting for it, and have them written. Raises what an earlier write did."""
        done: Any = None
        self.digest.add(states_RD)
        host = states_RD
        if states_RD.is_cuda:
            host = torch.empty(states_RD.shape, dtype=states_RD.dtype, pin_memory=True)
            host.copy_(states_RD, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self._waiting.append(self._pool.submit(self._write, host, done))
        while len(self._waiting) > _MAX_WAITING:
            self._waiting.popleft().result()

    def _write(self, host_RD: torch.Tensor, done: Any) -> None:
        if done is not None:
            done.synchronize()
        self._file.write(host_RD.contiguous().view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Wait for all rows. Raises what a write did."""
        try:
            while self._waiting:
                self._waiting.popleft().result()
        finally:
            self._pool.shutdown()
            self._file.close()


class Writer:
    """A recording under way: rows prompt by prompt, the manifest at the end."""

    def __init__(self, out: Path, manifest: Manifest, texts: Sequence[Sequence[int]], width: int) -> None:
        self._out, self._manifest = private_folder(out), manifest
        self._hold = ExitStack()
        self._hold.enter_context(held(out))
        (out / MANIFEST).unlink(missing_ok=True)  # what it described is about to go
        tokens = np.array([token for ids in texts for token in ids], dtype=np.int32)
        np.save(out / "tokens.npy", tokens)
        self._tokens = digest(torch.from_numpy(tokens))
        dtype = getattr(torch, manifest.dtype)
        num = {
            "prefill": sum(p.num_tokens for p in manifest.prompts),
            "decode": sum(p.num_decoded for p in manifest.prompts),
        }
        self.sinks = {mode: Sink(out / f"{mode}.npy", num[mode], width, dtype) for mode in MODES}

    def finish(self, confirmed: dict[str, str]) -> None:
        for sink in self.sinks.values():
            sink.close()
        digests: dict[str, str] = {"tokens": self._tokens}
        digests.update((mode, sink.digest.hex()) for mode, sink in self.sinks.items())
        manifest = self._manifest.model_copy(update={"confirmed": confirmed, "digests": digests})
        with replaced(self._out / MANIFEST) as fresh:
            fresh.write_text(manifest.model_dump_json(indent=1) + "\n")
        self._hold.close()


def kind_of(folder: Path) -> Literal["prompts", "cases"] | None:
    """What a folder says that it is a recording of; `States` and `Recording` say whether it is whole."""
    try:
        found = read_json(folder / MANIFEST)
    except UserError:
        return None
    if not isinstance(found, dict):
        return None
    return "prompts" if found.get("kind") == "model" else "cases" if "entries" in found else None


def positions(manifest: Manifest, mode: Mode) -> Iterator[tuple[int, range]]:
    """Each prompt's index and the positions of its rows in a mode."""
    for i, prompt in enumerate(manifest.prompts):
        first = 0 if mode == "prefill" else prompt.num_tokens - prompt.num_decoded
        yield i, range(first, prompt.num_tokens)
