"""Model layer, comparing half: two recordings through one lm_head.

KL is D(champion || candidate) in nats over the whole vocabulary, float32 logits, float64 sums.
A flip is a position whose argmax differs; its margin is the champion's top-1 minus the logit of the
candidate's choice, in nats: benign differences flip ties only.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from attention.errors import UserError
from attention.job import Prompt

_CHUNK_ROWS = 128


def lm_head(model: Path) -> torch.Tensor:
    """The output projection [vocab, hidden] in float32, read from the model's safetensors alone."""
    # All shards are asked for the head first: where it is not tied, the embeddings are another matrix.
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        for path in sorted(model.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                if name in file.keys():  # noqa: SIM118 (not a mapping)
                    weight: torch.Tensor = file.get_tensor(name).float()
                    return weight
    raise UserError(f"model {model}: no lm_head.weight or model.embed_tokens.weight in its safetensors")


def rows(
    champion: Path, candidate: Path, head_VD: torch.Tensor, prompts: dict[str, Prompt], top_k: int
) -> Iterator[dict[str, Any]]:
    """Rows of `model_replay`, one a (prompt, mode, position)."""
    with safe_open(champion, framework="pt") as left, safe_open(candidate, framework="pt") as right:
        names, others = set(left.keys()), set(right.keys())
        if names != others:
            raise UserError(f"recordings differ in prompts: {sorted(names ^ others)[:3]}; record both again")
        for prompt_id in sorted({name.rsplit("/", 1)[0] for name in names}):
            tokens = left.get_tensor(f"{prompt_id}/tokens").long()
            if not torch.equal(tokens, right.get_tensor(f"{prompt_id}/tokens").long()):
                raise UserError(f"recordings differ in the tokens of {prompt_id}; record both again")
            prompt = prompts.get(prompt_id)
            if prompt is None:
                raise UserError(f"recording {champion} holds {prompt_id}, which is none of the job's prompts")
            for mode in ("prefill", "decode"):
                a_RD, b_RD = (side.get_tensor(f"{prompt_id}/{mode}") for side in (left, right))
                first = len(tokens) - len(a_RD)
                for at in range(0, len(a_RD), _CHUNK_ROWS):
                    chunk = slice(at, at + _CHUNK_ROWS)
                    for offset, row in enumerate(_positions(a_RD[chunk], b_RD[chunk], head_VD, top_k)):
                        position = first + at + offset
                        target = int(tokens[position + 1]) if position + 1 < len(tokens) else None
                        yield {
                            "prompt_id": prompt_id,
                            "category": prompt.category,
                            "language": prompt.language,
                            "mode": mode,
                            "position": position,
                            **row.figures(target),
                            "time": datetime.now(UTC),
                        }


class _Position:
    def __init__(self, p_V: torch.Tensor, q_V: torch.Tensor, kl: float, overlap: float) -> None:
        self.p_V, self.q_V, self.kl, self.overlap = p_V, q_V, kl, overlap

    def figures(self, target: int | None) -> dict[str, Any]:
        best, other = int(self.p_V.argmax()), int(self.q_V.argmax())
        return {
            "kl": self.kl,
            "topk_overlap": self.overlap,
            "next_token_equal": best == other,
            "flip_margin": None if best == other else float(self.p_V[best] - self.p_V[other]),
            "nll_champion": None if target is None else -float(self.p_V[target]),
            "nll_candidate": None if target is None else -float(self.q_V[target]),
        }


def _positions(a_RD: torch.Tensor, b_RD: torch.Tensor, head_VD: torch.Tensor, top_k: int) -> Iterator[_Position]:
    p_RV = torch.log_softmax(a_RD.float() @ head_VD.T, -1)
    q_RV = torch.log_softmax(b_RD.float() @ head_VD.T, -1)
    # Rounding may leave a tiny negative; NaN stays NaN, which no gate lets pass.
    kl_R = (p_RV.double().exp() * (p_RV.double() - q_RV.double())).sum(-1)
    kl_R = torch.where(kl_R < 0, torch.zeros_like(kl_R), kl_R)
    tops, others = p_RV.topk(top_k).indices, q_RV.topk(top_k).indices
    overlap_R = (tops[:, :, None] == others[:, None, :]).any(-1).double().mean(-1)
    for row in range(len(p_RV)):
        yield _Position(p_RV[row], q_RV[row], float(kl_R[row]), float(overlap_R[row]))
