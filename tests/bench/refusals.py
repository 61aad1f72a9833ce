"""How many wrong settings the trial of a bake refuses, by program: it asks the programs of a baked image.

    .venv/bin/python tests/bench/refusals.py [--image NAME | --trees DIR ...] [--json]

Each duration, quantity, percentage and list of the kubelet's configuration is wrong once, and so are labels, taints,
flags, and keys of containerd and Docker. The status is 1 if any was accepted. Needs root.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from image_builder.bake.store import Store  # noqa: E402
from image_builder.settings import DEFAULT_STORE  # noqa: E402
from image_builder.system import namespace  # noqa: E402
from image_builder.system.sandbox import open_root  # noqa: E402
from tests.support.images.builds import Workplace  # noqa: E402
from tests.support.nodes import refusals  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--image", default="worker_current", help="an image of the lab; default: %(default)s")
    parser.add_argument(
        "--trees", nargs="+", type=Path, help="the trees of its layers instead, topmost first"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as output:
        place = Workplace(DEFAULT_STORE, Path(output), options.image)
        trees = options.trees or place.build_until("kubernetes")
    # On the filesystem of the trees, where an overlay can lie.
    with Store(trees[0].parents[3]).staging() as work:
        return namespace.run_isolated(lambda: ask(trees, work, as_json=options.json))


def ask(trees: Sequence[Path], work: Path, *, as_json: bool) -> int:
    """Try the whole table on an image's trees; print what was accepted, and the counts."""
    started = time.monotonic()
    with open_root(trees, work) as root:
        rows = list(refusals.rows(root, work / "trial.log"))
    accepted = [row for row in rows if not row.said]
    total, refused = Counter(row.program for row in rows), Counter(row.program for row in rows if row.said)
    if as_json:
        document = {
            "refused": refused,
            "total": total,
            "accepted": [f"{row.program}: {row.setting}" for row in accepted],
            "said": {f"{row.program}: {row.setting}": row.said for row in rows},
            "seconds": round(time.monotonic() - started, 1),
        }
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        for row in accepted:
            sys.stdout.write(f"accepted  {row.program}: {row.setting}\n")
        for name in sorted(total):
            sys.stdout.write(f"{name:<12}{refused[name]:>5} of {total[name]:>3}  goal: all\n")
        sys.stdout.write(f"{'seconds':<12}{time.monotonic() - started:>5.0f}\n")
    return 1 if accepted else 0


if __name__ == "__main__":
    sys.exit(main())
