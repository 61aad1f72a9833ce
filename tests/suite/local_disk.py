"""Mutations for test_local_disk.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.suite.booted import edited, record_booted
from tests.suite.offline import change, chmod, edit_json, outside, record, remove, write

PROGRAM = "/usr/local/sbin/node-agent"
SOURCES = "/usr/local/lib/node-agent/node-agent.pyz"
UNIT = "/etc/systemd/system/local-disk.service"
SETTINGS = "/etc/node-agent/disk.json"


def sources_alone(root: Path, _variables: dict[str, Any]) -> None:
    """Replace the program with the archive of its sources: it runs, but starts slowly."""
    outside(root, PROGRAM).write_bytes(outside(root, SOURCES).read_bytes())


record(
    "test_node_agent_is_what_was_baked",
    write(PROGRAM, "#!/bin/sh\n", 0o755),
    chmod(PROGRAM, 0o775),
    sources_alone,
)
record(
    "test_local_disk_comes_before_the_engines",
    remove("/etc/systemd/system/multi-user.target.wants/local-disk.service"),
    change("/etc/systemd/system/docker.service.d/05-local-disk.conf", "^Requires=.*$", ""),
    change("/etc/systemd/system/kubelet.service.d/05-local-disk.conf", "^After=.*$", ""),
    change("/etc/systemd/system/containerd.service.d/05-local-disk.conf", "local-disk", "local-disc"),
)
record(
    "test_local_disk_is_tried_again",
    change(UNIT, "^Restart=.*$", ""),
    change(UNIT, "^StartLimitIntervalSec=.*$", ""),
    change(UNIT, "^ExecStartPost=.*$", ""),
)
record(
    "test_local_disk_settings_are_declared_ones",
    change(SETTINGS, '"policy": "[a-z]+"', '"policy": "none"'),
    change(SETTINGS, '"label": "[a-z]+"', '"label": "other"'),
    *(
        edit_json(SETTINGS, setting)
        for setting in (
            lambda settings: settings.update(wait_seconds=299),
            lambda settings: settings["directories"].append({"path": "more", "mode": "0755"}),
            lambda settings: settings["binds"].append({"source": "pods", "target": "/var/lib/other"}),
            lambda settings: settings.update(cache={"path": "other", "quota_bytes": None}),
            lambda settings: settings["cache"].update(quota_bytes=4096),
        )
    ),
)
record(
    "test_nothing_else_assembles_arrays",
    change("/etc/mdadm/mdadm.conf", "^AUTO -all$", "AUTO +all"),
)
record_booted("test_local_disk_is_mounted", "mount -o remount,atime,strictatime /mnt/local")
record_booted(
    "test_local_disk_is_furnished",
    "mv /mnt/local/cache /mnt/local/mutation",
    mend="mv /mnt/local/mutation /mnt/local/cache",
)
record_booted(
    "test_local_disk_is_marked_as_this_images", **edited("/mnt/local/.node/disk.json", 's/"image": "/&other/')
)
record_booted(
    "test_engine_data_is_on_the_local_disk",
    "mount --bind /mnt/local /var/lib/kubelet",
    # The kubelet is running and may have a file in it open.
    mend="umount --lazy /var/lib/kubelet",
)
