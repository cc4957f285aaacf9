"""Folders that hold what users wrote: prompts, answers, token ids. Only this user may enter them."""

from __future__ import annotations

from pathlib import Path


def private_folder(folder: Path) -> Path:
    """`folder`, made with mode 0700 if it is missing, and so its missing parents; one that is there stays as it is."""
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    return folder
