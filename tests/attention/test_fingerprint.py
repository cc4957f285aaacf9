"""The fingerprint: one id for one configuration, another for every change, and no secret in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from attention import startup
from attention.fingerprint import (
    ENVIRONMENT,
    Fingerprint,
    Identity,
    changed_fields,
    entered,
    fingerprint,
    gpu_name,
    identity_hash,
)
from attention.job import Setup
from attention.limits import Limits
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


PROBE_AND_IDENTIFY = """
import sys
from pathlib import Path
from attention import startup
from attention.job import Setup
from attention.model import specs_of
from attention.probe import probes_of, run_probe

setup = Setup(model=Path(sys.argv[1]), policy=Path(sys.argv[2]))
probes = probes_of(specs_of(setup.model, "float32")[0], "float32", setup.page_size)
for backend in sys.argv[3:]:
    for probe in reversed(probes):
        list(run_probe(backend, probe, "cpu"))
print(startup.identify(setup).model_dump_json())
"""


def test_two_fresh_processes_and_this_one_agree_before_and_after_a_forward_and_any_probes(
    setup: Setup, make_runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    verb = ["-m", "attention", "fingerprint", "--json", "--model", str(setup.model), "--policy", str(setup.policy)]
    # The other process runs probes first, in another order than a start-up does.
    probing = ["-c", PROBE_AND_IDENTIFY, str(setup.model), str(setup.policy), "torch_sdpa:math", "torch_sdpa:flash"]
    children = [
        subprocess.Popen([sys.executable, *arguments], cwd=REPO, stdout=subprocess.PIPE, text=True)
        for arguments in (verb, probing)
    ]

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
        ({"fault": "wrong_scale"}, "fault: null -> wrong_scale"),
        ({"engine_limits": {"num_pages": 64}}, "engine_limits.num_pages: absent -> 64"),
        ({"tensor_parallel": 2}, "tensor_parallel: 1 -> 2"),
        ({"kv_cache_dtype": "float8_e4m3fn"}, "kv_cache_dtype: auto -> float8_e4m3fn"),
        ({"kv_layout": "paged_hnd"}, "kv_layout: paged_nhd -> paged_hnd"),
        ({"cuda_graph": True}, "execution.cuda_graph: false -> true"),
        ({"torch_compile": True}, "execution.torch_compile: false -> true"),
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


def test_each_name_that_a_library_reads_a_switch_by_is_known() -> None:
    onednn = {f"{prefix}_{name}" for prefix in ("DNNL", "ONEDNN") for name in ("DEFAULT_FPMATH_MODE", "MAX_CPU_ISA")}
    assert onednn | {"MKL_CBWR", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} <= set(ENVIRONMENT)


def test_any_other_environment_variable_does_not_enter(
    take: Callable[..., Fingerprint], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = take()
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    assert take().id == old.id
    assert not set(SECRETS) & set(ENVIRONMENT)
    assert not [name for name in ENVIRONMENT if any(word in name for word in ("KEY", "TOKEN", "SECRET", "PASSWORD"))]


@pytest.mark.parametrize(
    "value",
    [
        "ccache --token=s3cret",
        "ccache --token s3cret",
        "curl -H Authorization s3cret",
        "https://user:s3cret@host/libs",
        "user:s3cret@host",
        "-DPASSWORD=s3cret",
        "-D_KEY=s3cret -O3",
        '"s3cret"',
        "gcc\ns3cret",
    ],
)
def test_a_value_that_could_hold_a_secret_enters_as_a_hash(
    take: Callable[..., Fingerprint], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    ids = []
    for one in (value, value.replace("s3cret", "an0ther")):
        for name in ("CC", "CXX", "NVCC_APPEND_FLAGS", "TLLM_FMHA_LIBS", "VLLM_ATTENTION_BACKEND"):
            monkeypatch.setenv(name, one)
        found = take()
        assert "s3cret" not in found.model_dump_json()
        assert re.fullmatch("sha256:[0-9a-f]{12}", found.identity.environment["CC"])
        ids.append(found.id)
    assert ids[0] != ids[1], "another value is another id all the same"


@pytest.mark.parametrize(
    "value",
    ["", "7", "gcc-12", "/usr/bin/c++", "9.0a 10.0", "8.0;9.0+PTX", ":4096:8", "expandable_segments:True", "-O3 -g"],
)
def test_words_paths_and_versions_enter_as_they_are(value: str) -> None:
    assert entered(value) == value


def test_a_folder_has_one_name_and_id_however_it_is_named(
    take: Callable[..., Fingerprint], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "current").symlink_to(tiny_model)
    monkeypatch.chdir(tiny_model)
    names = (Path(), tmp_path / "current", tiny_model / ".." / tiny_model.name)
    found = [fingerprint(name, POLICY, dtype="float32") for name in names]
    assert {(one.id, one.identity.model_id) for one in found} == {(take().id, tiny_model.name)}


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


def test_every_field_of_the_identity_is_hashed(take: Callable[..., Fingerprint]) -> None:
    one = take()
    for name in Identity.model_fields:
        assert identity_hash(one.identity.model_copy(update={name: None})) != one.id or (
            getattr(one.identity, name) is None
        )


def test_limits_of_serving_are_in_the_id_of_every_verb(setup: Setup) -> None:
    # One function gives every verb its id, and the serving process hands the same limits to its engine.
    wide = setup.model_copy(update={"limits": Limits(max_running=64)})
    plain, other = startup.identify(setup), startup.identify(wide)
    assert changed_fields(plain.identity, other.identity) == ["engine_limits.max_running: 32 -> 64"]
    assert plain.identity.engine_limits == {"num_pages": setup.num_pages, **asdict(setup.limits)}
    again = Setup.model_validate_json(wide.model_dump_json())
    assert again == wide
    assert startup.identify(again).id == other.id


def test_sources_of_just_in_time_kernels_count_when_the_policy_names_them(take: Callable[..., Fingerprint]) -> None:
    named = take(Policy(preferred=("flex_attention",), fallback=("math",))).identity
    plain = take().identity
    assert set(plain.jit_sources) == {"attention/backends"}
    assert set(named.jit_sources) > {"attention/backends"}
    assert (set(plain.compilers), set(named.compilers)) == (set(), {"nvcc", "c++"})


def test_what_warm_up_changes_is_attested_and_not_hashed(take: Callable[..., Fingerprint]) -> None:
    one = take()
    assert {"node", "time", "libraries", "jit_outputs", "sdpa_order"} <= set(one.attestation)
    assert not {"libraries", "jit_outputs", "sdpa_order"} & set(Identity.model_fields)
    assert any(name.startswith("libtorch") for name in one.attestation["libraries"])


def test_mla_is_told_from_gqa(take: Callable[..., Fingerprint], tiny_model: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({**config, **latent}))
    identity = fingerprint(tmp_path, POLICY, dtype="float32").identity
    assert (identity.attention_type, identity.head_dim, identity.head_dim_vo) == ("mla", 192, 128)


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
    features = ("sliding_window", "softcap", "alibi", "sinks")
    assert identity.features == {"causal": True, **dict.fromkeys(features, False)}
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
        n: entered(os.environ[n]) for n in ENVIRONMENT if n in os.environ
    }
