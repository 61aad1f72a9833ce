"""The time of pulls, one by one and in parallel, compared with `docker pull` by hand; and the cost of a bad network.

    .venv/bin/python tests/bench/pull.py [--store DIR] [--smallest] [--json]

Needs root, and builds the image `worker` up to its layer `node`: its own dockerd pulls here, from the lab's registry,
over a link with a limited bandwidth per connection.

    parallel_ratio   our pulls one by one / our pulls in parallel, goal >= 1.5
    hand_ratio       our pulls in parallel / as many `docker pull` by hand at once, same daemon, goal <= 1.05
    wire_ratio       bytes on the wire / bytes of the layers, if one layer of each image has its connection reset in
                     the middle, goal <= 1.2
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from image_builder.bake.lock.model import LockedImage  # noqa: E402
from image_builder.bake.pull.model import Limits  # noqa: E402
from image_builder.bake.pull.reference import parse  # noqa: E402
from image_builder.settings import DEFAULT_STORE  # noqa: E402
from tests.bench import report  # noqa: E402
from tests.bench.report import Row  # noqa: E402
from tests.bench.software import worker  # noqa: E402
from tests.support.registries.plan import Fault  # noqa: E402
from tests.support.registries.pulls import MB, Lab, isolated  # noqa: E402

IMAGES, LAYERS, LAYER_MB = 8, 2, 12
RATE = 6 * MB
ROUNDS = 2
# As in the stage: layers that a daemon downloads at once.
DOWNLOADS = 10
_LIMITS = Limits(progress_seconds=60.0)
GOALS = {"parallel_ratio": (">=", 1.5), "hand_ratio": ("<=", 1.05), "wire_ratio": ("<=", 1.2)}


def scenario(lab: Lab, count: str, megabytes: str, rounds: str) -> dict[str, Any]:
    """Measure everything, with one registry; each measurement has a daemon and a data root of its own."""
    size = int(megabytes) * MB
    images = [lab.push(f"image{n}", *[size] * LAYERS) for n in range(int(count))]
    lab.proxy.rate = float(RATE)

    def timed(pull: Callable[[Any], None]) -> float:
        with lab.running(lab.folder("state"), downloads=DOWNLOADS) as engine:
            started = time.monotonic()
            pull(engine)
            seconds = time.monotonic() - started
            assert all(engine.has(image) for image in images)
        return seconds

    def ours(parallel: int) -> Callable[[Any], None]:
        def pull(engine: Any) -> None:
            found = lab.pull(engine, images, parallel=parallel, limits=_LIMITS)
            assert not found["error"] and not found["bug"], found

        return pull

    ways: dict[str, Callable[[Any], None]] = {
        "serial": ours(1),
        "parallel": ours(len(images)),
        "hand_parallel": lambda _engine: by_hand(lab, images, at_once=True),
        "hand_serial": lambda _engine: by_hand(lab, images, at_once=False),
    }
    # Measure them in turn and take the best of each: other load on the machine affects them all alike.
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(int(rounds)):
        for name, way in ways.items():
            seconds[name].append(timed(way))
    lab.proxy.rate = None
    large = [image.layers[-1].digest for image in images[::2]] + [
        image.layers[-2].digest for image in images[1::2]
    ]
    lab.proxy.faults = [Fault("reset", path=digest, after=size // 2, times=1) for digest in large]
    before = lab.proxy.bytes_sent(r"/blobs/")
    timed(ours(len(images)))
    wire = lab.proxy.bytes_sent(r"/blobs/") - before
    return {
        **{f"{name}_seconds": round(min(taken), 2) for name, taken in seconds.items()},
        "wire_bytes": wire,
        "image_bytes": sum(image.size for image in images),
        "resets": len([r for r in lab.proxy.requests if r.fault == "reset"]),
    }


def by_hand(lab: Lab, images: Sequence[LockedImage], *, at_once: bool) -> None:
    """Pull with the docker command, by digest, and tag as we do."""
    assert lab.root
    root = lab.root
    pulls = []
    for image in images:
        reference = parse(image.ref)
        argv = root.argv(["docker", "pull", "--quiet", reference.at(image.digest)])
        pulls.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
        if not at_once:
            pulls[-1].wait()
    for pull in pulls:
        assert pull.wait() == 0
    for image in images:
        root.run(["docker", "tag", parse(image.ref).at(image.digest), image.ref])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    # Another process has to import it, so its module must not be __main__.
    from tests.bench.pull import scenario

    place = worker(options.store)
    words = (str(options.images), str(options.megabytes), str(options.rounds))
    found: dict[str, Any] = isolated(scenario, place, "docker", *words, seconds=900)
    return {
        **found,
        "parallel_ratio": round(found["serial_seconds"] / found["parallel_seconds"], 2),
        "hand_ratio": round(found["parallel_seconds"] / found["hand_parallel_seconds"], 2),
        "hand_serial_ratio": round(found["parallel_seconds"] / found["hand_serial_seconds"], 2),
        "wire_ratio": round(found["wire_bytes"] / found["image_bytes"], 3),
    }


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE)
    for name, value in (("images", IMAGES), ("megabytes", LAYER_MB), ("rounds", ROUNDS)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = report.parse(parser, images=2, megabytes=2, rounds=1)
    found = measure(options)
    ours = f"{found['parallel_seconds']} s"
    wire = f"{found['wire_bytes'] / MB:.0f} MB", f"{found['image_bytes'] / MB:.0f} MB"
    rows = [
        Row("one by one", f"{found['serial_seconds']} s", ours, "parallel_ratio"),
        Row("docker pull, at once", ours, f"{found['hand_parallel_seconds']} s", "hand_ratio"),
        Row("docker pull, in turn", ours, f"{found['hand_serial_seconds']} s", "hand_serial_ratio"),
        Row(f"{found['resets']} resets, bytes", *wire, "wire_ratio"),
    ]
    return report.conclude(options, found, GOALS, rows)


if __name__ == "__main__":
    sys.exit(main())
