"""A selection as a policy file: what it resolves to, what it keeps, and what it must not overwrite."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from attention.cases import AttentionCase, Phase
from attention.errors import UserError
from attention.policy import Policy, load_policy, resolve
from data.paths import repo_dir
from data.proposed_policy import MARK, propose, write_policy
from gates.selection import Measured, select

POLICIES = repo_dir() / "data" / "policies"
FLASH, MATH, CUDNN = "torch_sdpa:flash", "torch_sdpa:math", "torch_sdpa:cudnn"


@dataclass(frozen=True)
class Chosen:
    family: Phase
    kv_len: int
    backend: str
    evidence: str = "measured"


@dataclass(frozen=True)
class Measurements:
    preferred: tuple[str, ...]
    choices: tuple[Chosen, ...]


@pytest.fixture
def base() -> Policy:
    return load_policy(POLICIES / "document.yaml")


def best(policy: Policy, phase: Phase, kv_len: int) -> str:
    """Who runs, where everybody may."""
    case = AttentionCase(
        phase=phase,
        batch=f"q1s{kv_len}",
        heads_q=2,
        heads_kv=2,
        head_dim_qk=64,
        head_dim_vo=64,
        dtype="float32",
    )
    return str(resolve(policy, case, lambda name, case: []).resolved)


SERVICE = Measurements(
    (FLASH, MATH),
    (
        Chosen("decode", 4096, CUDNN),
        Chosen("decode", 16, MATH),
        Chosen("decode", 512, MATH),
        Chosen("decode", 1024, MATH),
        Chosen("decode", 2048, FLASH),
        Chosen("prefill", 1024, FLASH),
        Chosen("extend", 8192, MATH),
        Chosen("extend", 32768, MATH),
    ),
)


def test_the_file_loads_and_resolves_to_every_choice(tmp_path: Path, base: Policy) -> None:
    path = tmp_path / "proposed.yaml"
    written = write_policy(path, SERVICE, base, "over chat ...")
    assert load_policy(path) == written
    for choice in SERVICE.choices:
        for kv_len in (choice.kv_len // 2 + 1, choice.kv_len):
            assert best(written, choice.family, kv_len) == choice.backend


def test_ranges_end_with_their_buckets_and_neighbours_that_agree_are_one(base: Policy) -> None:
    found = [(o.phase, o.kv_len, o.preferred) for o in propose(SERVICE, base).overrides]
    assert found == [
        ("decode", (None, 17), (MATH,)),
        ("decode", (257, 1025), (MATH,)),
        ("decode", (2049, 4097), (CUDNN,)),
        ("extend", (4097, 8193), (MATH,)),
        ("extend", (16385, 32769), (MATH,)),  # nobody measured 8193 to 16384
    ]


@pytest.mark.parametrize("kv_len", [17, 256, 1025, 2048, 4097, 9000])
def test_lengths_that_were_not_measured_keep_the_preferred_backend(base: Policy, kv_len: int) -> None:
    assert best(propose(SERVICE, base), "decode", kv_len) == FLASH


def test_all_else_is_the_candidates_own(base: Policy) -> None:
    proposed = propose(SERVICE, base)
    changed = {"preferred", "overrides"}
    assert proposed.model_dump(exclude=changed) == base.model_dump(exclude=changed)
    assert proposed.preferred == (FLASH, MATH)
    assert proposed.fail_closed_features == ("custom_mask", "sliding_window")


def test_a_pinned_policy_becomes_a_preference() -> None:
    proposed = propose(SERVICE, load_policy(POLICIES / "cpu-math.yaml"))
    assert (proposed.mode, proposed.preferred) == ("preferred-with-fallback", (FLASH, MATH))


def test_without_a_backend_for_everything_the_candidates_preference_stays() -> None:
    proposed = propose(Measurements((), SERVICE.choices), load_policy(POLICIES / "cpu-flash.yaml"))
    assert proposed.preferred == (FLASH,)
    assert [best(proposed, c.family, c.kv_len) for c in SERVICE.choices] == [c.backend for c in SERVICE.choices]


def test_one_best_backend_needs_no_overrides(tmp_path: Path, base: Policy) -> None:
    service = Measurements((MATH, FLASH), (Chosen("decode", 64, MATH),))
    assert write_policy(tmp_path / "p.yaml", service, base, "").overrides == ()
    assert "overrides" not in (tmp_path / "p.yaml").read_text()


def test_the_evidence_stands_in_comments_of_one_line_each(tmp_path: Path, base: Policy) -> None:
    service = Measurements((FLASH,), (Chosen("decode", 64, MATH, "saves 3 %\nmode: pinned"),))
    write_policy(tmp_path / "p.yaml", service, base, "over chat\nthe selection beats")
    lines = (tmp_path / "p.yaml").read_text().splitlines()
    assert lines[:2] == [MARK, "# over chat the selection beats"]
    assert lines[-2:] == [
        "    # saves 3 % mode: pinned",
        "    - {phase: decode, kv_len: [33, 65], preferred: ['torch_sdpa:math']}",
    ]


def test_a_proposal_is_written_anew_and_nothing_else_is_overwritten(tmp_path: Path, base: Policy) -> None:
    path = tmp_path / "proposed.yaml"
    write_policy(path, SERVICE, base, "first")
    write_policy(path, SERVICE, base, "second")
    assert "# second" in path.read_text()
    candidate = tmp_path / "candidate.yaml"
    for content in (b"attention_policy: {preferred: [math]}\n", b"", b"\xff\xfe"):
        candidate.write_bytes(content)
        with pytest.raises(UserError, match=r"candidate.yaml: is there and was not proposed from baselines"):
            write_policy(candidate, SERVICE, base, "mine")
        assert candidate.read_bytes() == content
    link = tmp_path / "link.yaml"
    link.symlink_to(candidate)
    for path in (link, tmp_path):
        with pytest.raises(UserError, match="was not proposed from baselines"):
            write_policy(path, SERVICE, base, "mine")


def test_a_measured_selection_becomes_a_policy_that_resolves_to_it(tmp_path: Path, base: Policy) -> None:
    seconds = {512: (1e-4, 2e-4), 1024: (2e-4, 1e-4), 2048: (5e-4, 9e-4)}
    rows = [
        Measured(backend, "decode", f"d{kv_len}", f"decode/kv<={kv_len}", "paged", 0.3, 10.0, (took,) * 6)
        for kv_len, pair in seconds.items()
        for backend, took in zip((FLASH, MATH), pair, strict=True)
    ]
    selection = select(rows, "chat")
    policy = write_policy(tmp_path / "p.yaml", selection.services[0], base, selection.sentence)
    assert policy.preferred == (FLASH, MATH)
    assert [best(load_policy(tmp_path / "p.yaml"), "decode", n) for n in (512, 513, 1024, 1025)] == [
        FLASH, MATH, MATH, FLASH,
    ]  # fmt: skip
    assert (
        "# over chat the selection beats the best single backend torch_sdpa:flash by"
        in (tmp_path / "p.yaml").read_text()
    )
