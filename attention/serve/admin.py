"""The admin surface: drain an instance and take it up again, for who holds the token.

Off unless the instance was started with a token file. The token comes from that file alone, never from an argument
or the environment, and goes nowhere: no log, no page and no fingerprint holds it.
"""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from attention.errors import UserError
from attention.serve.log import event
from attention.serve.protocol import ApiError
from attention.serve.service import Service

_MIN_CHARS = 16


def read_token(path: Path) -> str:
    """The token of a file. Raises UserError unless it is one line that only its owner may read (mode 0600)."""
    try:
        with path.open(encoding="ascii") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(4096)
    except OSError as error:
        raise UserError(f"--admin-token-file {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError:
        raise UserError(f"--admin-token-file {path}: holds more than plain ASCII; write one line") from None
    if mode != 0o600:
        raise UserError(f"--admin-token-file {path}: has mode {mode:04o}; run chmod 600 on it")
    token = text.removesuffix("\n")
    if len(token) < _MIN_CHARS or not all("!" <= letter <= "~" for letter in token):
        raise UserError(f"--admin-token-file {path}: write one line of {_MIN_CHARS} or more characters without spaces")
    return token


class Admin:
    """Handlers of /admin/*. A request without the token learns nothing but that one is wanted."""

    def __init__(self, service: Service, token: str) -> None:
        self._service = service
        self._expected = f"Bearer {token}".encode()

    async def drain(self, request: Request) -> Response:
        """Stop admitting; what runs and waits is finished, the process stays."""
        return self._set(request, paused=True)

    async def resume(self, request: Request) -> Response:
        return self._set(request, paused=False)

    def _set(self, request: Request, *, paused: bool) -> Response:
        given = request.headers.get("authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, self._expected):
            text = "this path takes the instance's admin token: Authorization: Bearer TOKEN"
            raise ApiError(401, text, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        engine = self._service.engine
        if self._service.paused != paused:
            self._service.paused = paused
            event("admin_drain" if paused else "admin_resume", severity="warning", running=engine.num_running)
        return JSONResponse({"draining": paused, "running": engine.num_running, "waiting": engine.num_waiting})
