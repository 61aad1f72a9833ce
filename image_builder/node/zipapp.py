"""The node agent as a single file: this package as a zip archive that Python runs.

``archive`` builds it reproducibly from the sources and the data next to them. On the node, ``node-agent compile``
writes the file that is actually run: it adds to each source its bytecode, compiled by the node's own Python, so that
starting the agent compiles nothing. A later Python doesn't recognize that bytecode and uses the sources.
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
_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip archive can represent
_PACKAGE = "image_builder/node"
# Code, tables, GPU kernels. Files that an editor leaves behind are not packed.
_PACKED = (".py", ".json", ".ptx")
# A running agent reads modules and tables later than this: it keeps the file that it was started from, which an update
# replaces by another one with other offsets. Its forks close their files, and its GPU workers inherit none: they find
# it under this process's number.
_MAIN = (
    "import os\nimport sys\n\n"
    'sys.path.insert(0, f"/proc/{os.getpid()}/fd/{os.open(sys.path[0], os.O_RDONLY | os.O_CLOEXEC)}")\n\n'
    "from image_builder.node.__main__ import main\n\nsys.exit(main())\n"
)
# PEP 552: a compiled file that contains its source's hash but is never checked against it. Nobody edits an archive.
_UNCHECKED_HASH = 0b01


def archive(package: Path | None = None) -> bytes:
    """Return the agent as one executable file, without bytecode. ``package`` is this package's directory."""
    root = package or Path(__file__).parent
    return packed(_sources(root))


def compiled(source: bytes) -> bytes:
    """Return an archive with the bytecode that this Python compiles its sources to."""
    with zipfile.ZipFile(io.BytesIO(source)) as opened:
        entries = [(name, opened.read(name)) for name in opened.namelist() if not name.endswith(".pyc")]
    code = [(f"{name}c", _compile(name, text)) for name, text in entries if name.endswith(".py")]
    return packed([*entries, *code])


def install(source: Path, target: Path) -> bool:
    """Write the compiled archive of ``source`` to ``target`` with mode 0755. Return whether that changed it."""
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
    """Return named files as an archive that Python runs: the same bytes everywhere."""
    target = io.BytesIO()
    # Not compressed: there is enough room on disk, and the file is read at each start.
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as writer:
        for name, data in entries:
            entry = zipfile.ZipInfo(name, _DATE)
            entry.external_attr = 0o644 << 16
            writer.writestr(entry, data)
    return _SHEBANG + target.getvalue()
