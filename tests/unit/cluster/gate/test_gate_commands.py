"""The options and the user name of `image-builder gate`."""

from __future__ import annotations

import io
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from image_builder import errors
from image_builder.cli import gate as commands
from image_builder.cli.main import app


@pytest.mark.parametrize("rate", ["0", "-1"])
def test_a_rate_that_lets_nobody_in_is_refused(rate: str) -> None:
    done = CliRunner().invoke(app, ["gate", "run", "--rate", rate, "--kubeconfig", "/none"])
    assert done.exit_code == errors.UsageError.exit_code and "--rate" in done.stderr


def test_who_lets_a_node_in_needs_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gate admit` is the last resort, so it must work even in a pod that runs as a bare user id."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    assert commands._user() == "uid 4000000000"
    monkeypatch.setenv("LOGNAME", "operator")
    assert commands._user() == "operator"


def test_a_line_of_the_log_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A signing request's subject is its sender's, and may look like the next line of the log."""
    text = "csr-1: left pending: its token is not for the node x\ncsr-2: approved for the node y\x1b[2J"
    commands._tell(text, as_json=False)
    commands._tell(text, as_json=True)
    out, err = capsys.readouterr()
    assert err == text.replace("\n", "\ufffd").replace("\x1b", "\ufffd") + "\n"
    assert out.count("\n") == 1 and json.loads(out)["said"] == text


class Stream(io.StringIO):
    """A stream that remembers its writes, between which other threads may write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return len(text)


@pytest.mark.parametrize(("as_json", "stream"), [(False, "stderr"), (True, "stdout")])
def test_lines_of_several_threads_do_not_run_into_each_other(
    monkeypatch: pytest.MonkeyPatch, as_json: bool, stream: str
) -> None:
    written = Stream()
    monkeypatch.setattr(sys, stream, written)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda number: commands._tell(f"n{number}", as_json=as_json), range(9)))
    lines = [text.removesuffix("\n") for text in written.writes if text.endswith("\n")]
    said = [json.loads(line)["said"] if as_json else line for line in lines]
    assert len(written.writes) == 9 and sorted(said) == [f"n{number}" for number in range(9)]
