"""Joining a cluster: every boot does it by itself."""

from __future__ import annotations

from typing import Any

from suite import (
    booted,
    differences,
    load,
    named,
    needs,
    nothing,
    offline,
    read,
    starts_at_boot,
    statements,
)
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]
UNIT = "/etc/systemd/system/node-join.service"
SETTINGS = "/etc/node-agent/join.json"
# The units that the join looks at start before it.
BEFORE_IT = (
    "network-online.target",
    "local-disk.service",
    "image-preload.service",
    "docker.service",
    "containerd.service",
    "preflight.service",
    "kubelet.path",
)

join = needs("join")


@offline
@booted
@join
def test_every_boot_joins(host: Host, tree: Tree) -> None:
    """The join starts at boot, unconditionally, after the units that it looks at; the kubelet doesn't wait for it."""
    assert starts_at_boot(tree, "node-join.service")
    lines = statements(read(host, UNIT))
    expected = ("Type=oneshot", "RemainAfterExit=yes", "ExecStart=/usr/local/sbin/node-agent join")
    nothing(f"{UNIT} lacks {line}" for line in expected if line not in lines)
    nothing(
        line for line in lines if line.startswith(("Condition", "Assert", "SuccessExitStatus", "Before="))
    )
    after = named(lines, "After")
    nothing(f"it does not wait for {name}" for name in BEFORE_IT if name not in after)


@offline
@booted
@join
def test_kubelet_is_started_when_it_is_told(tree: Tree) -> None:
    """The unit that watches for the file that the join writes, kubelet.path, starts at boot."""
    assert starts_at_boot(tree, "kubelet.path")


@offline
@booted
@join
def test_join_settings_are_declared_ones(host: Host, v: V) -> None:
    """The agent's join settings are those that the definition declares."""
    nothing(differences(v["__node_join_settings"], load(host, SETTINGS)))
