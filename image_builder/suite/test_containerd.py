"""containerd: in the declared version and, as it reports itself, configured as declared."""

from __future__ import annotations

import tomllib
from typing import Any

from suite import booted, differences, needs, nothing, offline, output, read, release
from testinfra.host import Host

V = dict[str, Any]

with_layer = needs("container_runtime")
with_cri = needs("container_runtime", __container_runtime_with_cri=True)


def _containerd(host: Host) -> dict[str, Any]:
    """Return containerd's effective configuration, as it reports it, with imports and defaults merged in."""
    dump: dict[str, Any] = tomllib.loads(output(host, "containerd config dump"))
    return dump


def _plugin(containerd: dict[str, Any], v: V, part: str) -> dict[str, Any]:
    """Return the CRI plugin's section for ``images`` or ``runtime``, wherever this version has it."""
    split = int(v["__container_runtime_config_version"]) > 2
    name = f"io.containerd.cri.v1.{part}" if split else "io.containerd.grpc.v1.cri"
    section: dict[str, Any] = containerd["plugins"].get(name, {})
    assert section, f"containerd has no plugin {name}"
    return section


@offline
@booted
@with_layer
def test_containerd_is_the_declared_version(host: Host, v: V) -> None:
    """containerd is the version that its configuration was written for."""
    actual = release(output(host, "containerd --version").split()[2])
    assert f"{actual}.".startswith(f"{v['container_runtime_containerd_version']}."), f"containerd is {actual}"


@offline
@booted
@with_layer
def test_containerd_root_is_on_the_local_disk(host: Host, v: V) -> None:
    """containerd stores its own images and snapshots in the declared root."""
    containerd = _containerd(host)
    nothing(differences({"root": v["container_runtime_containerd_root"]}, containerd))


@offline
@booted
@needs("container_runtime", __container_runtime_with_cri=False)
def test_containerd_serves_docker_alone(host: Host) -> None:
    """Where only Docker is wanted, containerd offers no second CRI socket that could be used by mistake."""
    containerd = _containerd(host)
    assert "io.containerd.grpc.v1.cri" in containerd["disabled_plugins"]


@offline
@booted
@with_cri
def test_containerd_leaves_cgroups_to_systemd(host: Host, v: V) -> None:
    """runc creates its cgroups through systemd."""
    containerd = _containerd(host)
    runc = _plugin(containerd, v, "runtime")["containerd"]["runtimes"]["runc"]
    nothing(differences({"SystemdCgroup": True}, runc["options"]))


@offline
@booted
@with_cri
def test_containerd_unpacks_with_overlayfs(host: Host, v: V) -> None:
    """containerd unpacks images with the overlayfs snapshotter."""
    containerd = _containerd(host)
    images = _plugin(containerd, v, "images")
    assert images.get("snapshotter", images.get("containerd", {}).get("snapshotter")) == "overlayfs"


@offline
@booted
@with_cri
def test_containerd_protects_the_pause_image(host: Host, v: V) -> None:
    """The pause image is the declared one, which containerd never collects as garbage."""
    containerd = _containerd(host)
    images = _plugin(containerd, v, "images")
    actual = images.get("pinned_images", {}).get("sandbox", images.get("sandbox_image"))
    assert actual == v["container_runtime_pause_image"]


@offline
@booted
@needs(
    "container_runtime",
    __container_runtime_with_cri=True,
    __container_runtime_containerd_features=lambda f: "progress_timeout" in f,
)
def test_containerd_waits_for_slow_pulls(host: Host, v: V) -> None:
    """containerd cancels a pull only after it has made no progress for the declared time."""
    containerd = _containerd(host)
    actual = _plugin(containerd, v, "images")["image_pull_progress_timeout"]
    assert _seconds(actual) == _seconds(v["container_runtime_image_pull_progress_deadline"]), actual


def _seconds(duration: str) -> int:
    """Convert a Go duration of whole hours, minutes and seconds to seconds."""
    total, number = 0, ""
    for character in duration:
        if character.isdigit():
            number += character
        else:
            total += int(number) * {"h": 3600, "m": 60, "s": 1}[character]
            number = ""
    return total


@offline
@booted
@with_cri
def test_containerd_downloads_in_parallel(host: Host, v: V) -> None:
    """The plugin that pulls has the declared number of concurrent downloads."""
    containerd = _containerd(host)
    expected = v["container_runtime_max_concurrent_downloads"]
    if "transfer_pull" in v["__container_runtime_containerd_features"]:
        transfer = containerd["plugins"]["io.containerd.transfer.v1.local"]
        nothing(differences({"max_concurrent_downloads": expected}, transfer))
    else:
        nothing(differences({"max_concurrent_downloads": expected}, _plugin(containerd, v, "images")))


@offline
@booted
@with_cri
def test_containerd_reads_registries_from_a_directory(host: Host, v: V) -> None:
    """containerd reads its mirrors from a directory of files, which can change without a restart."""
    containerd = _containerd(host)
    registry = _plugin(containerd, v, "images")["registry"]
    nothing(differences({"config_path": v["__container_runtime_certs_dir"]}, registry))


@offline
@booted
@needs("container_runtime", __container_runtime_with_cri=True, container_runtime_registry_mirrors=bool)
def test_containerd_mirrors(host: Host, v: V) -> None:
    """Every registry with mirrors has a hosts.toml that names them in order."""
    for registry, mirrors in v["container_runtime_registry_mirrors"].items():
        hosts = tomllib.loads(read(host, f"{v['__container_runtime_certs_dir']}/{registry}/hosts.toml"))
        assert list(hosts.get("host", {})) == [mirror["url"] for mirror in mirrors], registry
