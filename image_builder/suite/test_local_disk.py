"""The local disk: its unit starts before the engines, and on a machine it is mounted and marked as ours."""

from __future__ import annotations

import json
from typing import Any

from questions import merged
from suite import booted, differences, load, needs, nothing, offline, output, starts_again, starts_at_boot
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]
UNIT = "local-disk.service"
SETTINGS = "/etc/node-agent/disk.json"
PROGRAM = "/usr/local/sbin/node-agent"
SOURCES = "/usr/local/lib/node-agent/node-agent.pyz"
STATUS = "/run/node/status.json"
ENGINES = ("docker.service", "containerd.service", "kubelet.service")

DECLARED = (
    "policy",
    "mount_point",
    "filesystem",
    "label",
    "selector",
    "expected_disks",
    "wait_seconds",
    "incomplete_array",
    "wipe",
    "directories",
    "binds",
)

node = needs("node")
# The agent comes with either layer.
agent = needs(image_layers=lambda names: not {"node", "gate"}.isdisjoint(names))


@offline
@booted
@agent
def test_node_agent_is_what_was_baked(host: Host) -> None:
    """The node agent is compiled from the sources next to it, and only root can change either."""
    code = (
        "import sys, zipfile; a, b = (zipfile.ZipFile(p) for p in sys.argv[1:]); "
        "print([n for n in a.namelist() if a.read(n) != b.read(n)], "
        "[n for n in a.namelist() if n.endswith('.py') and n + 'c' not in b.namelist()])"
    )
    assert output(host, "python3 -c %s %s %s", code, SOURCES, PROGRAM) == "[] []"
    for path in (PROGRAM, SOURCES):
        file = host.file(path)
        assert (file.user, file.mode) == ("root", 0o755), f"{path}: {file.user} {file.mode:o}"


@offline
@booted
@node
def test_local_disk_comes_before_the_engines(host: Host, tree: Tree) -> None:
    """The local disk's unit starts at boot, and neither an engine nor the kubelet starts before it or without it."""
    assert starts_at_boot(tree, UNIT)
    for unit in ENGINES:
        name = f"/etc/systemd/system/{unit}.d/05-local-disk.conf"
        lines = host.file(name).content_string.splitlines()
        nothing(f"{name}: {line}" for line in (f"Requires={UNIT}", f"After={UNIT}") if line not in lines)


@offline
@booted
@node
def test_local_disk_is_tried_again(host: Host) -> None:
    """A local disk that failed is retried, and the units that waited for it in vain start once it is mounted."""
    lines = merged(host, f"systemd/system/{UNIT}").splitlines()
    starts_again(UNIT, lines)
    assert "ExecStartPost=-/bin/systemctl --no-block start multi-user.target" in lines, (
        f"nothing follows {UNIT}"
    )


@offline
@booted
@node
def test_local_disk_settings_are_declared_ones(host: Host, v: V) -> None:
    """The agent's disk settings are those that the definition declares."""
    expected = {key: v[f"local_disk_{key}"] for key in DECLARED}
    quota = v["local_disk_cache_quota_bytes"] or None
    path = v["local_disk_cache_path"]
    expected["cache"] = {"path": path, "quota_bytes": quota} if path else None
    nothing(differences(expected, load(host, SETTINGS)))


@offline
@booted
@node
def test_nothing_else_assembles_arrays(host: Host, tree: Tree) -> None:
    """mdadm assembles no array by itself, so the contents of a disk are examined first."""
    assert "AUTO -all" in host.file("/etc/mdadm/mdadm.conf").content_string.splitlines()
    units = ("mdmonitor.service", "mdcheck_start.timer")
    nothing(unit for unit in units if starts_at_boot(tree, unit))


@booted
@node
def test_local_disk_is_mounted(host: Host, v: V) -> None:
    """A filesystem of the declared type and label is mounted, from a device other than the root's."""
    mount_point = v["local_disk_mount_point"]
    actual = json.loads(
        output(host, "findmnt --json --output SOURCE,FSTYPE,LABEL,OPTIONS --mountpoint %s", mount_point)
    )["filesystems"][0]
    expected = {"fstype": v["local_disk_filesystem"], "label": v["local_disk_label"]}
    nothing(differences(expected, actual))
    assert actual["source"] != output(host, "findmnt --noheadings --output SOURCE /").strip()
    assert "noatime" in actual["options"].split(","), actual["options"]


@booted
@node
def test_local_disk_is_furnished(host: Host, v: V) -> None:
    """Declared directories are on the local disk, the cache has its quota, and binds are where programs expect them."""
    root = v["local_disk_mount_point"]
    local = output(host, "stat --format %%d %s", root).strip()
    directories = {f"{root}/{item['path']}": str(item["mode"]) for item in v["local_disk_directories"]}
    for path, mode in directories.items():
        actual = output(host, "stat --format '%%d %%a' %s", path).split()
        assert actual == [local, mode.lstrip("0")], f"{path}: {actual}"
    if cache := v["local_disk_cache_path"]:
        device = output(host, "stat --format %%d %s", f"{root}/{cache}").strip()
        assert device == local, f"the cache is not on {root}"
        if quota := v["local_disk_cache_quota_bytes"]:
            # In blocks of 1 KiB: project, used, soft limit, hard limit; the kernel rounds up to its own blocks.
            report = output(host, "xfs_quota -x -c 'report -p -b -N' %s", root).splitlines()
            limits = [int(line.split()[3]) for line in report if line.split()[:1] == ["#1"]]
            is_limited = len(limits) == 1 and 0 <= limits[0] - quota // 1024 <= 4
            assert is_limited, f"the cache's limit is {limits} KiB, not {quota // 1024}"
    for item in v["local_disk_binds"]:
        source = output(host, "findmnt --noheadings --output FSROOT --mountpoint %s", item["target"]).strip()
        device = output(host, "stat --format %%d %s", item["target"]).strip()
        assert (device, source) == (local, f"/{item['source']}"), f"{item['target']} is {source}"


@booted
@node
def test_local_disk_is_marked_as_this_images(host: Host, v: V) -> None:
    """The marker on the disk names this build, and the agent reports that all is well."""
    marker = load(host, f"{v['local_disk_mount_point']}/.node/disk.json")
    release = host.file("/etc/image-release").content_string
    assert f'IMAGE_BUILD="{marker["image"]}"' in release.splitlines(), marker
    status = load(host, STATUS)
    nothing(differences({"state": "ok", "mount_point": v["local_disk_mount_point"]}, status.get("disk", {})))
    assert status["ready"] is True, status


@booted
@node
def test_engine_data_is_on_the_local_disk(host: Host, v: V) -> None:
    """The engine's data root is on the local disk, and the kubelet's credentials aren't."""
    docker = v["container_runtime_engine"] == "docker"
    root = v["container_runtime_data_root" if docker else "container_runtime_containerd_root"]

    def device(path: str) -> str:
        return output(host, "stat --format %%d %s", path).strip()

    local = device(v["local_disk_mount_point"])
    assert device(root) == local, f"{root} is elsewhere"
    assert device("/var/lib/kubelet") != local
