"""A recording of the tensor layer: outputs and LSE of seeded cases in one environment, judged elsewhere and later.

    python -m attention replay --cases cases.yaml --out A      # in one environment
    python -m attention replay --cases cases.yaml --out B      # in another, with other library versions
    python -m attention compare A B                            # anywhere

A recording is a folder of `manifest.json`, who ran what, and `tensors.npz`, the bytes of every output as the backend
left them. The manifest holds a hash of each question, so that numbers of different inputs are never compared, and one
of the tensors.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from attention import confirm
from attention.backends import create
from attention.backends.oracle import Truth
from attention.cases import AttentionCase, Inputs
from attention.errors import UserError, one_line
from attention.held import held
from attention.replaced import replaced
from attention.replay.environment import Environment
from attention.replay.problems import Problem, build, members_of, spec_of
from attention.replay.truths import Oracle, question_of
from attention.validated import validated
from attention.yaml_file import read_json

MANIFEST, TENSORS = "manifest.json", "tensors.npz"
NUM_SEEDS = 1 << 63  # those that torch's generators take

#: Output [T, H, D] and LSE [T, H].
Output = tuple[torch.Tensor, torch.Tensor | None]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Entry(_Strict):
    """One case, kind of inputs and seed: what was asked, and who answered or why nobody did."""

    case: AttentionCase
    inputs: Inputs
    seed: int = Field(ge=0, lt=NUM_SEEDS)
    question: str  # hash of q, K, V, mask and spec
    backend: str
    confirmed_backend: str | None = None
    out_dtype: str | None = None
    has_lse: bool = False
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.case.case_id, self.inputs, self.seed


class Manifest(Environment):
    """The environment that ran, and its entries; tensor i is entry i's."""

    entries: tuple[Entry, ...]
    tensors_sha256: str = ""


class Recording:
    """A recording that was read: UserError where it is not whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        strange = "was not written by `replay --cases`"
        document = read_json(folder / MANIFEST)
        self.manifest = validated(Manifest, document, f"recording {folder}: {MANIFEST} {strange}")
        try:
            raw = (folder / TENSORS).read_bytes()
        except OSError as error:
            raise UserError(f"recording {folder}: {error.strerror}: {error.filename}") from error
        if hashlib.sha256(raw).hexdigest() != self.manifest.tensors_sha256:
            raise UserError(f"recording {folder}: {TENSORS} is not what {MANIFEST} was written for; record it again")
        try:
            with np.load(io.BytesIO(raw), allow_pickle=False) as file:
                self._tensors = dict(file)
        except Exception as error:  # zipfile, zlib and NumPy have an exception each for every way not to be such a file
            raise UserError(f"recording {folder}: {TENSORS} {strange}: {one_line(error)}") from error
        self.index = {entry.key: i for i, entry in enumerate(self.manifest.entries)}

    def entry(self, key: tuple[str, str, int]) -> Entry | None:
        return self.manifest.entries[self.index[key]] if key in self.index else None

    def output(self, key: tuple[str, str, int]) -> Output:
        """Output [T, H, D] and LSE [T, H] of an entry without an error. UserError where the tensors are not there."""
        i = self.index[key]
        entry = self.manifest.entries[i]
        try:
            out = torch.from_numpy(self._tensors[f"{i}.out"]).view(getattr(torch, str(entry.out_dtype)))
            return out, torch.from_numpy(self._tensors[f"{i}.lse"]).view(torch.float32) if entry.has_lse else None
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            raise UserError(
                f"recording {self.folder}: no output of {entry.case.case_id} ({error}): record it again"
            ) from error


def record(
    cases: Sequence[AttentionCase],
    inputs: Sequence[Inputs],
    seeds: Sequence[int],
    backend_of: Callable[[AttentionCase], str],
    environment: Manifest,
    out: Path,
    *,
    device: str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Run every case, kind of inputs and seed; write the recording into `out`. A case that raises is an entry.

    UserError where another process writes into `out`, before minutes of work.
    """
    with held(out):
        entries, arrays = _answers(cases, inputs, seeds, backend_of, device, progress)
        with replaced(out / TENSORS) as fresh:
            with fresh.open("wb") as sink:  # a name would get an ending
                np.savez(sink, **arrays)  # type: ignore[arg-type]
            digest = hashlib.sha256(fresh.read_bytes()).hexdigest()
        manifest = environment.model_copy(update={"entries": tuple(entries), "tensors_sha256": digest})
        with replaced(out / MANIFEST) as fresh:
            fresh.write_text(manifest.model_dump_json(indent=1) + "\n")
    return manifest


def _answers(
    cases: Sequence[AttentionCase],
    inputs: Sequence[Inputs],
    seeds: Sequence[int],
    backend_of: Callable[[AttentionCase], str],
    device: str,
    progress: Callable[[int, int], None],
) -> tuple[list[Entry], dict[str, np.ndarray[Any, Any]]]:
    """Entries in the order of what is asked, and the arrays of each by its number."""
    asked = [
        (case, kind, seed)
        for case in cases
        for kind in inputs
        if kind != "window_edge" or case.windowed
        for seed in seeds
    ]
    entries: list[Entry] = []
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for i, (case, kind, seed) in enumerate(asked):
        entry, tensors = _run(case, kind, seed, backend_of(case), device)
        entries.append(entry)
        arrays.update({f"{i}.{name}": array for name, array in tensors.items()})
        progress(i + 1, len(asked))
    return entries, arrays


def _run(
    case: AttentionCase, inputs: Inputs, seed: int, backend: str, device: str
) -> tuple[Entry, dict[str, np.ndarray[Any, Any]]]:
    spec = spec_of(case)
    members = members_of(case, spec, inputs, seed)
    entry = Entry(case=case, inputs=inputs, seed=seed, question=question_of(members, spec), backend=backend)
    try:
        problem = build(case, spec, members, seed=seed, device=device, oracle=_unasked)
        with torch.inference_mode():
            planned = create(backend, device).plan(problem.batch, spec)
            (out, lse), confirmed = confirm.watch(
                lambda: planned.run(problem.q_THD, problem.k, problem.v), device=device
            )
    except Exception as error:  # a case that raises is an entry, never the end of the run
        return entry.model_copy(update={"error": f"{type(error).__name__}: {error}"[:500]}), {}
    arrays = {"out": out.cpu().contiguous().view(torch.uint8).numpy()}
    if lse is not None:
        arrays["lse"] = lse.float().cpu().numpy()
    told = {
        "confirmed_backend": confirmed,
        "out_dtype": str(out.dtype).removeprefix("torch."),
        "has_lse": lse is not None,
    }
    return entry.model_copy(update=told), arrays


def _unasked(*_: Any) -> Truth:
    """Who records needs no truth: it is computed where recordings are compared."""
    nothing = torch.empty(0)
    return Truth(nothing, nothing, nothing)


def question_again(entry: Entry, oracle: Oracle) -> Problem | None:
    """The problem of an entry with its truth, or None where this environment draws other numbers from its seed."""
    spec = spec_of(entry.case)
    members = members_of(entry.case, spec, entry.inputs, entry.seed)
    if question_of(members, spec) != entry.question:
        return None
    return build(entry.case, spec, members, seed=entry.seed, oracle=oracle)
