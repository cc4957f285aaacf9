"""Truths that are computed once: the oracle's answers in a folder, by the hash of what they answer.

A truth belongs to q, K and V as they are stored, the mask and the spec; layout, pages and backend do not matter, so
both sides of a release, a resumed one and every backend of a matrix share it. The key hashes those numbers, the spec
and the oracle's source: another case, seed, kind of inputs, generator or oracle is another file.

What a file says is believed only if its own hash, over key and numbers, is right. One that was cut off, edited or
renamed is computed anew and written over.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from attention.backends import base, oracle
from attention.backends.base import AttentionSpec
from attention.backends.oracle import Truth, attend
from attention.private import private_folder
from attention.replay.members import Member

#: Members on the CPU, their spec and the device to compute on -> the truth of all their tokens, on that device.
Oracle = Callable[[Sequence[Member], AttentionSpec, str], Truth]


def compute(members: Sequence[Member], spec: AttentionSpec, device: str) -> Truth:
    """The oracle itself."""
    found = []
    for m in members:
        q, k, v = (t.to(device) for t in (m.q_QHD, m.k_LGD, m.v_LGD))
        found.append(attend(q, k, v, spec, None if m.mask_QL is None else m.mask_QL.to(device)))
    return joined(found)


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
        found = _read(path, key, spec.dtype, device)
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
    """Hash of what is asked: two environments that draw other numbers from a seed ask other questions."""
    digest = hashlib.sha256(repr(spec).encode())
    for member in members:
        for name, tensor in vars(member).items():
            if tensor is not None:
                digest.update(f"|{name} {tensor.dtype} {tuple(tensor.shape)}|".encode())
                digest.update(_bytes(tensor))
    return digest.hexdigest()


@cache
def oracle_version() -> str:
    """Hash of the oracle's source, and of the masks that it takes from `base`."""
    sources = (Path(str(module.__file__)).read_bytes() for module in (oracle, base))
    return hashlib.sha256(b"".join(sources)).hexdigest()[:16]


def _read(path: Path, key: str, dtype: torch.dtype, device: str) -> Truth | None:
    """None for a file that is missing, unreadable, of another key, or whose numbers have another hash."""
    try:
        with path.open("rb") as source:  # four arrays one after the other: a zip's checksums cost more than the seal
            seal, *arrays = (np.load(source, allow_pickle=False) for _ in range(4))
        out, lse, raw = map(torch.from_numpy, arrays)
        rounded = raw.view(dtype)
    except Exception:  # numpy and torch each raise their own for what is no file of ours
        return None
    if str(seal) != _seal(key, out, lse, rounded):
        return None
    return Truth(out.to(device), lse.to(device), rounded.to(device).double())


def _write(path: Path, key: str, truth: Truth, dtype: torch.dtype) -> None:
    """Whole or not at all. The rounded output is exact in its own dtype, so it costs 2 bytes and not 8."""
    out, lse = truth.out_QHD.cpu().contiguous(), truth.lse_QH.cpu().contiguous()
    rounded = truth.rounded_QHD.cpu().to(dtype).contiguous()
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    with temporary.open("wb") as sink:
        for array in (_seal(key, out, lse, rounded), out.numpy(), lse.numpy(), rounded.view(torch.uint8).numpy()):
            np.save(sink, np.asarray(array), allow_pickle=False)
    temporary.replace(path)


def _seal(key: str, *tensors: torch.Tensor) -> str:
    digest = hashlib.sha256(key.encode())
    for tensor in tensors:
        digest.update(f"|{tensor.dtype} {tuple(tensor.shape)}|".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    data: memoryview = flat.numpy().data
    return data
