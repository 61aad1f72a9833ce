"""Exit codes, and how an error reads."""

from __future__ import annotations

import errno
import json
import re
from signal import SIGHUP, SIGPIPE, SIGTERM

import pytest

from image_builder import errors
from image_builder.cli import failure
from image_builder.errors import CommandError, DefinitionError, ImageBuilderError, Problem, StageError


def _classes(base: type[ImageBuilderError] = ImageBuilderError) -> list[type[ImageBuilderError]]:
    return [base, *(c for s in base.__subclasses__() for c in _classes(s))]


def test_exit_codes_are_unique_and_listed() -> None:
    codes_of = {c.__name__: c.exit_code for c in _classes()}
    assert len(set(codes_of.values())) == len(codes_of)
    meanings = [c.__dict__.get("meaning") for c in _classes()]
    assert all(meanings) and len(set(meanings)) == len(meanings), "each class has its own"
    assert {name: code for code, name, _ in failure.exit_codes() if name} == codes_of
    unnamed = {code for code, name, _ in failure.exit_codes() if not name}
    assert unnamed == {
        0,
        errors.EXIT_BUG,
        errors.EXIT_INTERRUPTED,
        128 + SIGHUP,
        128 + SIGPIPE,
        128 + SIGTERM,
    }
    codes = [code for code, _, _ in failure.exit_codes()]
    assert codes == sorted(set(codes))
    assert {0, errors.EXIT_BUG, errors.EXIT_INTERRUPTED} <= set(codes)


def test_a_failed_stage_reads_from_the_command_to_the_next_step() -> None:
    cause = CommandError("exit status 3: dpkg -i x.deb", argv=["dpkg", "-i", "x.deb"], tail="one\ntwo")
    error = StageError("system", cause, log="/store/logs/system.log", enterable=True)
    assert failure.text(error, "image-builder build worker").splitlines() == [
        "error: stage system: exit status 3: dpkg -i x.deb",
        "  | one",
        "  | two",
        "log: /store/logs/system.log",
        "to enter the sandbox: image-builder build worker --shell-on-failure",
    ]


def test_a_failed_stage_ends_with_the_code_of_its_cause() -> None:
    assert StageError("disk", errors.SpaceError("full")).exit_code == errors.SpaceError.exit_code
    assert StageError("seal", errors.StoreError("damaged")).exit_code == errors.StoreError.exit_code
    assert StageError("verify", errors.VerifyError("red")).exit_code == errors.VerifyError.exit_code
    assert StageError("base", CommandError("failed")).exit_code == StageError.exit_code
    assert StageError("base", errors.ImageBuilderError("odd")).exit_code == StageError.exit_code


def test_a_hint_stands_last_in_a_line_of_its_own() -> None:
    assert failure.text(errors.HostError("no root", hint="use sudo")) == "error: no root\nhint: use sudo"


def test_an_error_for_programs_has_all_of_it() -> None:
    told = failure.as_json(StageError("base", CommandError("m", argv=["a", "b"], tail="x\ny"), log="l"))[
        "error"
    ]
    assert told == {
        "kind": "StageError",
        "exit_code": 10,
        "message": "stage base: m",
        "hint": None,
        "stage": "base",
        "log": "l",
        "cause": "CommandError",
        "command": ["a", "b"],
        "last_lines": ["x", "y"],
    }
    problems = failure.as_json(DefinitionError([Problem("f:1", "p", "w")]))["error"]["problems"]
    assert problems == [{"where": "f:1", "path": "p", "what": "w"}]


def _raise(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (errors.FetchError("gone"), 8, "error: gone"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device", "/store/x"), 6, "no space left: /store/x"),
        (PermissionError(errno.EACCES, "Permission denied", "/store"), 5, "not permitted: /store"),
    ],
)
def test_what_is_expected_shows_no_traceback(
    error: BaseException, status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failure.guard(lambda: _raise(error), json_wanted=False) == status
    out, err = capsys.readouterr()
    assert words in err and "Traceback" not in err and out == ""
    assert not re.search("--(store|output) ", err), "most commands have no such option"


def test_a_bug_shows_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure.guard(lambda: _raise(KeyError("x")), json_wanted=False) == errors.EXIT_BUG
    err = capsys.readouterr().err
    assert "Traceback" in err and "KeyError" in err and "bug" in err


def test_json_is_wanted_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    failure.guard(lambda: _raise(errors.LockError("m", hint="h")), json_wanted=True)
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["hint"] == "h"
    assert err == "error: m\nhint: h\n"


def test_sigterm_unwinds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        failure.guard(lambda: _raise(SystemExit(143)), json_wanted=False)
    assert ended.value.code == 143
