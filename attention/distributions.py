"""Installed distributions by the hash of their RECORD: what the environment of this interpreter is.

Free of torch, so that a command can compare environments before it loads anything.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from functools import cache


@cache
def installed() -> dict[str, str]:
    """name -> `<version>+<hash of RECORD>`, sorted: an edited wheel changes it, byte code does not."""
    found = {}
    for dist in importlib.metadata.distributions():
        name = str(dist.metadata["Name"]).lower().replace("_", "-")
        lines = sorted(line for line in (dist.read_text("RECORD") or "").splitlines() if "__pycache__" not in line)
        found[name] = f"{dist.version}+{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:12]}"
    return dict(sorted(found.items()))
