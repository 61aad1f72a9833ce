"""The cost of an upload compared with the SDK's own, and publications that are killed at random.

    .venv/bin/python tests/bench/publish.py [--kills N] [--smallest] [--json]

``upload_cpu_ratio``: CPU seconds that the client takes for a sparse file of 4 GiB with 160 MiB of data: ours through
the import host's proxy, the SDK's ``upload_blob`` straight to Azurite, the only one of the two that accepts it. Each
runs in a process of its own. Needs npm, once, for Azurite.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPO))

from azure.storage.blob import BlobClient, BlobType  # noqa: E402

from image_builder.gallery import pages  # noqa: E402
from image_builder.gallery.upload import STREAMS, Upload  # noqa: E402
from tests.bench import report  # noqa: E402
from tests.bench.report import Row  # noqa: E402
from tests.support.arm.import_host import import_host  # noqa: E402
from tests.support.arm.kills import Point, publish  # noqa: E402
from tests.support.arm.pages import API, Store, azurite  # noqa: E402
from tests.support.arm.place import MIB, place, write_build, write_disk, write_inventory  # noqa: E402

GOALS = {"upload_cpu_ratio": ("<=", 1 / 20)}
# A file that is uploaded whole, and its data, in MiB; with --smallest a share of it.
_SIZE, _DATA, _SMALLEST = 4096, 160, 16
_KILLED_SIZE, _KILLED_DATA = 512 * MIB, 288 * MIB


def client(kind: str, address: str, file: Path) -> None:
    """Upload a file in this process, and print the time that took."""
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    if kind == "ours":
        Upload(lambda: address).write(file, pages.data_ranges(file), lambda *_: None)
    else:
        with file.open("rb") as data:
            blob = BlobClient.from_blob_url(address, api_version=API)
            blob.upload_blob(data, blob_type=BlobType.PAGEBLOB, length=file.stat().st_size, overwrite=True)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"cpu": round(cpu, 2), "wall": round(time.monotonic() - started, 1)}))


def uploads(store: Store, folder: Path, share: int) -> dict[str, Any]:
    """Compare the two ways to upload a sparse file."""
    file = folder / "disk.vhd"
    write_disk(file, _SIZE // share * MIB, _DATA // share * MIB)
    figures: dict[str, Any] = {}
    for kind in ("ours", "sdk"):
        with import_host(store):
            store.create(kind, file.stat().st_size)
            if kind == "sdk":
                store.host = ""
            argv = [sys.executable, __file__, "--client", kind, "--address", store.sas(kind, 7200)]
            done = subprocess.run([*argv, "--file", file], check=True, capture_output=True)
            figures[kind] = json.loads(done.stdout)
    store.sizes.clear()
    return figures | {"upload_cpu_ratio": round(figures["ours"]["cpu"] / figures["sdk"]["cpu"], 4)}


def kills(store: Store, folder: Path, count: int) -> dict[str, Any]:
    """Publish one build, killed ``count`` times at random bytes or requests."""
    chance = random.Random(0)
    (folder / "killed").mkdir()
    with place(store, folder / "killed") as cloud:
        write_build(folder / "output", size=_KILLED_SIZE, data=_KILLED_DATA)
        inventory = write_inventory(folder / "hosts.yml")
        # A few MiB each at most, in addition to those in flight: together they seldom reach the end of the pages.
        points = [Point(received=chance.randrange(1, 8 * MIB)) for _ in range(count - 4)]
        points = [Point(changes=1), *points, *(Point(changes=number) for number in (1, 2, 1))]
        outcome = publish(cloud, inventory, folder / "output", points)
        versions = [path for path in cloud.arm.resources if "/versions/" in path]
        repeated = cloud.host.received - _KILLED_DATA - 512
        allowed = outcome.killed * STREAMS * pages.LARGEST
    return {
        "kills": outcome.killed,
        "resumed": outcome.killed if outcome.status == 0 and outcome.faithful and len(versions) == 1 else 0,
        "bytes_twice": repeated,
        "bytes_twice_allowed": allowed,
    }


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    for hidden in ("--client", "--address", "--file"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = report.parse(parser, kills=4)
    if options.client:
        client(options.client, options.address, Path(options.file))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-publish-", dir="/var/tmp") as work:
        folder = Path(work)
        (folder / "store").mkdir()
        with azurite(folder / "store") as store:
            figures = uploads(store, folder, _SMALLEST if options.smallest else 1)
            figures |= kills(store, folder, options.kills)
    ours, sdk = figures["ours"], figures["sdk"]
    figures["upload_ratio"] = round(ours["wall"] / sdk["wall"], 2)
    figures["resumed_ratio"] = figures["resumed"] / figures["kills"]
    figures["twice_ratio"] = round(figures["bytes_twice"] / figures["bytes_twice_allowed"], 2)
    rows = [
        Row("upload, CPU, ours and the SDK's", f"{ours['cpu']} s", f"{sdk['cpu']} s", "upload_cpu_ratio"),
        Row("upload, wall time", f"{ours['wall']} s", f"{sdk['wall']} s", "upload_ratio"),
        Row("resumed, killed", str(figures["resumed"]), str(figures["kills"]), "resumed_ratio"),
        Row(
            "sent twice, allowed",
            f"{figures['bytes_twice'] >> 20} MiB",
            f"{figures['bytes_twice_allowed'] >> 20} MiB",
            "twice_ratio",
        ),
    ]
    is_whole = figures["resumed_ratio"] == 1 and figures["twice_ratio"] <= 1
    return report.conclude(options, figures, GOALS, rows) or int(not is_whole)


if __name__ == "__main__":
    sys.exit(main())
