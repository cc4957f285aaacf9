"""Takes credentials and addresses out of recorded texts before anything is kept of them.

Replaced, each by a placeholder that names what stood there: private keys (PEM), JSON Web Tokens (RFC 7519),
bearer and basic credentials (RFC 6750, RFC 7617), API keys by their vendors' prefixes, user and password in
a URL (RFC 3986 userinfo) and secrets in its query, e-mail addresses, IPv4 and IPv6 addresses. A key without
a known form, a name or a phone number stays: this is no anonymisation, and the evidence lake stays private.

Patterns start only where a run of their characters starts, so that the time is linear in the text.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any

_KEY_FORMS = (
    r"sk-[A-Za-z0-9_-]{16,}",  # OpenAI, Anthropic, LiteLLM, Langfuse and others
    r"pk-lf-[A-Za-z0-9-]{16,}",
    r"(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,}",  # Stripe
    r"(?:AKIA|ASIA)[A-Z0-9]{16}",  # AWS
    r"gh[pousr]_[A-Za-z0-9]{36,}",
    r"github_pat_[A-Za-z0-9_]{22,}",
    r"glpat-[A-Za-z0-9_-]{20,}",
    r"xox[abeoprs]-[A-Za-z0-9-]{10,}",  # Slack
    r"AIza[A-Za-z0-9_-]{35}",  # Google
    r"hf_[A-Za-z0-9]{30,}",
    r"gsk_[A-Za-z0-9]{32,}",  # Groq
    r"nvapi-[A-Za-z0-9_-]{32,}",
    r"npm_[A-Za-z0-9]{36}",
    r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",  # SendGrid
)
_KEY_STARTS = (
    *("sk-", "pk-lf-", "_live_", "_test_", "akia", "asia", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
    *("glpat-", "xox", "aiza", "hf_", "gsk_", "nvapi-", "npm_", "sg."),
)
_SHORTEST = len("a@b.de")
_IN_A_QUERY = "api[_-]?key|key|token|access[_-]?token|auth|password|passwd|pwd|secret|sig|signature"

# What a text must hold, in lower case, before the pattern is tried: most texts hold none of it.
_PATTERNS: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = (
    (
        ("private key",),
        re.compile(r"-----BEGIN (?P<k>[A-Z ]{0,20}PRIVATE KEY)-----(?:(?!-----).)*(?:-----END (?P=k)-----)?", re.S),
        "<private_key>",
    ),
    (("eyj",), re.compile(r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*", re.A), "<jwt>"),
    (_KEY_STARTS, re.compile(r"(?<![A-Za-z0-9_-])(?:" + "|".join(_KEY_FORMS) + ")"), "<api_key>"),
    (("bearer",), re.compile(r"\b(bearer)\s+[A-Za-z0-9._~+/-]{16,}=*", re.I), r"\1 <token>"),
    (("basic",), re.compile(r"\b(authorization:\s*basic)\s+[A-Za-z0-9+/]{8,}=*", re.I), r"\1 <token>"),
    (
        ("://",),
        re.compile(r"(?<![\w+.-])([a-z][a-z0-9+.-]{1,20}://)[^\s/?#@:\"'<>]*:[^\s/?#@\"'<>]+@", re.I),
        r"\1<password>@",
    ),
    (("?", "&"), re.compile(rf"([?&](?:{_IN_A_QUERY})=)(?!<)[^&\s\"'<>#]+", re.I), r"\1<password>"),
    (("@",), re.compile(r"(?<![\w.%+-])[\w.%+-]+@(?:[a-z0-9-]+\.)+[a-z]{2,}", re.I | re.A), "<email>"),
)
_IP6 = re.compile(
    r"(?<![\w:.])(?=[0-9A-Fa-f]{0,4}:)(?:[0-9A-Fa-f:]{1,30}:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f:]{3,39})(?![\w:])", re.A
)
_IP4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\w|\.\d)", re.A)


def redact(text: str) -> str:
    """The text with a placeholder for every credential and address that it holds."""
    if len(text) < _SHORTEST:
        return text
    lowered = text.lower()
    for markers, pattern, placeholder in _PATTERNS:
        if any(marker in lowered for marker in markers):
            text = pattern.sub(placeholder, text)
    return _IP4.sub(_address, _IP6.sub(_address, text))


def redact_all(value: Any) -> Any:
    """A JSON value with every text in it redacted; keys of objects stay, they are names of fields."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redact_all(item) for item in value]
    return value


def _address(found: re.Match[str]) -> str:
    """`12:30:45` looks like an address and is none; `1::2` is more often a slice than an address."""
    text = found.group()
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return text
    groups = text.split(":")
    return "<ip_address>" if len(groups) in (1, 8) or max(map(len, groups)) > 2 else text
