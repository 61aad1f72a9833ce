"""A program that reads the archive for minutes: it is told how far it is."""

from __future__ import annotations

import os
import subprocess  # noqa: TID251 (programs.run returns at the end alone, this one is looked at while it runs)
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from image_builder.node import programs
from image_builder.node.errors import ProgramError
from image_builder.node.preload.archive import portion


def watch(argv: Sequence[str], archive: Path, tell: Callable[[str], None], interval: float) -> None:
    """Run a program that reads the archive and tell how far it is; raises ProgramError."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=programs.ENVIRONMENT,
            )
        except OSError as error:
            raise ProgramError(f"`{' '.join(argv)}`: {error.strerror}", 127, "") from error
        size, begun = archive.stat().st_size, False
        with child:
            try:
                while (status := _wait(child, interval)) is None:
                    position = read_position(child.pid, archive)
                    begun = begun or position is not None
                    tell(f"{stage(position, size, begun)}, {time.monotonic() - started:.0f} s")
            except BaseException:
                child.kill()
                raise
        output.seek(0)
        if status:
            said = output.read().decode("utf-8", "replace")
            raise ProgramError(programs.failure(argv, status, said), status, programs.tail(said))


def _wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def stage(position: int | None, size: int, begun: bool) -> str:
    """Return what a program does with the archive. Read to its end, it is the engine's turn: it is silent."""
    if begun and (position is None or position >= size):
        return "unpacking the layers"
    return f"loading: {portion(position or 0, size)} read"


def read_position(pid: int, path: Path) -> int | None:
    """Return up to where a process has read a file that it has open; None where it hasn't."""
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if os.path.realpath(link) == os.path.realpath(path):
                info = Path(f"/proc/{pid}/fdinfo/{link.name}").read_text(encoding="ascii")
                return int(info.splitlines()[0].removeprefix("pos:"))
    except (OSError, ValueError):
        pass  # it ended, or closed the file, while we looked
    return None
