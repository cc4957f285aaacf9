"""Truths that are computed once: the oracle's answers in a folder, by the hash of what they answer.

A truth belongs to q, K and V as they are stored, the mask and the spec; layout, pages and backend do not matter, so
both sides of a release, a resumed one and every backend of a matrix share it. The key hashes those numbers, the spec
and the oracle's source: another case, seed, kind of inputs, generator or oracle is another file.

What a file says is believed only if its own hash, over key and numbers, is right. One that was cut off, edited or
renamed is computed anew and written over. A file is that seal and the bytes of output, LSE and rounded output, whose
sizes the question gives: there is no header to believe.

On a GPU all hashes are computed there, and files go through pinned memory, which the device copies by itself.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path

import torch

from attention.backends import base, oracle
from attention.backends.base import AttentionSpec
from attention.backends.oracle import Truth, attend
from attention.private import private_folder
from attention.replay.digest import digest
from attention.replay.members import Member

#: Members, their spec and the device to compute on -> the truth of all their tokens, on that device.
Oracle = Callable[[Sequence[Member], AttentionSpec, str], Truth]

_MOST_KEYS = 1 << 26  # numbers of K of one call: half a gigabyte in float64
_NUM_SEAL = 64  # bytes of a file's seal


def compute(members: Sequence[Member], spec: AttentionSpec, device: str) -> Truth:
    """The oracle itself. Neighbours of one size are heads of one call: a GPU counts launches."""
    found = []
    for _, group in groupby(members, lambda m: (m.q_QHD.shape, m.k_LGD.shape, m.mask_QL is not None and id(m))):
        alike = list(group)
        num = max(1, _MOST_KEYS // max(1, alike[0].k_LGD.numel()))
        for first in range(0, len(alike), num):
            found += _side_by_side(alike[first : first + num], spec, device)
    return joined(found)


def _side_by_side(members: list[Member], spec: AttentionSpec, device: str) -> list[Truth]:
    """Truths of members of one size, which have no mask unless there is one alone."""
    num, mask_QL = len(members), members[0].mask_QL
    heads = replace(
        spec,
        heads_q=num * spec.heads_q,
        heads_kv=num * spec.heads_kv,
        alibi_slopes=None if spec.alibi_slopes is None else num * spec.alibi_slopes,
        sinks=None if spec.sinks is None else num * spec.sinks,
    )
    q, k, v = (torch.cat([getattr(m, name).to(device) for m in members], 1) for name in ("q_QHD", "k_LGD", "v_LGD"))
    truth = attend(q, k, v, heads, None if mask_QL is None else mask_QL.to(device))
    each = (tensor.split(spec.heads_q, 1) for tensor in vars(truth).values())
    return [Truth(*parts) for parts in zip(*each, strict=True)]


def joined(truths: Sequence[Truth]) -> Truth:
    """The truth of a batch from those of its members."""
    return Truth(
        torch.cat([t.out_QHD for t in truths]),
        torch.cat([t.lse_QH for t in truths]),
        torch.cat([t.rounded_QHD for t in truths]),
    )


class Truths:
    """An oracle that remembers in a folder; any number of processes and threads may use one folder at once."""

    def __init__(self, folder: Path, oracle: Oracle = compute) -> None:
        self.folder = private_folder(folder)
        self._oracle, self._lock = oracle, threading.Lock()
        self.num_read = self.num_computed = 0

    def __call__(self, members: Sequence[Member], spec: AttentionSpec, device: str) -> Truth:
        key = key_of(members, spec)
        path = self.folder / f"{key}.truth"
        shape_QHD = (sum(len(m.q_QHD) for m in members), spec.heads_q, spec.head_dim_vo)
        found = _read(path, key, shape_QHD, spec.dtype, device)
        with self._lock:
            self.num_computed += found is None
            self.num_read += found is not None
        if found is None:
            found = self._oracle(members, spec, device)
            _write(path, key, found, spec.dtype)
        return found


def key_of(members: Sequence[Member], spec: AttentionSpec) -> str:
    """Hash of all that a truth depends on."""
    return hashlib.sha256(f"{oracle_version()}|{question_of(members, spec)}".encode()).hexdigest()


def question_of(members: Sequence[Member], spec: AttentionSpec) -> str:
    """Hash of what is asked: two environments that draw other numbers from a seed ask other questions.

    Members lie on one device, whichever. Waits once for a GPU.
    """
    named = [(name, tensor) for member in members for name, tensor in vars(member).items() if tensor is not None]
    names, tensors = [name for name, _ in named], [tensor for _, tensor in named]
    return hashlib.sha256(f"{spec!r}|{names}|{digest(*tensors)}".encode()).hexdigest()


@cache
def oracle_version() -> str:
    """Hash of the oracle's source, and of the masks that it takes from `base`."""
    sources = (Path(str(module.__file__)).read_bytes() for module in (oracle, base))
    return hashlib.sha256(b"".join(sources)).hexdigest()[:16]


def _read(path: Path, key: str, shape_QHD: tuple[int, int, int], dtype: torch.dtype, device: str) -> Truth | None:
    """None for a file that is missing, unreadable, of another size or key, or whose numbers have another hash."""
    num, num_rows = math.prod(shape_QHD), math.prod(shape_QHD[:2])
    sizes = [8 * num, 8 * num_rows, dtype.itemsize * num]
    try:
        with path.open("rb") as source:
            if os.fstat(source.fileno()).st_size != _NUM_SEAL + sum(sizes):
                return None
            seal = source.read(_NUM_SEAL)
            staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.startswith("cuda"))
            if source.readinto(staged.numpy().data) != len(staged):
                return None
    except OSError:
        return None
    body = staged.to(device, non_blocking=True)
    out, lse, rounded = parts = body.split(sizes)
    if seal != _seal(key, parts):  # has waited for the copy: `staged` may go
        return None
    return Truth(
        out.view(torch.float64).view(shape_QHD),
        lse.view(torch.float64).view(shape_QHD[:2]),
        rounded.view(dtype).view(shape_QHD).double(),
    )


def _write(path: Path, key: str, truth: Truth, dtype: torch.dtype) -> None:
    """Whole, or with a warning not at all. Rounded output is exact in its own dtype, so it costs 2 bytes and not 8."""
    parts = [_raw(t) for t in (truth.out_QHD, truth.lse_QH, truth.rounded_QHD.to(dtype))]
    with _on_host(parts) as staged:
        seal = _seal(key, parts)  # while the copies run
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as sink:
            sink.write(seal)
            for part in staged:
                sink.write(part.numpy().data)
        temporary.replace(path)
    except OSError as error:  # a full disk, a folder to read alone: the truth is known, and not remembered
        warnings.warn(f"{path.parent}: truths are not kept: {error.strerror}", stacklevel=2)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def _on_host(parts: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The same bytes on the host; from a GPU they are there at the end of the block."""
    if not parts[0].is_cuda:
        yield list(parts)
        return
    staged = [torch.empty_like(part, device="cpu", pin_memory=True) for part in parts]
    for one, part in zip(staged, parts, strict=True):
        one.copy_(part, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)
    copied.record(torch.cuda.current_stream(parts[0].device))
    yield staged
    copied.synchronize()


def _seal(key: str, parts: Sequence[torch.Tensor]) -> bytes:
    """Waits for the device that holds the parts."""
    return hashlib.sha256(f"{key}|{digest(*parts)}".encode()).hexdigest().encode()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
