"""The cost of a warm build on a runner without a disk of its own: export, import, and the build itself.

    .venv/bin/python tests/bench/exported.py [--image minimal] [--store DIR] [--smallest] [--json]

Needs root, and a store in which the image was built. A blank store next to it stands in for the next runner's.

    export_seconds   `store export` into an empty directory
    again_seconds    the same once more, with nothing new
    import_seconds   `store import` into a blank store
    copy_seconds     `cp -a` of the same stages from store to store, and a sync: the least that any import has to do
    import_ratio     import_seconds / copy_seconds
    warm_seconds     `build` there with nothing changed, without copying its artifacts to the output; goal <= 5
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from image_builder.bake.export import read_index  # noqa: E402
from image_builder.bake.store import Store  # noqa: E402
from image_builder.settings import DEFAULT_STORE  # noqa: E402
from image_builder.system.trees import remove_tree  # noqa: E402
from tests.bench import report  # noqa: E402
from tests.bench.report import Row  # noqa: E402

GOALS = {"warm_seconds": ("<=", 5.0)}


def _timed(*argv: str | Path) -> float:
    started = time.monotonic()
    subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - started


def measure(image: str, source: Path) -> dict[str, Any]:
    program = REPO / "image-builder"
    work = Path(tempfile.mkdtemp(prefix="bench-exported-", dir=source.parent))
    export, blank, output = work / "export", work / "store", work / "output"
    places = ("--store", blank, "--output", output)
    try:
        argv = (program, "store", "export", "--to", export, image, "--store", source)
        figures = {"export_seconds": _timed(*argv), "again_seconds": _timed(*argv)}
        index = read_index(export)
        os.sync()
        (work / "copy").mkdir()
        objects = [Store(source).object(archive.id) for archive in index.objects]
        figures["copy_seconds"] = _timed("cp", "-a", *objects, work / "copy") + _timed("sync")
        figures["import_seconds"] = _timed(program, "store", "import", export, "--store", blank)
        # The first build copies the artifacts, even if nothing was built; after that they are already there.
        figures["published_seconds"] = _timed(program, "build", image, *places)
        figures["warm_seconds"] = _timed(program, "build", image, *places)
    finally:
        remove_tree(work)
    sizes = {
        "stages_bytes": sum(archive.unpacked for archive in index.objects),
        "export_bytes": sum(archive.bytes for archive in index.objects)
        + sum(d.bytes for d in index.downloads),
    }
    return {"image": image, **sizes, **{name: round(seconds, 1) for name, seconds in figures.items()}}


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--image", default="minimal")
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE)
    options = report.parse(parser, image="tiny")
    figures = measure(options.image, options.store)
    figures["import_ratio"] = round(figures["import_seconds"] / figures["copy_seconds"], 2)
    mib = figures["stages_bytes"] >> 20, figures["export_bytes"] >> 20
    rows = [
        Row(name, f"{figures[key]} s", "", key)
        for name, key in (
            (f"export, {mib[0]} to {mib[1]} MiB", "export_seconds"),
            ("export, nothing new", "again_seconds"),
            ("first build, artifacts published", "published_seconds"),
            ("build, nothing changed", "warm_seconds"),
        )
    ]
    imported = f"{figures['import_seconds']} s", f"{figures['copy_seconds']} s"
    return report.conclude(
        options, figures, GOALS, [Row("import, or cp -a", *imported, "import_ratio"), *rows]
    )


if __name__ == "__main__":
    sys.exit(main())
