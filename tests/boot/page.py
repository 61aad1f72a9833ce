"""docs/reference/boot-matrix.md, from the rows and the record of their last runs."""

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

What happens to a node's local disk from its first boot on, and the required result. Each row boots an image (`worker`
with Docker 26.1, `worker_current` with containerd 2.1, `worker_current_docker` with Docker 28.5) in QEMU, with NVMe
disks that are files. The same OS disk with a blank local disk is a deallocation, a fresh OS disk with a used local disk
a reimage; a power cut kills QEMU (SIGKILL), which honors the guest's flushes, and loses the guest's cache. Writes that
QEMU acknowledged are kept: disks that lose those aren't covered.

```sh
.venv/bin/python -m tests.boot.matrix [--image NAME] [--row NAME ...] [--update-docs]
```

The host needs `xfsprogs` in addition to the builder's packages: some disks with foreign data are made there.

Every boot must end with systemd's state `running`, a clean console, the agent's status as in the row, and no broken
links; `images run` means that a container of every preloaded image was started.

CI runs `tests/disk/test_boot_worker.py` on today's worker: {cut}, then a boot with the whole booted suite, promotion to
its end and every check's mutation. The night runs it on each of the workers, and `tests/disk/test_boot_local_disk.py`:
{night}.

## Last results

On {machine}; seconds are for the whole row, boots included. *Earlier* code: the code that decides the result has
changed since, and the row was not run again.
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
    "formatted": "finished: {}",
    "seeded": "seed finished: {}",
    "promoting": "still promoting: {}",
    "system": "system {}",
    "disk": "disk: {}",
    "members": "{} members",
    "seed": "seed: {}",
    "boot_seconds": "running after {} s",
    "seed_seconds": "seeded in {} s",
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
    "two": "two: {}",
    "with_file": "with a file: {}",
    "readme": "readme alone: {}",
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
