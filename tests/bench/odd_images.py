"""Odd images as a container sees them: seeded and promoted, compared with a plain pull by the same engine.

    .venv/bin/python tests/bench/odd_images.py [--engine NAME] [--json]

Needs root, and builds the image `worker` up to its layer `node`. Each image of `tests/support/registries/odd_images.py`
is pushed to the lab's registry, locked, pulled and packed by the stages' own functions, and rehearsed. A node is seeded
from the store; every image must run and have its guard or label. Then its layers, mounted as the engine mounts them,
are compared with those of a plain pull: types, modes, owners, content, sizes, links, devices, extended attributes, and
the times of all but directories, which have a pull's own time where a layer doesn't give them one. After a promotion
the same is done again.

`differing` counts the images that aren't equal in either state, goal 0; `images` and `seconds_comparing`, the time that
the rehearsal takes to compare them, have no goal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from image_builder.settings import DEFAULT_STORE  # noqa: E402
from tests.bench import report  # noqa: E402
from tests.bench.software import worker  # noqa: E402
from tests.support.images import programs  # noqa: E402
from tests.support.registries import odd_images  # noqa: E402
from tests.support.registries.pulls import ENGINES, NEWER, isolated  # noqa: E402
from tests.support.stores.odd import scenario  # noqa: E402

GOALS: report.Goals = {"differing": ("<=", 0)}
# What two of these images suffice for: `--smallest`.
SMALLEST = ("empty-twice", "bare-on-private", "bare-on-public")


def main() -> int:
    parser = report.parser(__doc__)
    newer = [name for name, patterns in NEWER.items() if all(map(programs.find, patterns))]
    parser.add_argument("--engine", action="append", choices=[*ENGINES, *newer])
    options = report.parse(parser, engine=["containerd"])
    place = worker(DEFAULT_STORE)
    figures: dict[str, Any] = {"differing": 0, "images": 0}
    for engine in options.engine or [*ENGINES, *newer]:
        found = isolated(scenario, place, engine, *(SMALLEST if options.smallest else odd_images.NAMES))
        states = {name: (found["seeded"][name], found["promoted"][name]) for name in found["seeded"]}
        if not options.json:
            print(f"{engine} {found['version']['version']}")
            for name, state in states.items():
                words = [difference or "equal" for difference in state]
                print(f"  {name:<28}{words[0]:<10}{words[1]}")
            for name, reason in found["refused"].items():
                print(f"  {name:<28}refused by a plain pull: {reason.splitlines()[-1]}")
        figures["differing"] += sum(map(any, states.values()))
        figures["images"] += len(states)
        figures[f"{engine}_seconds_comparing"] = found["seconds_comparing"]
        figures[f"{engine}_unguarded"] = len(found["preload"].get("reasons", []))
        assert found["seed"] == "ok" and found["left"] == [], found
    return report.conclude(options, figures, GOALS)


if __name__ == "__main__":
    sys.exit(main())
