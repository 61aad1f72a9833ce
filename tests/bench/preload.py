"""The time until a blank disk has its images, compared with other ways; the cost of promotion.

    .venv/bin/python tests/bench/preload.py [--store DIR] [--engine NAME] [--size GB] [--files PROFILE]
                                            [--only PART] [--smallest] [--json]

Needs root, and builds the image `worker` up to its layer `node`: its engines and its agent's Python run here. The disk
is a freshly made XFS on a loop device (direct I/O; ext4 on a host without mkfs.xfs), blank before each measurement,
and all caches are dropped. Each round measures the compared ways back to back; the median of an equal number of rounds
counts on every side.

Each option may be given several times; without it, all of its values are measured. `--size` is how much software the
image has: 0.3, 3.3 and 10 GB. If a size doesn't fit on the disk, the largest that does is measured, with a message.
`--files small` is the worker's own software, thousands of small files; `large` is the same in files of 256 MB. The
engines are those of `worker`; `--engine containerd_2` and `docker_28` are available if IMAGE_BUILDER_PROGRAMS has them,
and are only measured when named.

For each engine, size and profile:

    seed       seed_seconds     `node-agent seed`, the whole process; goal <= 0.3
               seed_flatness    the same / the same with a 0.3 GB image, goal <= 1.2
               flatness         the whole of ours / the same with a 0.3 GB image, goal <= 1.2
    first_run                   the figures of `seed`, and:
               load_ratio       daemon start + load of the archive + container running / seed + daemon start + container
                                running; goals >= 20 (Docker), >= 60 (containerd), from 3 GB on
    peers      copy_ratio       `cp -a` of a populated data root + start + running / ours, goal >= 4, from 3 GB on
               in_place_excess  ours / start + running with the data root on the OS disk, goal <= 1.1
               btrfs_seed_excess  ours / a btrfs seed device with the data root + start + running, goal <= 1.1
               podman_store_excess  ours / podman with an additional image store on the OS disk, which has no daemon to
                                start. Podman and btrfs-progs are Debian 13's, in a throwaway root

For Docker, at the same sizes:

    cold_read  cold_read_ratio  load / ours, each followed by one read of every file of the image through the
                                container's root, with the OS disk throttled to 100 MB/s, goal >= 1.3. The OS disk is a
                                loop device, and the control group of all these processes has the limit
    promote    promote_ratio    `cp -a` of the same layers, two at once, and sync / the whole of `node-agent
                                promote` without a rate, goal >= 1. Both run at the workers' priority; the copying
                                time by the agent's own clock is also reported
    reader     reader_slowdown  a cold reader of another image while a promotion runs at its default rate / the same
                                reader by itself, goal <= 1.10; from 3 GB on, so that the promotion outlasts it

And independently of the size:

    many       many_seconds     `node-agent seed` with 50 images of 10 layers, goal <= 0.5
               many_memory_mib, many_written_mib  its peak memory, and its writes to the disk, in MiB, goal <= 30
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from image_builder.settings import DEFAULT_STORE  # noqa: E402
from image_builder.system import process  # noqa: E402
from tests.bench import first_runs, report  # noqa: E402
from tests.bench.blank_disks import blank_disk, drop_caches, filesystem, throttled  # noqa: E402
from tests.bench.debian_root import debian_root  # noqa: E402
from tests.bench.first_runs import PEERS, ROUNDS, Took, Way, in_turn  # noqa: E402
from tests.bench.promotions import Found, promotion, read, reader  # noqa: E402
from tests.bench.software import PROFILES, image, worker  # noqa: E402
from tests.support.images import programs  # noqa: E402
from tests.support.registries.pulls import ENGINES, MB, NEWER, Lab, family, isolated  # noqa: E402
from tests.support.stores.seeds import AGENT, Baked, Node, bake, node  # noqa: E402

SMALL_MB = 300
SIZES = (0.3, 3.3, 10.0)
# The copies while the archive is loaded: pulled, archived, packed, in the registry, and twice on the local disk.
DISK_PER_BYTE = 5.5
PARTS = ("seed", "first_run", "peers", "cold_read", "promote", "reader", "many")
# These are about our code and the kernel, not about the engine.
DOCKER_PARTS = ("cold_read", "promote", "reader")
MANY_IMAGES, MANY_LAYERS = 50, 10
OS_DISK_RATE = 100 * MB
LOAD_GOALS = {"docker": 20, "containerd": 60}
# The smallest image for which loading and copying have goals, and whose promotion outlasts a reader.
LARGE_GB = 3.0
GOALS: dict[str, tuple[str, float]] = {
    "seed_seconds": ("<=", 0.3),
    "seed_flatness": ("<=", 1.2),
    "flatness": ("<=", 1.2),
    "copy_ratio": (">=", 4),
    "in_place_excess": ("<=", 1.1),
    "btrfs_seed_excess": ("<=", 1.1),
    "cold_read_ratio": (">=", 1.3),
    "promote_ratio": (">=", 1),
    "reader_slowdown": ("<=", 1.1),
    "many_seconds": ("<=", 0.5),
    "many_memory_mib": ("<=", 30),
    "many_written_mib": ("<=", 30),
}
# Runs a program; prints its peak memory (KiB), CPU seconds and wall-clock seconds.
_PEAK = """\
import resource, subprocess, sys, time
started = time.monotonic()
subprocess.run(sys.argv[1:], check=True)
seconds = time.monotonic() - started
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_maxrss, used.ru_utime + used.ru_stime, seconds)
"""


# -- one image -------------------------------------------------------------------------------------------------


def scenario(lab: Lab, megabytes: str, profile: str, parts: str, peers_root: str) -> Found:
    """Measure the parts for one engine and image. The keys of `GOALS` are ratios, the others seconds."""
    lab.endpoints = dict(lab.behind)
    wanted = parts.split(",")
    large = bake(lab, [image(lab, "large", int(megabytes), profile)])
    entry = large.manifest()["images"][0]
    found: Found = {
        "filesystem": filesystem(),
        "rounds": ROUNDS,
        "image_gb": round(entry["bytes"] / 1e9, 2),
        "store_gb": round(large.manifest()["bytes"] / 1e9, 2),
    }
    if "peers" in wanted:
        found |= peers(lab, large, Path(peers_root))
    process.run(["rm", "-rf", large.state])
    if {"seed", "first_run", "reader"} & set(wanted):
        small = bake(lab, [image(lab, "small", SMALL_MB, profile)])
        process.run(["rm", "-rf", small.state])
        if "first_run" in wanted:
            found |= first_run(lab, large, small)
        elif "seed" in wanted:
            found |= seed(lab, large, small)
        if "reader" in wanted:
            found |= reader(lab, large, small)
    if "cold_read" in wanted:
        found |= cold_read(lab, large)
    if "promote" in wanted:
        found |= promotion(lab, large)
    return found


def seed(lab: Lab, large: Baked, small: Baked, **others: Way) -> Found:
    """Measure ours with both images, in turn with ``others``."""
    took = in_turn(
        ours=lambda: first_runs.ours(lab, large), small=lambda: first_runs.ours(lab, small), **others
    )
    return {
        **_seconds(took),
        "seed_seconds": round(took["ours"].fill, 3),
        "seed_flatness": round(took["ours"].fill / took["small"].fill, 2),
        "flatness": round(took["ours"].total / took["small"].total, 2),
    }


def first_run(lab: Lab, large: Baked, small: Baked) -> Found:
    """Measure ours with both images, and the engine's own way to load the archive of the large one."""
    found = seed(lab, large, small, load=lambda: first_runs.loaded(lab, large))
    return {**found, "load_ratio": round(found["load_total"] / found["ours_total"], 1)}


def peers(lab: Lab, large: Baked, peers_root: Path) -> Found:
    """Measure each of the others in turn with ours; each one's files on the disk are removed before the next one's."""
    found: Found = {}
    for name, prepared in PEERS.items():
        with prepared(lab, large, peers_root) as way:
            took = in_turn(**{name: way, f"{name}_ours": lambda: first_runs.ours(lab, large)})
        peer, own = took[name].total, took[f"{name}_ours"].total
        found |= _seconds(took)
        if name == "copy":
            found["copy_ratio"] = round(peer / own, 1)
        else:
            found[f"{name}_excess"] = round(own / peer, 2)
    return found


def _seconds(took: dict[str, Took]) -> Found:
    return {
        f"{name}_{key}": round(value, 3)
        for name, one in took.items()
        for key, value in (("fill", one.fill), ("total", one.total))
    }


def read_all(here: Node, _engine: Any) -> None:
    """Read every file of the image through a container's root, two at a time."""
    name = process.run(["ls", here.data / "image/overlay2/layerdb/mounts"], ok=(0, 2)).stdout.split()
    assert not name, "try_out removes its container"
    ref = f"{next(iter(json.loads((here.data / 'image/overlay2/repositories.json').read_text())['Repositories']))}:1"
    made = here.root.run(["docker", "run", "--detach", "--network", "none", ref]).stdout.strip()
    told = here.root.run(
        ["docker", "inspect", "--format", "{{.GraphDriver.Data.MergedDir}}", made]
    ).stdout.strip()
    read(here.root.path / told.lstrip("/"))
    here.root.run(["docker", "rm", "--force", made])


def cold_read(lab: Lab, large: Baked) -> Found:
    """Measure both ways, each followed by a read of everything, from an OS disk that delivers 100 MB/s."""
    size = sum(path.stat().st_size for path in large.opt.rglob("*") if path.is_file())
    with blank_disk(lab.folder("os"), size * 1.1 / 1e9 + 0.5) as os_disk:
        slow = Baked(os_disk.path / "opt", large.state, large.images)
        process.run(["cp", "-a", large.opt, slow.opt])
        with throttled(os_disk, OS_DISK_RATE):
            took = in_turn(
                cold_ours=lambda: first_runs.ours(lab, slow, read_all),
                cold_load=lambda: first_runs.loaded(lab, slow, read_all),
            )
    ratio = round(took["cold_load"].total / took["cold_ours"].total, 2)
    return {**_seconds(took), "cold_read_ratio": ratio}


# -- many images -----------------------------------------------------------------------------------------------


def many(lab: Lab) -> Found:
    """Seed 50 images of 10 layers each; return the whole process's seconds, peak memory and writes to the disk."""
    lab.endpoints = dict(lab.behind)
    sizes = [20_000] * (MANY_LAYERS - 1)
    baked = bake(lab, [lab.push(f"image{number}", *sizes) for number in range(MANY_IMAGES)])
    seconds, processor, memory, written, count = [], [], [], [], 0
    for _ in range(ROUNDS):
        with blank_disk(lab.folder("ssd"), 2) as ssd, node(lab, baked.opt, ssd.path) as here:
            drop_caches()
            before = ssd.written()
            # A program's peak includes the memory of the process it was forked from, hence a small one in between.
            told = here.root.run(["python3", "-Ic", _PEAK, AGENT, "seed"]).stdout
            peak, busy, took = told.split()[-3:]
            seconds.append(float(took))
            processor.append(float(busy))
            section = here.status()["seed"]
            assert section["state"] == "ok" and section["images"] == MANY_IMAGES, section
            count = section["layers"]
            memory.append(int(peak) / 1024)
            process.run(["sync"])
            written.append((ssd.written() - before) / (1 << 20))
            with here.engine() as engine:
                assert engine.has(baked.images[-1])
    return {
        "layers": count,
        "many_seconds": round(statistics.median(seconds), 3),
        "many_processor_seconds": round(statistics.median(processor), 3),
        "many_memory_mib": round(statistics.median(memory), 1),
        "many_written_mib": round(statistics.median(written), 1),
    }


# -- the report ------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> list[Found]:
    """Measure all that was requested, one engine and one image at a time."""
    # Another process has to import it, so its module must not be __main__.
    from tests.bench.preload import many, scenario

    place = worker(options.store)
    found: list[Found] = []
    with _peers_root(options) as tree:
        for engine in options.engine:
            for asked in options.size if set(options.only) - {"many"} else ():
                size = fitting(asked, options.store)
                parts = parts_of(options.only, engine, size)
                for profile in options.files if parts else ():
                    words = (str(round(size * 1000)), profile, ",".join(parts), os.fspath(tree))
                    one = isolated(scenario, place, engine, *words, seconds=7200)
                    found.append({"engine": engine, "size": size, "files": profile, **one})
            if "many" in options.only:
                found.append({"engine": engine, **isolated(many, place, engine, seconds=1800)})
    return found


def parts_of(wanted: Sequence[str], engine: str, size: float) -> list[str]:
    """Return the parts that are measured with an image of ``size`` GB."""
    left_out = {"many"}
    if family(engine) != "docker":
        left_out |= set(DOCKER_PARTS)
    if size < LARGE_GB:
        left_out.add("reader")
    return [part for part in wanted if part not in left_out]


@contextmanager
def _peers_root(options: argparse.Namespace) -> Iterator[Path]:
    """Yield a root with the programs that only the peers need."""
    if "peers" not in options.only:
        yield Path("/nonexistent")
        return
    with debian_root(options.store.parent, first_runs.PACKAGES) as tree:
        yield tree


def fitting(gigabytes: float, store: Path) -> float:
    """Return the size, or the largest that fits the store's filesystem, with a message."""
    free = shutil.disk_usage(store).free / 1e9
    largest = math.floor(10 * free / DISK_PER_BYTE) / 10
    if gigabytes > largest:
        print(
            f"{gigabytes:g} GB need {gigabytes * DISK_PER_BYTE:.0f} GB of disk, {free:.0f} are free: "
            f"measured with {largest:g} GB",
            file=sys.stderr,
        )
    return min(gigabytes, largest)


def goal_of(one: Found, key: str) -> tuple[str, float] | None:
    """Return the goal of a figure; None if it has none, or the image is too small for it."""
    if key in ("load_ratio", "copy_ratio") and one["image_gb"] < LARGE_GB:
        return None
    return (">=", LOAD_GOALS[family(one["engine"])]) if key == "load_ratio" else GOALS.get(key)


def ratios(one: Found) -> dict[str, float]:
    """Return the compared figures of a measurement; the rest are seconds and circumstances."""
    return {key: value for key, value in one.items() if key in GOALS or key.endswith(("_ratio", "_excess"))}


def title(one: Found) -> str:
    return f"{one['engine']}_{one['files']}_{one['size']:g}gb" if "size" in one else str(one["engine"])


def is_met(one: Found, key: str) -> bool:
    goal = goal_of(one, key)
    return goal is None or report.is_met(goal, one[key])


def show(found: Sequence[Found]) -> None:
    """Print each measurement; goals stand behind the figures that have one."""
    for one in found:
        print(title(one))
        for key, value in one.items():
            goal = goal_of(one, key)
            words = f"  goal {goal[0]} {goal[1]:g}{'' if is_met(one, key) else ' MISSED'}" if goal else ""
            print(f"  {key:<28}{value!s:>12}{words}")


def arguments() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE)
    newer = [name for name, patterns in NEWER.items() if all(map(programs.find, patterns))]
    parser.add_argument("--engine", action="append", choices=[*ENGINES, *newer])
    parser.add_argument("--size", action="append", type=float, metavar="GB")
    parser.add_argument("--files", action="append", choices=PROFILES)
    parser.add_argument("--only", action="append", choices=PARTS)
    options = report.parse(parser, engine=["docker"], size=[0.1], files=["large"], only=["first_run", "many"])
    for name, values in (("engine", ENGINES), ("size", SIZES), ("files", PROFILES), ("only", PARTS)):
        if getattr(options, name) is None:
            setattr(options, name, list(values))
    return options


def main() -> int:
    options = arguments()
    found = measure(options)
    if options.json:
        named = {f"{title(one)}_{key}": value for one in found for key, value in ratios(one).items()}
        print(json.dumps({**named, "measurements": found}))
    else:
        show(found)
    met = (is_met(one, key) for one in found for key in ratios(one))
    return 0 if options.smallest or all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
