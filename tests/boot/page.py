"""docs/reference/boot-matrix.md, generated from the rows and the record of their last runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from image_builder.settings import REPO_ROOT
from tests.boot.rows import CUT, NIGHT, ROWS, Row
from tests.support import provenance

PAGE = REPO_ROOT / "docs/reference/boot-matrix.md"
# Docker 26.1 with kubelet 1.20, containerd 2.1 with kubelet 1.36, Docker 28.5 with the same.
IMAGES = ("worker", "worker_current", "worker_current_docker")

_HEAD = """# Boot matrix

What can happen to a node's local disk from its first boot on, and the required result. Each row boots an image
(`worker` with Docker 26.1, `worker_current` with containerd 2.1, `worker_current_docker` with Docker 28.5) in QEMU,
with files as NVMe disks. A deallocation is the same OS disk with a blank local disk; a reimage is a fresh OS disk with
a used local disk. A power cut kills QEMU (SIGKILL): what the guest flushed is kept, what the guest only cached is lost.
Writes that QEMU acknowledged are also kept, so disks that lose acknowledged writes aren't covered.

```sh
.venv/bin/python -m tests.boot.matrix [--image NAME] [--row NAME ...] [--update-docs]
```

In addition to the builder's packages, the host needs `xfsprogs`, to make some of the disks with foreign data.

Every boot must end with systemd in the state `running`, a clean console, the agent status that the row requires, and no
broken links. `images run` means that a container of every preloaded image was started.

CI runs `tests/disk/test_boot_worker.py` on `worker_current`: {cut}, then a boot with the whole booted suite, the
promotion to its end, and every check's mutation. The nightly tests run it on each of the workers, and also
`tests/disk/test_boot_local_disk.py`: {night}.

## Last results

On {machine}. Seconds are for the whole row, including its boots. Code: *this* is the current code; *earlier* means that
the code that decides the result has changed since, and the row was not run again.
"""


def text(record: Mapping[str, Any]) -> str:
    """Return the page."""
    night = "; ".join(row.name for row in NIGHT)
    lines = [_HEAD.format(cut=CUT.name, night=night, machine=record["machine"])]
    code = provenance.digest(provenance.LOCAL_DISK)
    for image in IMAGES:
        lines += [
            f"\n### {image}\n",
            "| row | what is done | what happened | seconds | date | code | verdict |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        lines += [_line(row, record["images"].get(image, {}).get(row.name), code) for row in ROWS]
    return "\n".join(lines) + "\n"


def _line(row: Row, found: Mapping[str, Any] | None, code: str) -> str:
    if found is None:
        return f"| {row.name} | {row.what} | | | | | not run yet |"
    verdict = "**failed**" if found["wrong"] else "passed"
    happened = "; ".join(found["wrong"]) or "; ".join(_told(found["facts"]))
    cells = (row.name, row.what, happened.replace("|", "\\|").replace("\n", " "))
    of_code = "this" if found.get("code") == code else "earlier"
    return f"| {' | '.join(cells)} | {found['seconds']:.0f} | {found['date']} | {of_code} | {verdict} |"


_WORDS = {
    "formatted": "formatting finished: {}",
    "seeded": "seeding finished: {}",
    "promoting": "still promoting: {}",
    "system": "system {}",
    "disk": "disk: {}",
    "members": "member disks: {}",
    "seed": "seed: {}",
    "boot_seconds": "booted after {} s",
    "seed_seconds": "seeded in {} s",
    "deleted": "deleted: {}",
    "images": "images {}",
    "promotion": "promotion: {}",
    "links": "{} links into the store",
    "empty_files": "{} empty files",
    "kinds": "{} kinds",
    "changed": "changed: {}",
    "shared": "shared: {}",
    "count": "{} copies",
    "actions": "{}",
    "offsets": "{} offsets",
    "detected": "{} detected",
    "two": "two matching disks: {}",
    "with_file": "with a file: {}",
    "readme": "with only the readme: {}",
    "tainted": "tainted: {}",
    "ready": "ready: {}",
    "failed": "failed: {}",
    "said": "{}",
}


def _told(facts: Mapping[str, Any]) -> list[str]:
    return [
        words.format(_value(facts[name])) for name, words in _WORDS.items() if facts.get(name) is not None
    ]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, dict)):
        return ", ".join(map(str, value)) or "none"
    return str(value)
