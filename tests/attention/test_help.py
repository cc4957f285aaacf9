"""Every command says its own name, and shows examples that its parser takes."""

from __future__ import annotations

import importlib
import re
import shlex
from typing import get_args

import pytest

from attention.__main__ import EXAMPLES, _parser, main
from attention.cases import Inputs

VERBS = ("fingerprint", "matrix", "resolve", "probe", "replay", "compare", "bench", "serve")
MODULES = (
    "attention.bench_dispatch",
    "attention.bench_kernels",
    "attention.bench_replay",
    "attention.bench_serving",
    "attention.bench_tensor_replay",
    "attention.evidence",
    "attention.replay_evidence",
    "attention.warm",
    "attention.backends.triton_tune",
    "tasks.golden_table",
)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_shows_examples_that_its_parser_takes(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert "\nexamples:\n" in capsys.readouterr().out
    commands = re.findall(r"python -m attention (.*)", EXAMPLES[verb].replace("\\\n", " "))
    assert any(command.startswith(verb) for command in commands)
    for command in commands:
        _parser().parse_args(shlex.split(re.sub(" <.*", "", command)))


def test_the_help_of_inputs_lists_every_kind_that_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"kinds of {', '.join(kind for kind in get_args(Inputs) if kind != 'activations')} (default" in text


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_its_name_and_how_to_run_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    run = importlib.import_module(module).main
    for flag, code in (("--help", 0), ("--no-such-flag", 2)):
        monkeypatch.setattr("sys.argv", ["x", flag])
        with pytest.raises(SystemExit) as caught:
            run()
        assert caught.value.code == code
        seen = capsys.readouterr()
        assert (seen.out + seen.err).startswith(f"usage: python -m {module} ")
        if code:
            assert f"python -m {module}: error: " in seen.err
        else:
            assert re.search(rf"^ +(TRITON_INTERPRET=1 )?python -m {module} ", seen.out, re.MULTILINE)
