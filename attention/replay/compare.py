"""Model layer, comparing half: two recordings through one lm_head, in columns.

KL is D(A || B) in nats over the whole vocabulary, A the champion. With d = log q - log p it is the sum of
p (exp(d) - 1 - d), which equals the sum of -p d, since p and q each sum to 1, and has no negative term: rounding of
the logits enters squared, and two equal sides are at exactly 0.
A flip is a position whose argmax differs; its margin is A's largest logit minus A's logit of B's choice, in nats:
benign differences flip ties only.

16-bit states meet a 16-bit head in tensor-core products that are exact and summed in float32; float32 states and the
CPU use float32 products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from attention.errors import UserError
from attention.model_config import read_config
from attention.replay.digest import Running, digest
from attention.replay.states import MODES, Mode, States, positions

TOP_K = 10
_GROUPS = (256, 16)  # logits of which one may be among the largest, coarse to fine: see `_top`
#: Of one side's float32 logits at a time. On the CPU above 32 MB every block would be mapped and faulted in anew.
_CHUNK_BYTES = {"cpu": 1 << 24, "cuda": 1 << 30}

#: Name -> one value a position: `mode`, `prompt` (index), `position`, and the figures of FIGURES.
Columns = dict[str, np.ndarray[Any, Any]]
FIGURES = ("kl", "topk_overlap", "next_token_equal", "flip_margin", "nll_champion", "nll_candidate")
_Chunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Head:
    """The output projection [vocab, hidden], and the bound that some models put on its logits."""

    weight_VD: torch.Tensor
    softcap: float | None = None

    @classmethod
    def read(cls, model: Path, device: str = "cpu") -> Head:
        """From config.json and the safetensors of a model folder alone."""
        cap = read_config(model).get("final_logit_softcapping")
        return cls(lm_head(model).to(device), None if cap is None else float(cap))

    @cached_property
    def digest(self) -> str:
        """Of the weights as they are stored: what a recording's manifest names."""
        return digest(self.weight_VD)

    def logits(self, states_RD: torch.Tensor) -> torch.Tensor:
        """[R, vocab] in float32."""
        half = states_RD.is_cuda and states_RD.dtype == self.weight_VD.dtype != torch.float32
        if half:
            logits_RV = torch.mm(states_RD, self.weight_VD.T, out_dtype=torch.float32)
        else:
            logits_RV = states_RD.float() @ self.weight_VD.float().T
        return logits_RV if self.softcap is None else self.softcap * torch.tanh(logits_RV / self.softcap)


def lm_head(model: Path) -> torch.Tensor:
    """The output projection [vocab, hidden] as it is stored, read from the model's safetensors alone."""
    # All shards are asked for the head first: where it is not tied, the embeddings are another matrix.
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        for path in sorted(model.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                if name in file.keys():  # noqa: SIM118 (not a mapping)
                    weight: torch.Tensor = file.get_tensor(name)
                    return weight
    raise UserError(f"model {model}: no lm_head.weight or model.embed_tokens.weight in its safetensors")


def columns(
    a: States,
    b: States,
    head: Head,
    top_k: int = TOP_K,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Columns:
    """Both recordings position by position, prefill before decode. UserError where they are of different prompts or
    models, of another model than the head, or not as they were recorded."""
    check_pair(a, b)
    if head.digest != a.manifest.head:
        raise UserError(f"recording {a.folder}: is of another model, {a.manifest.model_id}, than the lm_head")
    if a.tokens.min() < 0 or a.tokens.max() >= len(head.weight_VD):
        raise UserError(f"recording {a.folder}: holds tokens that the lm_head does not have")
    if head.weight_VD.shape[1] != a.width:
        raise UserError(f"the lm_head takes {head.weight_VD.shape[1]} numbers, {a.folder} holds {a.width} a token")
    if not head.weight_VD.is_cuda:
        head = Head(head.weight_VD.float(), head.softcap)
    figures_of = _compiled() if head.weight_VD.is_cuda else _figures
    size = max(16, _CHUNK_BYTES[head.weight_VD.device.type] // (4 * head.weight_VD.shape[0]))
    total = sum(a.num_rows(mode) for mode in MODES)
    done, found = 0, []
    for mode in MODES:
        seen = (Running(), Running())
        for num, (a_RD, b_RD, next_R) in _chunks(a, b, mode, size, head.weight_VD.device):
            for one, rows_RD in zip(seen, (a_RD, b_RD), strict=True):
                one.add(rows_RD[:num])
            figures_6R = figures_of(head.logits(a_RD), head.logits(b_RD), next_R, top_k)
            found.append(figures_6R[:, :num])
            done += num
            progress(done, total)
        for side, one in zip((a, b), seen, strict=True):
            side.check(mode, one)
    table = torch.cat(found, 1).cpu().double().numpy() if found else np.empty((len(FIGURES), 0))
    figures = dict(zip(FIGURES, table, strict=True))
    return {**_places(a), **figures, "next_token_equal": figures["next_token_equal"] == 1}


def check_pair(a: States, b: States) -> None:
    """UserError unless both hold the same tokens of the same prompts, decoded alike, and of one model."""
    left, right = ({p.prompt_id: p for p in side.manifest.prompts} for side in (a, b))
    if left.keys() != right.keys():
        raise UserError(f"recordings differ in prompts: {sorted(left.keys() ^ right.keys())[:3]}; record both again")
    if list(left.values()) != list(right.values()):
        which = next(p.prompt_id for p, q in zip(a.manifest.prompts, b.manifest.prompts, strict=True) if p != q)
        raise UserError(f"recordings differ in the length, order or kind of {which}; record both again")
    if a.width != b.width or a.manifest.head != b.manifest.head:
        raise UserError(f"recordings are of different models: {a.manifest.model_id} and {b.manifest.model_id}")
    different = np.nonzero(a.tokens != b.tokens)[0]
    if len(different):
        ends = np.cumsum([p.num_tokens for p in a.manifest.prompts])
        which = a.manifest.prompts[int(np.searchsorted(ends, different[0], side="right"))].prompt_id
        raise UserError(f"recordings differ in the tokens of {which}; record both again")


def _places(a: States) -> Columns:
    """Mode, prompt and position of every row."""
    where = {mode: [places for _, places in positions(a.manifest, mode)] for mode in MODES}
    ranges = [places for mode in MODES for places in where[mode]]
    lens = np.array([len(places) for places in ranges], dtype=np.int64)
    starts = np.array([places.start for places in ranges], dtype=np.int64)
    num = len(a.manifest.prompts)
    return {
        "mode": np.repeat(np.array(MODES), [sum(map(len, where[mode])) for mode in MODES]),
        "prompt": np.repeat(np.tile(np.arange(num), len(MODES)), lens),
        "position": np.arange(lens.sum()) + np.repeat(starts - (lens.cumsum() - lens), lens),
    }


def _next_tokens(a: States, mode: Mode) -> torch.Tensor:
    """The token that follows each row's; -1 after the last of a prompt."""
    following = np.append(a.tokens[1:], -1).astype(np.int64)
    ends = np.cumsum([p.num_tokens for p in a.manifest.prompts])
    following[ends - 1] = -1
    starts = ends - [p.num_tokens for p in a.manifest.prompts]
    rows = [following[start + where.start : start + where.stop] for start, (_, where) in
            zip(starts, positions(a.manifest, mode), strict=True)]  # fmt: skip
    return torch.from_numpy(np.concatenate(rows)) if rows else torch.empty(0, dtype=torch.long)


def _chunks(a: States, b: States, mode: Mode, size: int, device: torch.device) -> Iterator[tuple[int, _Chunk]]:
    """Rows of both sides on the device, `size` at a time; a thread reads the next ones meanwhile.

    On a GPU the last chunk is filled up with zeros, since the compiled comparison has one size; its first number says
    how many rows are real.
    """
    next_N, total = _next_tokens(a, mode), a.num_rows(mode)

    def read(start: int) -> tuple[int, _Chunk]:
        stop = min(start + size, total)
        num = size if device.type == "cuda" else stop - start
        parts = []
        for side in (a, b):
            rows_RD = torch.zeros(num, side.width, dtype=side.dtype, pin_memory=device.type == "cuda")
            side.read(mode, start, rows_RD[: stop - start])
            parts.append(rows_RD)
        following = torch.full((num,), -1, dtype=torch.long, pin_memory=device.type == "cuda")
        following[: stop - start] = next_N[start:stop]
        return stop - start, (parts[0], parts[1], following)

    with ThreadPoolExecutor(max_workers=1) as pool:
        ahead = pool.submit(read, 0) if total else None
        start = 0
        while ahead is not None:
            num, parts = ahead.result()
            start += num
            ahead = pool.submit(read, start) if start < total else None
            left, right, following = (part.to(device, non_blocking=True) for part in parts)
            yield num, (left, right, following)


def _figures(a_RV: torch.Tensor, b_RV: torch.Tensor, next_R: torch.Tensor, top_k: int) -> torch.Tensor:
    """The figures of FIGURES, [6, R] in float32; NaN where there is none. NaN logits give NaN, which no gate passes."""
    tops_RK, others_RK = _top(a_RV, top_k), _top(b_RV, top_k)
    overlap_R = (tops_RK[:, :, None] == others_RK[:, None, :]).any(-1).float().mean(-1)
    best_R1, other_R1 = tops_RK[:, :1], others_RK[:, :1]
    margin_R = (a_RV.gather(1, best_R1) - a_RV.gather(1, other_R1)).squeeze(1)
    equal_R = (best_R1 == other_R1).squeeze(1)
    p_RV, q_RV = torch.log_softmax(a_RV, -1), torch.log_softmax(b_RV, -1)
    target_R1 = next_R.clamp(min=0)[:, None]
    nll_R, other_nll_R = (-side.gather(1, target_R1).squeeze(1) for side in (p_RV, q_RV))
    d_RV = q_RV.sub_(p_RV)
    kl_R = d_RV.expm1().sub_(d_RV).mul_(p_RV.exp_()).sum(-1)
    nan = torch.full_like(kl_R, float("nan"))
    nll_R, other_nll_R = (torch.where(next_R < 0, nan, nll) for nll in (nll_R, other_nll_R))
    return torch.stack([kl_R, overlap_R, equal_R.float(), torch.where(equal_R, nan, margin_R), nll_R, other_nll_R])


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    """On a GPU the passes over [R, vocab] are fused: they, not the products, take most of the time."""
    return torch.compile(_figures, dynamic=False)


def _top(logits_RV: torch.Tensor, k: int, groups: tuple[int, ...] = _GROUPS) -> torch.Tensor:
    """Indices [R, k] of the k largest logits, largest first; of equals that stand beside each other, the first.

    Each of them lies in one of the k groups with the largest maxima, or in the rest that fills no group: one pass over
    the logits instead of one a radix digit. What is left is looked through in smaller groups.
    """
    num_rows, vocab = logits_RV.shape
    size, *finer = groups or (0,)
    if not groups or vocab // size <= k:
        found = logits_RV.topk(min(k, vocab))
        # topk gives equals in any order: the first of them is what argmax calls the next token.
        by_place = found.indices.sort(-1).indices
        by_value = found.values.gather(1, by_place).sort(dim=-1, descending=True, stable=True).indices
        return found.indices.gather(1, by_place.gather(1, by_value))
    whole = vocab // size * size
    maxima_RG = logits_RV[:, :whole].unflatten(1, (-1, size)).amax(-1)
    chosen_RK = maxima_RG.topk(k).indices.sort(-1).values  # in order: the first of equals is the first index
    inside_N = torch.arange(size, device=logits_RV.device)
    rest = torch.arange(whole, vocab, device=logits_RV.device).expand(num_rows, -1)
    candidates_RC = torch.cat([(chosen_RK[:, :, None] * size + inside_N).flatten(1), rest], 1)
    return candidates_RC.gather(1, _top(logits_RV.gather(1, candidates_RC), k, tuple(finer)))


def as_rows(a: States, found: Columns) -> dict[str, Any]:
    """The columns as those of `model_replay`: NaN figures that mean none are null, prompts have their names."""
    prompts = a.manifest.prompts

    def named(of: str) -> list[Any]:
        values = np.array([getattr(prompt, of) for prompt in prompts])
        return list(values[found["prompt"]].tolist()) if prompts else []

    equal = found["next_token_equal"]
    nll = {name: _or_null(found[name], last) for name in ("nll_champion", "nll_candidate")
           for last in [_is_last(a, found)]}  # fmt: skip
    return {
        "prompt_id": named("prompt_id"),
        "category": named("category"),
        "language": named("language"),
        "num_tokens": named("num_tokens"),
        "mode": found["mode"].tolist(),
        "position": found["position"].tolist(),
        "kl": found["kl"].tolist(),
        "topk_overlap": found["topk_overlap"].tolist(),
        "next_token_equal": equal.tolist(),
        "flip_margin": _or_null(found["flip_margin"], equal),
        **nll,
    }


def _is_last(a: States, found: Columns) -> Any:
    lengths = np.array([prompt.num_tokens for prompt in a.manifest.prompts], dtype=np.int64)
    return found["position"] == lengths[found["prompt"]] - 1 if len(lengths) else np.empty(0, dtype=bool)


def _or_null(values: np.ndarray[Any, Any], none: Any) -> list[float | None]:
    """Floats, null where there is no figure by right; a NaN elsewhere stays one."""
    return [None if missing else value for value, missing in zip(values.tolist(), none.tolist(), strict=True)]


def describe(found: Columns) -> dict[str, dict[str, float]]:
    """Figures by mode: positions, mean and 99.9 % quantile of KL, Top-K overlap, agreement, flips and their margin."""
    out: dict[str, dict[str, float]] = {}
    for mode in MODES:
        mine = {name: values[found["mode"] == mode] for name, values in found.items()}
        num = len(mine["kl"])
        if not num:
            continue
        flips = mine["flip_margin"][~mine["next_token_equal"]]
        out[mode] = {
            "positions": num,
            "kl_mean": float(mine["kl"].mean()),
            "kl_p999": float(np.quantile(mine["kl"], 0.999)),
            "topk_overlap": float(mine["topk_overlap"].mean()),
            "agreement": float(mine["next_token_equal"].mean()),
            "flips": len(flips),
            "flip_margin": float(flips.max()) if len(flips) else 0.0,
        }
    return out
