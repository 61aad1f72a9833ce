"""The role's results on a node, with its defaults except for the version and the source."""

from __future__ import annotations

import pytest
import yaml
from testinfra.host import Host


@pytest.mark.parametrize(
    "path",
    ["/etc/kubernetes/kubelet.yaml", "/etc/systemd/system/kubelet.service"],
)
def test_files_are_roots_alone(host: Host, path: str) -> None:
    file = host.file(path)
    assert (file.user, file.group, file.mode) == ("root", "root", 0o600)


def test_unit_is_enabled_and_whole(host: Host) -> None:
    assert host.service("kubelet").is_enabled
    assert host.run("systemd-analyze verify /etc/systemd/system/kubelet.service").stderr == ""


def test_pulls_are_parallel(host: Host) -> None:
    config = yaml.safe_load(host.file("/etc/kubernetes/kubelet.yaml").content_string)
    assert config["serializeImagePulls"] is False
    assert config["readOnlyPort"] == 0


def test_cni_plugins_are_where_add_ons_look(host: Host) -> None:
    assert host.file("/opt/cni/bin/loopback").exists
