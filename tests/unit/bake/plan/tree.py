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
        for path, content in self._contents.items():
            _mark(path, content)
        self._modes = {path: path.lstat().st_mode for path in self._contents}

    def _paths(self) -> list[Path]:
        walk = os.walk(self.root)
        return [Path(folder, name) for folder, folders, files in walk for name in (*folders, *files)]

    def restore(self) -> None:
        """Put back the files, links and modes of the beginning, and remove what is new."""
        for path in self._paths():
            if path not in self._contents and os.path.lexists(path):
                _remove(path)
        for path, content in self._contents.items():
            if not self._is_unchanged(path, content):
                if os.path.lexists(path) and not (content is None and path.is_dir()):
                    _remove(path)
                _write(path, content, self._modes[path])
                _mark(path, content)

    def _is_unchanged(self, path: Path, content: bytes | str | None) -> bool:
        if not os.path.lexists(path):
            return False
        stat = path.lstat()
        return stat.st_mode == self._modes[path] and (content is None or stat.st_mtime_ns == 0)


def _content(path: Path) -> bytes | str | None:
    """Return a file's bytes, a link's target, and nothing for a directory."""
    if path.is_symlink():
        return os.readlink(path)
    return None if path.is_dir() else path.read_bytes()


def _mark(path: Path, content: bytes | str | None) -> None:
    """Give a file a time that no later change leaves to it: two changes may come within one tick of the clock."""
    if content is not None:
        os.utime(path, ns=(0, 0), follow_symlinks=False)


def _remove(path: Path) -> None:
    remove_tree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _write(path: Path, content: bytes | str | None, mode: int) -> None:
    if isinstance(content, str):
        path.symlink_to(content)
        return
    if content is None:
        path.mkdir(exist_ok=True)
    else:
        path.write_bytes(content)
    path.chmod(mode & 0o7777)
