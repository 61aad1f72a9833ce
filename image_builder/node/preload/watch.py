"""A program that reads the archive for minutes: it is told how far it is, and ended where it gets no further."""

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

# Without a byte read, or written to the engine's disk, for so long it will not end. An engine that unpacks is silent.
STALLED_SECONDS = 600.0
# What a killed program gets to end; one that the kernel holds is left to it.
_KILLED_SECONDS = 10.0


def watch(
    argv: Sequence[str],
    archive: Path,
    data_root: Path,
    tell: Callable[[str], None],
    interval: float,
    patience: float = STALLED_SECONDS,
) -> None:
    """Run a program that reads the archive into ``data_root`` and tell how far it is.

    Raises ProgramError, also (status 124) where there was no progress for ``patience`` seconds.
    """
    started = moved = time.monotonic()
    progress: object = None
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
        try:
            while (status := _wait(child, interval)) is None:
                position = read_position(child.pid, archive)
                begun = begun or position is not None
                now, before = time.monotonic(), progress
                if (progress := (position, _free(data_root))) != before:
                    moved = now
                elif now - moved >= patience:
                    late = f"`{' '.join(argv)}` got no further for {patience:g} s, {stage(position, size, begun)}"
                    raise ProgramError(late, 124, "")
                tell(f"{stage(position, size, begun)}, {now - started:.0f} s")
        except BaseException:
            child.kill()
            _wait(child, _KILLED_SECONDS)
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


def _free(data_root: Path) -> int:
    """Return the free blocks of the filesystem that an engine writes to."""
    try:
        return os.statvfs(data_root).f_bfree
    except OSError:
        return 0


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
