"""The node agent as one file: this package as a zip archive that Python runs.

``archive`` makes it from the sources and the data beside them, the same bytes everywhere. On the node
``node-agent compile`` writes the file that is run: beside each source what the node's own Python compiles it to, so
that a start need not. A later Python does not know that code and takes the sources.
"""

from __future__ import annotations

import importlib.util
import io
import marshal
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from image_builder.node import files

_SHEBANG = b"#!/usr/bin/python3 -I\n"
_DATE = (1980, 1, 1, 0, 0, 0)  # the first that a zip archive knows
_PACKAGE = "image_builder/node"
# Code, tables, the GPU's kernels. What an editor leaves behind stays there.
_PACKED = (".py", ".json", ".ptx")
_MAIN = "import sys\n\nfrom image_builder.node.__main__ import main\n\nsys.exit(main())\n"
# PEP 552: a compiled file that names its source's hash and is never checked against it. Nobody edits an archive.
_UNCHECKED_HASH = 0b01


def archive(package: Path | None = None) -> bytes:
    """Return the agent as one executable file, nothing compiled. ``package`` is this package's directory."""
    root = package or Path(__file__).parent
    return packed(_sources(root))


def compiled(source: bytes) -> bytes:
    """Return an archive with what this Python compiles its sources to."""
    with zipfile.ZipFile(io.BytesIO(source)) as opened:
        entries = [(name, opened.read(name)) for name in opened.namelist() if not name.endswith(".pyc")]
    code = [(f"{name}c", _compile(name, text)) for name, text in entries if name.endswith(".py")]
    return packed([*entries, *code])


def install(source: Path, target: Path) -> bool:
    """Write the compiled archive of ``source`` to ``target``, mode 0755; tell whether that changed it."""
    return files.write_changed(target, compiled(source.read_bytes()), 0o755)


def _sources(root: Path) -> list[tuple[str, bytes]]:
    entries = [("__main__.py", _MAIN.encode()), ("image_builder/__init__.py", b"")]
    for path in sorted(_files(root)):
        entries.append((f"{_PACKAGE}/{path.relative_to(root).as_posix()}", path.read_bytes()))
    return entries


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(folder, name) for name in names if name.endswith(_PACKED))


def _compile(name: str, text: bytes) -> bytes:
    code = compile(text, name, "exec", dont_inherit=True)
    head = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little")
    return head + importlib.util.source_hash(text) + marshal.dumps(code)


def packed(entries: list[tuple[str, bytes]]) -> bytes:
    """Return files, by their names, as an archive that Python runs: the same bytes everywhere."""
    target = io.BytesIO()
    # Stored: the file lies on a disk with room, and is read at each start.
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as writer:
        for name, data in entries:
            entry = zipfile.ZipInfo(name, _DATE)
            entry.external_attr = 0o644 << 16
            writer.writestr(entry, data)
    return _SHEBANG + target.getvalue()
