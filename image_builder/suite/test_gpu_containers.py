"""GPUs in containers: NVIDIA's toolkit in one version, known to each engine; a machine's GPUs described at boot."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from questions import merged, packages
from suite import (
    assignments,
    booted,
    differences,
    gpus,
    load,
    named,
    needs,
    nothing,
    offline,
    output,
    read,
    starts_again,
    starts_at_boot,
    statements,
)
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]
UNIT = "nvidia-cdi-refresh.service"
TRIGGER = "nvidia-cdi-refresh.path"
RULES = "/etc/udev/rules.d/71-nvidia.rules"
RUNTIME = "/usr/bin/nvidia-container-runtime"
# Units that start containers, or report GPUs to a scheduler.
BEHIND_IT = ("docker.service", "containerd.service", "kubelet.service")

with_toolkit = needs("gpu", nvidia_container_toolkit_version=bool)
with_docker = needs(
    "gpu", nvidia_container_toolkit_version=bool, nvidia_container_engines=lambda names: "docker" in names
)
with_containerd = needs(
    "gpu", nvidia_container_toolkit_version=bool, nvidia_container_engines=lambda names: "containerd" in names
)


@offline
@booted
@with_toolkit
def test_gpu_toolkit_is_of_one_version(host: Host, v: V) -> None:
    """The toolkit's packages are the declared version and held, and the runtime reports the same version."""
    installed, version = packages(host), v["nvidia_container_toolkit_version"]
    for name in v["__nvidia_toolkit_names"]:
        assert name in installed, f"{name} is not there"
        package = installed[name]
        assert package.version.partition("-")[0] == version, f"{name} is {package.version}"
        assert package.state == "hi", f"{name} is not held, or not whole: {package.state}"
    printed = output(host, "nvidia-container-runtime --version")
    assert version in printed.split() or f"{version}," in printed.split(), printed


@offline
@booted
@with_toolkit
def test_gpu_runtime_takes_gpus_from_cdi(host: Host) -> None:
    """The runtime gives a container what CDI describes, and leaves device permissions to its cgroup."""
    actual = tomllib.loads(read(host, "/etc/nvidia-container-runtime/config.toml"))
    assert actual.get("nvidia-container-runtime", {}).get("mode") == "cdi", f"{actual}"
    assert actual.get("nvidia-container-cli", {}).get("no-cgroups") is False, f"{actual}"


@offline
@booted
@with_docker
def test_gpu_docker_knows_the_runtime(host: Host) -> None:
    """Docker knows the runtime by its name, and doesn't use it by default."""
    daemon = load(host, "/etc/docker/daemon.json")
    assert daemon.get("runtimes") == {"nvidia": {"path": "nvidia-container-runtime"}}, f"{daemon}"
    assert daemon.get("default-runtime", "runc") == "runc"


@offline
@booted
@with_containerd
def test_gpu_containerd_knows_the_runtime(host: Host, v: V) -> None:
    """containerd reports the runtime next to its default runc, with systemd's cgroups, and CDI where supported."""
    dump = tomllib.loads(output(host, "containerd config dump"))
    plugin = dump["plugins"].get(v["__nvidia_containerd_plugin"].strip(), {})
    containerd = plugin.get("containerd", {})
    runtime = containerd.get("runtimes", {}).get("nvidia", {})
    nothing(differences({"runtime_type": "io.containerd.runc.v2"}, runtime))
    nothing(differences({"BinaryName": RUNTIME, "SystemdCgroup": True}, runtime.get("options", {})))
    assert containerd.get("default_runtime_name") == "runc", f"{containerd.get('default_runtime_name')}"
    assert plugin.get("enable_cdi", False) == v["__nvidia_containerd_cdi"], (
        "CDI is not as this version has it"
    )


@offline
@booted
@with_toolkit
def test_gpu_cdi_is_made_at_boot(host: Host, tree: Tree, v: V) -> None:
    """The GPUs are described at boot, below /run, before any container starts, and only if there is a GPU."""
    lines = statements(merged(host, f"systemd/system/{UNIT}"))
    cdi_file = v["__nvidia_cdi_file"]
    assert cdi_file.startswith("/run/"), cdi_file
    starts = [line for line in lines if line.startswith("ExecStart=")]
    assert len(starts) == 1 and f"--output={cdi_file}" in starts[0].split(), f"{starts}"
    assert any(line.startswith("ExecCondition=") and "0x10de" in line for line in lines), "on any machine"
    before, after = named(lines, "Before"), named(lines, "After")
    nothing(f"{name} does not wait for it" for name in BEHIND_IT if name not in before)
    # It must not wait for a unit that waits for the kubelet: neither would ever start.
    assert "multi-user.target" not in after, f"{after}"
    assert any(line.startswith("TimeoutStartSec=") for line in lines), "it could wait for ever"
    starts_again(UNIT, lines)
    assert not starts_at_boot(tree, UNIT), "nothing waits for a GPU"
    trigger = tree.get(f"/etc/systemd/system/{TRIGGER}")
    assert trigger and trigger.link == "/dev/null", "an upgrade of the toolkit would start it"


@offline
@booted
@with_toolkit
def test_gpu_devices_will_have_links(host: Host, tree: Tree) -> None:
    """When the driver appears, udev creates the links in /dev/char that systemd's cgroups rely on."""
    lines = [line for line in statements(read(host, RULES)) if "create-dev-char-symlinks" in line]
    assert len(lines) == 1 and 'DEVPATH=="/bus/pci/drivers/nvidia"' in lines[0], f"{lines}"
    program = lines[0].partition('RUN+="')[2].split()[0]
    assert program in tree and tree[program].mode & 0o111, f"{program} can't be run"


@booted
@with_toolkit
def test_gpu_devices_have_links(host: Host) -> None:
    """Each of the driver's devices can also be found by its number."""
    devices = output(host, "find /dev -maxdepth 1 -name 'nvidia*' -type c").splitlines()
    assert gpus(host) == 0 or devices, "there are GPUs, and no devices"
    for device in devices:
        major, minor = (int(part, 16) for part in output(host, "stat --format='%%t %%T' %s", device).split())
        link = f"/dev/char/{major}:{minor}"
        assert output(host, "readlink --canonicalize %s", link) == device, f"{link} is not {device}"


@booted
@with_toolkit
def test_gpu_cdi_describes_what_is_there(host: Host, v: V) -> None:
    """The description exists if there is a GPU; without one, its unit is skipped and doesn't fail."""
    is_there = host.run("test -s %s", v["__nvidia_cdi_file"]).rc == 0
    assert is_there == bool(gpus(host)), f"{gpus(host)} GPUs, description: {is_there}"
    if not gpus(host):
        host.run("systemctl start %s", UNIT)
    state = assignments(output(host, "systemctl show --property=ActiveState,LoadState %s", UNIT))
    expected = {"LoadState": "loaded", "ActiveState": "active" if is_there else "inactive"}
    nothing(differences(expected, state))
    trigger = output(host, "systemctl show --property=ActiveState --value %s", TRIGGER)
    assert trigger == "inactive", f"{TRIGGER} is {trigger}"


@booted
@needs("container_runtime", "gpu", nvidia_container_toolkit_version=bool, container_runtime_engine="docker")
def test_gpu_docker_runs_with_the_runtime(host: Host) -> None:
    """The running Docker daemon lists the runtime, and uses runc by default."""
    info = json.loads(output(host, "docker info --format %s", "{{json .}}"))
    assert "nvidia" in info["Runtimes"], f"{sorted(info['Runtimes'])}"
    assert info["DefaultRuntime"] == "runc", info["DefaultRuntime"]
