"""Limits of one serving instance; free of torch, since every job file carries them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What one instance takes on, in requests and tokens. The defaults are a CPU's, where a step of 256
    tokens already holds up every decode for a fraction of a second."""

    max_running: int = 32
    max_step_tokens: int = 256
    prefill_chunk: int = 128
    max_queue: int = 128
    max_output_tokens: int = 2048
    cuda_graphs: bool = False  # decode steps are replayed from graphs (attention/decode_graphs.py); on a GPU
    prefix_reuse: bool = True  # whole pieces of `prefill_chunk` tokens that prompts share are computed once
    max_prompt_tokens: int = 1 << 20  # context and cache usually hold less
    max_body_bytes: int = 1 << 20
    request_timeout_s: float = 600.0  # from arrival to the last token

    def __post_init__(self) -> None:
        if self.max_step_tokens < self.max_running + self.prefill_chunk:
            raise ValueError(
                f"max_step_tokens={self.max_step_tokens} must hold max_running={self.max_running} decodes "
                f"and one prefill_chunk={self.prefill_chunk}, or prompts would starve behind decodes"
            )
