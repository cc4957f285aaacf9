"""The fingerprint: one id for one configuration, another for every change, and no secret in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attention import startup
from attention.fingerprint import ENVIRONMENT, Fingerprint, changed_fields, fingerprint, gpu_name
from attention.job import Setup
from attention.model import Chunk, Runner
from attention.policy import Policy

REPO = Path(__file__).parents[2]
POLICY = Policy(preferred=("torch_sdpa:flash",), fallback=("math",))
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "s3cret-aws-value",
    "HF_TOKEN": "hf_s3cretvalue",
    "OPENAI_API_KEY": "sk-s3cret",
    "DATABASE_URL": "postgres://user:s3cret@host/db",
}


@pytest.fixture
def take(tiny_model: Path) -> Callable[..., Fingerprint]:
    def one(policy: Policy = POLICY, **changes: Any) -> Fingerprint:
        return fingerprint(tiny_model, policy, **{"dtype": "float32", **changes})

    return one


def test_two_fresh_processes_and_this_one_agree_before_and_after_a_forward(
    setup: Setup, make_runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "attention", "fingerprint", "--json"]
    command += ["--model", str(setup.model), "--policy", str(setup.policy)]
    children = [subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) for _ in range(2)]

    # The command line's own set-up, so that every verb of an environment has one id.
    same = Setup(model=setup.model, policy=setup.policy)
    before = startup.identify(same)
    runner = make_runner()
    runner.logits(runner.forward([Chunk(tuple(range(10)), 0, tuple(runner.pool.alloc(1)))]))
    after = startup.identify(same, runner.dispatcher)
    assert before.id == after.id
    assert before.identity == after.identity
    assert after.attestation["confirmed"]["prefill"] == "torch_sdpa:flash"

    texts = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    found = [Fingerprint.model_validate_json(text) for text in texts]
    assert [changed_fields(before.identity, one.identity) for one in found] == [[], []]
    assert {one.id for one in found} == {before.id}
    for text in (*texts, before.model_dump_json(), after.model_dump_json()):
        for name, value in SECRETS.items():
            assert name not in text
            assert value not in text
        assert "s3cret" not in text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"dtype": "bfloat16"}, "dtype: float32 -> bfloat16"),
        ({"page_size": 32}, "page_size: 16 -> 32"),
        ({"fault": "wrong_scale"}, "fault: absent -> wrong_scale"),
        ({"engine_limits": {"num_pages": 64}}, "engine_limits.num_pages: absent -> 64"),
        ({"policy": Policy(preferred=("math",))}, 'attention_backend_policy.fallback: ["math"] -> []'),
    ],
)
def test_every_change_gives_another_id_and_a_line_that_says_so(
    take: Callable[..., Fingerprint], changes: dict[str, Any], line: str
) -> None:
    old, new = take(), take(**changes)
    assert old.id != new.id
    assert line in changed_fields(old.identity, new.identity)


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_a_named_environment_variable_changes_the_id(
    take: Callable[..., Fingerprint], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    old = take()
    monkeypatch.setenv(name, "7")
    new = take()
    assert old.id != new.id
    assert changed_fields(old.identity, new.identity) == [f"environment.{name}: absent -> 7"]


def test_any_other_environment_variable_does_not_enter(
    take: Callable[..., Fingerprint], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = take()
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    assert take().id == old.id
    assert not set(SECRETS) & set(ENVIRONMENT)
    assert not [name for name in ENVIRONMENT if any(word in name for word in ("KEY", "TOKEN", "SECRET", "PASSWORD"))]


def test_the_number_of_threads_changes_the_id(take: Callable[..., Fingerprint]) -> None:
    threads, old = torch.get_num_threads(), take()
    try:
        torch.set_num_threads(threads + 1)
        new = take()
    finally:
        torch.set_num_threads(threads)
    assert changed_fields(old.identity, new.identity) == [f"num_threads: {threads} -> {threads + 1}"]
    assert old.id != new.id == Fingerprint.model_validate_json(new.model_dump_json()).id


def test_a_switch_that_forbids_a_kernel_changes_the_id(take: Callable[..., Fingerprint]) -> None:
    old = take()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        new = take()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert changed_fields(old.identity, new.identity) == ["switches.flash_sdp: true -> false"]


def test_other_weights_are_another_revision(tiny_model: Path, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(tiny_model, tmp_path / tiny_model.name)
    other = shutil.copytree(tiny_model, tmp_path / "changed" / tiny_model.name)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    ids = [fingerprint(folder, POLICY, dtype="float32").id for folder in (tiny_model, copy, other)]
    assert ids[0] == ids[1] != ids[2]


def test_clock_and_node_are_attested_and_not_hashed(
    take: Callable[..., Fingerprint], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = take()
    monkeypatch.setattr("socket.gethostname", lambda: "another-node")
    new = take(attestation={"resolved": {"decode": "torch_sdpa:math"}})
    assert (new.attestation["node"], new.id) == ("another-node", old.id)
    assert "another-node" not in new.identity.model_dump_json()


def test_it_knows_the_model_and_the_machine(take: Callable[..., Fingerprint]) -> None:
    identity = take().identity
    assert (identity.model_id, identity.gpu, identity.platform) == ("tiny-llama", "cpu", "cpu")
    assert (identity.attention_type, identity.num_heads, identity.num_kv_heads, identity.head_dim) == ("gqa", 4, 2, 16)
    assert identity.features == {"causal": True, "sliding_window": False, "softcap": False, "alibi": False}
    assert identity.torch == torch.__version__
    assert identity.distributions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert list(identity.distributions) == sorted(identity.distributions)
    assert gpu_name("cpu") == "cpu"


def test_equal_fingerprints_differ_in_nothing(take: Callable[..., Fingerprint]) -> None:
    assert changed_fields(take().identity, take().identity) == []


def test_a_difference_names_the_distribution(take: Callable[..., Fingerprint]) -> None:
    old = take().identity
    new = old.model_copy(update={"distributions": {**old.distributions, "torch": "9.9+abc", "extra": "1+def"}})
    assert changed_fields(old, new) == [
        "distributions.extra: absent -> 1+def",
        f"distributions.torch: {old.distributions['torch']} -> 9.9+abc",
    ]
    assert json.loads(old.model_dump_json())["environment"] == {
        n: os.environ[n] for n in ENVIRONMENT if n in os.environ
    }
