"""Exit codes, and how an error reads."""

from __future__ import annotations

import errno
import json
import re
import sys
from pathlib import Path
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


@pytest.mark.parametrize(
    ("started", "expected"),
    [
        ("image-builder", "image-builder"),  # on the PATH
        ("./image-builder", "./image-builder"),
        ("/some where/image-builder", "'/some where/image-builder'"),
        ("/p/image_builder/cli/__main__.py", f"{sys.executable} -m image_builder.cli"),
    ],
)
def test_the_command_is_named_as_it_was_started(
    started: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "image-builder").write_text("#!/bin/sh\n")
    (tmp_path / "image-builder").chmod(0o755)
    monkeypatch.delenv("_IMAGE_BUILDER_NAME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path) if started == "image-builder" else "/nowhere")
    name = str(tmp_path / started) if started == "image-builder" else started
    for set_by_launcher in (False, not name.endswith(".py")):
        monkeypatch.setattr(sys, "argv", ["/p/__main__.py" if set_by_launcher else name, "build", "a b"])
        if set_by_launcher:
            monkeypatch.setenv("_IMAGE_BUILDER_NAME", name)
        assert failure.command_line() == f"{expected} build 'a b'"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["-e", "token=S3cret"], False),
        (["-etoken=S3cret"], False),
        (["--extra-vars", '{"token": "S3cret"}'], False),
        (["--extra-vars=token=S3cret"], False),
        (["-e", "@file.yml"], True),
        (["--extra-vars=@file.yml"], True),
    ],
)
@pytest.mark.parametrize("terminal", [True, False])
def test_a_log_repeats_no_extra_variables(
    options: list[str], shown: bool, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, who reads the line has just typed them."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/x", "build", *options])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    line = failure.command_line()
    assert ("S3cret" in line or "@file.yml" in line) is (shown or terminal)


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
