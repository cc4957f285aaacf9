"""What a person sees of a mistake, and of a reader that has gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attention.errors import UserError, exit_code, nearest, one_line, piped


@pytest.mark.parametrize(
    ("name", "said"), [("flahs", "did you mean flash?"), ("xyz", "known: flash, math")], ids=["near", "far"]
)
def test_a_mistyped_name_gets_its_neighbours_or_all(name: str, said: str) -> None:
    assert nearest(name, ["math", "flash"]) == said


@pytest.mark.parametrize("module", ["attention", "flows"])
def test_a_reader_that_stops_early_is_no_error(module: str) -> None:
    command = f"{sys.executable} -m {module} {'matrix' if module == 'attention' else '--help'} | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_verdict_does_not_depend_on_who_reads_it() -> None:
    code = "from attention.errors import exit_code\nexit_code and exit(exit_code(lambda: print('x\\n' * 100000) or 3))"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'{sys.executable} -c "{code}" | head -c 1'], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "x", "")


def test_a_code_passes_through() -> None:
    assert piped(lambda: 3) == 3


def test_a_users_mistake_is_one_line_whatever_its_names_hold() -> None:
    assert str(UserError("plan a\nb\t\x1b[31m\0: no such file")) == "plan a b \\x1b[31m\\x00: no such file"


def test_what_the_system_refused_names_the_file() -> None:
    with pytest.raises(OSError) as raised:
        Path("x" * 5000).read_text()
    assert str(UserError.of_system(raised.value)).endswith("xx: File name too long")
    assert str(UserError.of_system(OSError("odd"))) == "odd"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('File "/home/me/repo/attention/backends/flex.py", line 69,\n in attend', 'File "flex.py", line 69, in attend'),
        ("wants int32; see https://host/pytorch/rfcs.py and /etc/hosts", None),
        ("ratio 3/4 of kv/head.py", None),
    ],
)
def test_an_exception_in_one_line_names_source_files_without_their_folders(text: str, line: str | None) -> None:
    assert one_line(RuntimeError(text)) == (line or text)


def test_what_a_person_can_mend_is_one_line_and_two(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(error: BaseException) -> int:
        raise error

    assert exit_code(lambda: 3) == 3
    assert exit_code(lambda: fails(KeyboardInterrupt())) == 130
    assert exit_code(lambda: fails(UserError("job x: no such file"))) == 2
    assert exit_code(lambda: fails(OSError(28, "No space left on device", "rows.json"))) == 2
    seen = capsys.readouterr()
    assert seen.err == "error: job x: no such file\nerror: rows.json: No space left on device\n"
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: 1 // 0)
