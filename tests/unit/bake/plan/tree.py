"""A directory that cases share: each finds it as it was made."""

from __future__ import annotations

import os
from pathlib import Path

from image_builder.system.trees import remove_tree


class Tree:
    """A directory and what was in it at first. To put back what a case changed costs a hundredth of a copy."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._contents = {path: _content(path) for path in self._paths()}
        self._stats = {path: _stat(path) for path in self._contents}

    def _paths(self) -> list[Path]:
        return [
            Path(folder, name) for folder, folders, files in os.walk(self.root) for name in (*folders, *files)
        ]

    def restore(self) -> None:
        """Put back the files, links and modes of the beginning, and remove what is new."""
        for path in self._paths():
            if path not in self._contents and os.path.lexists(path):
                remove_tree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for path, content in self._contents.items():
            if not os.path.lexists(path) or _stat(path) != self._stats[path]:
                _write(path, content, self._stats[path][0])
                self._stats[path] = _stat(path)


def _content(path: Path) -> bytes | str | None:
    """Return a file's bytes, a link's target, and nothing for a directory."""
    if path.is_symlink():
        return os.readlink(path)
    return None if path.is_dir() else path.read_bytes()


def _stat(path: Path) -> tuple[int, int]:
    """Return a file's mode, and when it was changed last; a directory changes with what is in it."""
    stat = path.lstat()
    return stat.st_mode, 0 if path.is_dir() else stat.st_ctime_ns


def _write(path: Path, content: bytes | str | None, mode: int) -> None:
    if content is None:
        path.mkdir(exist_ok=True)
    elif isinstance(content, str):
        path.unlink(missing_ok=True)
        path.symlink_to(content)
        return
    else:
        path.write_bytes(content)
    path.chmod(mode & 0o7777)
