"""This program as one file: the agent's package, this one, and ``tests/bench/gpu.py``."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from image_builder.node import files as node_files
from image_builder.node import zipapp
from tests.bench.first_contact import context

_MAIN = "import sys\n\nfrom tests.bench.first_contact.__main__ import main\n\nsys.exit(main())\n"


def run(target: Path) -> int:
    """Write the file; return 0. Raises OSError."""
    node_files.write(target, archive(), 0o755)
    return 0


def archive() -> bytes:
    """Return the file's bytes: executable, without compiled code, the same everywhere."""
    checkout = context.checkout()
    if checkout is None:
        raise OSError("this is the packed program already")
    bench = checkout / "tests/bench"
    files = [("tests/__init__.py", b""), ("tests/bench/__init__.py", b"")]
    files += [
        (path.relative_to(checkout).as_posix(), path.read_bytes())
        for path in sorted([bench / "gpu.py", *(bench / "first_contact").glob("*.py")])
    ]
    with zipfile.ZipFile(io.BytesIO(zipapp.archive())) as agent:
        files += [(name, agent.read(name)) for name in agent.namelist() if name != "__main__.py"]
    return zipapp.packed([("__main__.py", _MAIN.encode()), *files])
