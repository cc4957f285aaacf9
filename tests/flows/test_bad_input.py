"""Bad input of `release`: one line on stderr that says what, where and what to do; exit 2, nothing written."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.__main__ import main
from tests.commands import FLASH, QUICK, Home, candidate_file


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home", tmp_path / "prefect")


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a command that refused its input."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def refuses(home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line of a command that this process runs, for speed: the imports of `release` alone take seconds."""

    def run(*words: str | Path, **more: str) -> str:
        for name, value in home.own_env(**more).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["flows", *map(str, words)])
        code = main()
        said = capsys.readouterr()
        return refused(subprocess.CompletedProcess(sys.argv, code, said.out, said.err))

    return run


def files(home: Home) -> list[str]:
    return sorted(str(path.relative_to(home.path)) for path in home.path.rglob("*") if path.is_file())


def policy(folder: Path, name: str) -> str:
    path = folder / "policy.yaml"
    path.write_text(f"attention_policy: {{preferred: [{name}], fallback: [math]}}\n")
    return str(path)


def plan(folder: Path, before: str, after: str) -> str:
    path = folder / "plan.yaml"
    path.write_text(QUICK.read_text().replace(before, after))
    return str(path)


def not_yaml(folder: Path) -> Path:
    path = folder / "broken.yaml"
    path.write_text("name: [unclosed\n")
    return path


def no_traffic(folder: Path) -> Path:
    path = folder / "empty.jsonl"
    path.write_text("\n")
    return path


def twice(folder: Path) -> Path:
    path = folder / "twice.yaml"
    path.write_text(candidate_file(folder).read_text() + "\nname: another\n")
    return path


# What is wrong with the candidate, and what the line must name.
CANDIDATES: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "a file that is not there": (lambda folder: folder / "flahs.yaml", ("flahs.yaml: no such file",)),
    "a file that is not YAML": (not_yaml, ("broken.yaml: not YAML",)),
    "a missing key": (lambda folder: candidate_file(folder, policy=None), ("flash.yaml: policy: this key is missing",)),
    "a missing key of a wave": (
        lambda folder: candidate_file(folder, waves=[{"gpu": "cpu"}]),
        ("waves.0.models: this key is missing",),
    ),
    "an unknown key": (
        lambda folder: candidate_file(folder, polcy="x"),
        ("flash.yaml: polcy: unknown key", "did you mean policy"),
    ),
    "an unknown key of a wave": (
        lambda folder: candidate_file(folder, waves=[{"gpu": "cpu", "models": ["m"], "modles": []}]),
        ("waves.0.modles: unknown key", "did you mean models"),
    ),
    "an engine that is not driven": (lambda folder: candidate_file(folder, engine="vlm"), ("engine", "'vlm'")),
    "an unknown backend": (
        lambda folder: candidate_file(folder, policy=policy(folder, "torch_sdpa:flahs")),
        ("policy.yaml", "torch_sdpa:flahs", "did you mean torch_sdpa:flash"),
    ),
    "a policy that is not there": (
        lambda folder: candidate_file(folder, policy=str(FLASH.with_name("cpu-flahs.yaml"))),
        ("policy:", "is not there", "did you mean cpu-flash.yaml"),
    ),
    "a model that is not there": (
        lambda folder: candidate_file(folder, waves=[{"gpu": "cpu", "models": ["smollm3"]}]),
        ("waves.models: no model at", "smollm3", "make model"),
    ),
    "a plan that is not there": (
        lambda folder: candidate_file(folder, plan="dmeo"),
        ("plan 'dmeo'", "did you mean demo"),
    ),
    "a plan with steps that do not rise": (
        lambda folder: candidate_file(folder, plan=plan(folder, "[50, 100]", "[100, 50]")),
        ("plan.yaml: canary", "steps must rise and end at 100"),
    ),
    "an environment that is not there": (
        lambda folder: candidate_file(folder, environment="curent"),
        ("environment 'curent'", "did you mean current"),
    ),
    "traffic that is not there": (
        lambda folder: candidate_file(folder, traffic={"source": "data/traffic/smaple.jsonl"}),
        ("traffic.source:", "smaple.jsonl", "did you mean sample.jsonl"),
    ),
    "traffic that is a folder": (
        lambda folder: candidate_file(folder, traffic={"source": "data/traffic"}),
        ("traffic.source: data/traffic is a folder; name a file",),
    ),
    "traffic without a usable line": (
        lambda folder: candidate_file(folder, traffic={"source": str(no_traffic(folder))}),
        ("traffic ", "empty.jsonl: no usable line"),
    ),
    "a key that stands twice": (twice, ("twice.yaml: not YAML", "the key 'name' stands twice")),
    "a fault outside the drill folder": (
        lambda folder: candidate_file(folder, fault="wrong_scale"),
        ("`fault` is for drills only", "data/candidates/drill"),
    ),
    "an unknown fault": (
        lambda folder: candidate_file(folder / "drill", fault="wrong_scael"),
        ("fault 'wrong_scael' is unknown", "did you mean wrong_scale"),
    ),
}


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_candidate_with(name: str, home: Home, tmp_path: Path, refuses: Callable[..., str]) -> None:
    make, told = CANDIDATES[name]
    line = refuses("release", make(tmp_path))
    assert all(part in line for part in told), line
    assert files(home) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--frob",), "No such option: --frob"),
        (("--stop-after", "cannary"), "stages are fingerprint, probe, replay"),
        (("--champion", "torch-mth-cpu"), "torch-mth-cpu"),
    ],
)
def test_an_option_that_is_wrong(
    home: Home, tmp_path: Path, refuses: Callable[..., str], words: tuple[str, ...], told: str
) -> None:
    assert told in refuses("release", candidate_file(tmp_path), *words)
    assert files(home) == []


def test_no_candidate_at_all_and_a_command_that_is_none(home: Home) -> None:
    assert "candidate" in refused(home.run("release"))
    assert "relaese" in refused(home.run("relaese"))


@pytest.mark.parametrize("command", ["release", "up"])
def test_a_port_in_use_is_named_with_who_has_it_and_nothing_is_left(
    home: Home, tmp_path: Path, refuses: Callable[..., str], command: str
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", home.port))
        other.listen()
        line = refuses("release", candidate_file(tmp_path)) if command == "release" else refused(home.run("up"))
    assert f"port {home.port} is in use (pid" in line and "ATTENTION_RELEASE_PORT" in line
    assert [name for name in files(home) if not name.endswith(".lock")] == []
    assert home.processes() == []


def test_a_port_that_is_none(home: Home, tmp_path: Path, refuses: Callable[..., str]) -> None:
    line = refuses("release", candidate_file(tmp_path), ATTENTION_RELEASE_PORT="http")
    assert "ATTENTION_RELEASE_PORT=http: not a port" in line
    assert files(home) == []


@pytest.mark.parametrize("content", ["{ not json", '{"gpu": "cpu"}', '{"gpu": "cpu", "family": "x", "colour": 1}'])
def test_a_record_that_is_none_is_left_as_it_is(
    home: Home, tmp_path: Path, refuses: Callable[..., str], content: str
) -> None:
    home.cell.mkdir(parents=True)
    record = home.cell / "record.json"
    record.write_text(content)
    line = refuses("release", candidate_file(tmp_path))
    assert f"{record}: not a release record" in line and "restore a good copy" in line
    assert record.read_text() == content
    assert files(home) == ["state/cpu--smollm2/record.json"]


def test_a_second_release_is_told_who_runs(home: Home, tmp_path: Path) -> None:
    with home.store.hold("flash-1") as lease:
        before = home.record()
        line = refused(home.run("release", candidate_file(tmp_path), "--json"))
        lease.check()
        after = home.record()
    assert "a release is already running for cpu smollm2: flash-1 (pid" in line
    assert after.generation == before.generation and after.champion is None
    assert home.processes() == []


def test_a_second_release_of_the_offline_stages_is_told_too(
    home: Home, tmp_path: Path, refuses: Callable[..., str]
) -> None:
    """It brings no champion up, so only the lease itself stops it."""
    with home.store.hold("flash-1"):
        line = refuses("release", candidate_file(tmp_path), "--stop-after", "probe")
    assert "flash-1 (pid" in line


def test_rollback_approve_and_why_of_what_is_not_there(home: Home, refuses: Callable[..., str]) -> None:
    assert "no release record for cpu smollm9" in refuses(
        "rollback", "--gpu", "cpu", "--family", "smollm9", "--reason", "test"
    )
    assert "flash-9" in refuses("approve", "flash-9")
    assert "flash-9" in refuses("why", "flash-9")
    assert files(home) == []


@pytest.mark.parametrize(
    "words",
    [
        ("up", "--gpu", "../../x"),
        ("down", "--family", "a/b"),
        ("rollback", "--gpu", "cpu", "--family", "a--b", "--reason", "test"),
        ("watch", "--gpu", "../x"),
        ("release", "x" * 5000),
    ],
)
def test_names_that_lead_elsewhere(words: tuple[str, ...], home: Home, refuses: Callable[..., str]) -> None:
    refuses(*words)
    assert files(home) == []


def test_a_home_that_is_a_file(home: Home, refuses: Callable[..., str]) -> None:
    (home.path / "file").write_text("")
    assert "Not a directory" in refuses("up", ATTENTION_RELEASE_HOME=str(home.path / "file"))


def test_a_disk_that_takes_nothing_is_told_before_anything_waits_for_it(home: Home, tmp_path: Path) -> None:
    """Prefect would wait two minutes for a server that cannot write its database."""
    command = [sys.executable, "-m", "flows", "release", str(candidate_file(tmp_path)), "--stop-after", "probe"]
    done = subprocess.run(
        ["prlimit", "--fsize=4096", *command], env=home.env(), capture_output=True, text=True, timeout=100
    )
    assert "cannot be written: File too large" in refused(done)
    assert files(home) == []
