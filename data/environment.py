"""Environments: where a candidate lives (data/environments/<name>.yaml), added by a person.

An event or an HTTP call may only pick one by name; what runs there is decided here.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from attention.errors import UserError, nearest
from attention.yaml_file import read_yaml
from data.jsonl import first_error

FOLDER = Path(__file__).parent / "environments"


class Environment(BaseModel):
    """An interpreter with `attention` installed: `current`, or the path of another one's python."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    interpreter: str

    @property
    def python(self) -> str:
        return sys.executable if self.interpreter == "current" else self.interpreter

    def digest(self) -> str:
        """Hash of the installed distributions there. Raises UserError when they cannot be asked."""
        if self.interpreter == "current":
            from attention.distributions import installed

            found = installed()
        else:
            code = "import json;from attention.distributions import installed;print(json.dumps(installed()))"
            try:
                done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True)
            except (OSError, ValueError, subprocess.CalledProcessError) as error:
                raise UserError(
                    f"environment {self.name}: {self.python} cannot import attention; install the wheel there"
                ) from error
            found = json.loads(done.stdout)
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def load_environment(name: str) -> Environment:
    """An environment by name. Raises UserError with the nearest names, or what is wrong in its file."""
    path = FOLDER / f"{name}.yaml"
    known = [p.stem for p in FOLDER.glob("*.yaml")]
    if name not in known:
        raise UserError(f"environment {name!r}: not in data/environments; {nearest(name, known)}")
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: an environment is a mapping with `interpreter`")
    try:
        return Environment.model_validate({"name": name, **content})
    except ValidationError as error:
        raise UserError(f"{path}: {first_error(error)}") from error
