"""Docker, and what both engines share: versions, configuration and enabled units are as declared."""

from __future__ import annotations

import json
import re
from typing import Any

from questions import merged
from suite import (
    assignments,
    booted,
    differences,
    load,
    needs,
    nothing,
    offline,
    output,
    read,
    release,
    starts_at_boot,
)
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]
DAEMON = "/etc/docker/daemon.json"

with_layer = needs("container_runtime")
with_docker = needs("container_runtime", __container_runtime_with_docker=True)


def _daemon(host: Host) -> dict[str, Any]:
    """Return Docker's configuration file."""
    content = load(host, DAEMON)
    assert isinstance(content, dict), f"{DAEMON} holds {content!r:.80}"
    return content


@offline
@booted
@with_docker
def test_docker_stores_layers_with_overlay2(host: Host, v: V) -> None:
    """Docker's storage driver is explicitly overlay2, and containerd's store, which would take precedence, is off."""
    daemon = _daemon(host)
    nothing(differences({"storage-driver": "overlay2"}, daemon))
    by_default = "containerd_store" in v["__container_runtime_docker_features"]
    is_on = daemon.get("features", {}).get("containerd-snapshotter", by_default)
    assert is_on is False, "containerd's image store is on: preloaded images would not be found"


@offline
@booted
@with_docker
def test_docker_root_is_on_the_local_disk(host: Host, v: V) -> None:
    """Docker stores images and containers in the declared data root."""
    daemon = _daemon(host)
    nothing(differences({"data-root": v["container_runtime_data_root"]}, daemon))


@offline
@booted
@with_docker
def test_docker_downloads_in_parallel(host: Host, v: V) -> None:
    """Docker downloads as many layers at once, and makes as many attempts, as declared."""
    daemon = _daemon(host)
    expected = {
        "max-concurrent-downloads": v["container_runtime_max_concurrent_downloads"],
        "max-download-attempts": v["container_runtime_max_download_attempts"],
    }
    nothing(differences(expected, daemon))


@offline
@booted
@with_docker
def test_docker_containers_outlive_the_daemon(host: Host, v: V) -> None:
    """Docker's live restore is as declared."""
    daemon = _daemon(host)
    nothing(differences({"live-restore": v["container_runtime_live_restore"]}, daemon))


@offline
@booted
@with_docker
def test_docker_logs_are_bounded(host: Host, v: V) -> None:
    """Container logs are in the format that the kubelet expects, and can't fill the disk."""
    daemon = _daemon(host)
    nothing(differences({"log-driver": "json-file"}, daemon))
    expected = {
        "max-size": v["container_runtime_log_max_size"],
        "max-file": str(v["container_runtime_log_max_files"]),
    }
    nothing(differences(expected, daemon.get("log-opts", {})))


@offline
@booted
@with_docker
def test_docker_leaves_cgroups_to_systemd(host: Host) -> None:
    """Docker manages cgroups with the same driver as the kubelet, systemd's."""
    daemon = _daemon(host)
    nothing(differences({"exec-opts": ["native.cgroupdriver=systemd"]}, daemon))


@offline
@booted
@with_docker
def test_docker_mirrors(host: Host, v: V) -> None:
    """Docker uses the declared mirrors of docker.io, and no others."""
    daemon = _daemon(host)
    expected = [mirror["url"] for mirror in v["container_runtime_registry_mirrors"].get("docker.io", [])]
    assert daemon.get("registry-mirrors", []) == expected


@offline
@booted
@with_docker
def test_docker_has_no_other_options(host: Host, v: V) -> None:
    """Every other key of daemon.json is declared, so none opens the daemon to the network unnoticed."""
    daemon = _daemon(host)
    features = v["__container_runtime_features"]
    expected = {"userland-proxy": False, **v["container_runtime_docker_options"]}
    expected |= {"features": features} if features else {}
    nothing(differences(expected, daemon))
    nothing(
        f"undeclared key {key}"
        for key in set(daemon) - set(v["__container_runtime_daemon_keys"]) - set(expected)
    )
    assert daemon.get("no-new-privileges", False) == v["container_runtime_docker_no_new_privileges"]


@offline
@booted
@needs(
    "container_runtime",
    __container_runtime_with_docker=True,
    __container_runtime_docker_features=lambda f: "validate" in f,
)
def test_docker_accepts_its_configuration(host: Host) -> None:
    """dockerd itself accepts daemon.json as valid."""
    output(host, "dockerd --validate --config-file=%s", DAEMON)


@offline
@booted
@with_docker
def test_docker_is_the_declared_version(host: Host, v: V) -> None:
    """The Docker daemon and client are the version that the configuration was written for."""
    for program in ("dockerd", "docker"):
        actual = release(output(host, f"{program} --version").split()[2])
        assert f"{actual}.".startswith(f"{v['container_runtime_docker_version']}."), f"{program} is {actual}"


@offline
@booted
@with_docker
def test_docker_listens_on_its_socket_alone(host: Host) -> None:
    """Docker gives nobody root's rights over TCP or through membership in the group docker."""
    unit = merged(host, "systemd/system/docker.service")
    starts = [line for line in unit.splitlines() if line.startswith("ExecStart=/")]
    assert len(starts) == 1, f"{starts}"
    sockets = re.findall(r"^Listen\w+=(.*)", merged(host, "systemd/system/docker.socket"), re.MULTILINE)
    # Both the daemon and systemd treat an address without a scheme as TCP.
    addresses = re.findall(r"(?:\s-H|\s--host)[= ]?(\S+)", starts[0])
    nothing(a for a in addresses if not a.startswith(("fd://", "unix://")))
    nothing(s for s in sockets if not s.startswith("/"))
    assert addresses and sockets, "the daemon has no socket"
    members = output(host, "getent group docker").split(":")[3]
    assert members == "", f"in group docker: {members}"


@offline
@booted
@needs("container_runtime", container_runtime_ca_certificates=bool)
def test_cas_of_registries_are_trusted(host: Host, v: V) -> None:
    """The trust store that the engines read has every declared CA."""
    trusted = read(host, "/etc/ssl/certs/ca-certificates.crt")
    nothing(
        name for name, pem in v["container_runtime_ca_certificates"].items() if pem.strip() not in trusted
    )


@offline
@booted
@needs("container_runtime", container_runtime_proxy=bool)
def test_engines_pull_through_the_proxy(host: Host, v: V) -> None:
    """Every service that pulls images has the declared proxy in its environment."""
    pulls = {"docker": "__container_runtime_with_docker", "containerd": "__container_runtime_with_cri"}
    for unit in (unit for unit, flag in pulls.items() if v[flag]):
        text = merged(host, f"systemd/system/{unit}.service")
        actual = dict(re.findall(r'^Environment="(\w+_PROXY)=([^"]*)"', text, re.MULTILINE))
        expected = {
            name: str(value).replace("%", "%%")
            for name, value in v["__container_runtime_environment"].items()
        }
        assert actual == expected, unit


@offline
@booted
@needs("container_runtime", container_runtime_credential_helpers=bool)
def test_credential_helpers(host: Host, v: V) -> None:
    """The docker client knows the declared credential helpers, and they are installed."""
    helpers = v["container_runtime_credential_helpers"]
    assert load(host, "/root/.docker/config.json") == {"credHelpers": helpers}
    for helper in set(helpers.values()):
        output(host, "command -v %s", f"docker-credential-{helper}")


@offline
@booted
@needs("container_runtime", __container_runtime_with_cri_dockerd=True)
def test_cri_dockerd(host: Host, v: V) -> None:
    """cri-dockerd is the declared version, has the pull deadline and pause image, and serves exec to this host only."""
    unit = merged(host, "systemd/system/cri-docker.service")
    program = f"{v['__container_runtime_cri_dockerd_dir']}/cri-dockerd"
    assert v["container_runtime_cri_dockerd"]["version"] in output(host, "%s --version 2>&1", program)
    for flag, name in (
        ("--image-pull-progress-deadline", "container_runtime_image_pull_progress_deadline"),
        ("--pod-infra-container-image", "container_runtime_pause_image"),
    ):
        assert f"{flag}={v[name]}" in unit.split(), f"{flag} is not {v[name]}"
    # Without the flag, a port of its streaming server is open to the network.
    assert "--streaming-bind-addr=127.0.0.1:0" in unit.split(), "the streaming server listens to the network"


@offline
@booted
@with_layer
def test_runtime_units_are_enabled(tree: Tree, v: V) -> None:
    """The engine in use starts at boot, and the other one doesn't."""
    states = {
        unit["name"]: (starts_at_boot(tree, unit["name"]), unit["enabled"])
        for unit in v["__container_runtime_units"]
    }
    nothing(
        f"{name} {'starts' if actual else 'does not start'}"
        for name, (actual, expected) in states.items()
        if actual != expected
    )


@offline
@booted
@with_layer
def test_runtime_limits(host: Host, v: V) -> None:
    """Containers inherit the declared limits on open files and locked memory."""
    for unit in ["containerd", *(["docker"] if v["__container_runtime_with_docker"] else [])]:
        actual = assignments(merged(host, f"systemd/system/{unit}.service"))
        expected = {
            "LimitNOFILE": str(v["container_runtime_limit_nofile"]),
            "LimitMEMLOCK": str(v["container_runtime_limit_memlock"]),
            "TasksMax": "infinity",
        }
        nothing(f"{unit}: {difference}" for difference in differences(expected, actual))


@offline
@booted
@with_layer
def test_crictl_asks_the_engine_in_use(host: Host, v: V) -> None:
    """crictl's endpoint is the one that the kubelet uses."""
    actual = load(host, "/etc/crictl.yaml")
    endpoint = v["__container_runtime_endpoint"].strip()
    nothing(differences({"runtime-endpoint": endpoint, "image-endpoint": endpoint}, actual))


@offline
@booted
@with_layer
def test_runtime_configuration_belongs_to_root(tree: Tree) -> None:
    """Only root can change the engines' configuration."""
    files = [e for e in tree.under("/etc/docker", "/etc/containerd") if e.kind == "f"]
    assert files, "the engines have no configuration"
    nothing(f"{e.path} {e.uid}:{e.gid} {e.mode:o}" for e in files if e.uid or e.gid or e.mode & 0o022)


@offline
@booted
@with_layer
def test_runc_runs(host: Host) -> None:
    """The low-level runtime, runc, is installed and runs."""
    assert output(host, "runc --version").startswith("runc version")


@booted
@needs("container_runtime", container_runtime_engine="docker")
def test_docker_runs_with_overlay2(host: Host, v: V) -> None:
    """The running daemon uses overlay2 on the declared root, systemd's cgroups, and cgroup v2."""
    info = json.loads(output(host, "docker info --format %s", "{{json .}}"))
    expected = {
        "Driver": "overlay2",
        "DockerRootDir": v["container_runtime_data_root"],
        "CgroupDriver": "systemd",
        "CgroupVersion": "2",
        "LiveRestoreEnabled": v["container_runtime_live_restore"],
    }
    nothing(differences(expected, info))
    assert ["Supports d_type", "true"] in info["DriverStatus"], f"{info['DriverStatus']}"


@booted
@with_layer
def test_containerd_answers(host: Host, v: V) -> None:
    """containerd answers on its socket, and no plugin that is wanted failed to load."""
    output(host, "ctr version")
    # A snapshotter that isn't configured: 1.6 reports that as an error, later versions skip it.
    unwanted = {"devmapper"} if v["__container_runtime_containerd_series"].strip() == "1.6" else set()
    lines = [line.split() for line in output(host, "ctr plugins ls").splitlines()]
    nothing(fields[1] for fields in lines if fields[-1] == "error" and fields[1] not in unwanted)


@booted
@with_layer
def test_runtime_units_run(host: Host, v: V) -> None:
    """Every enabled unit of the engine is active and has not been restarted."""
    for unit in (u["name"] for u in v["__container_runtime_units"] if u["enabled"]):
        actual = assignments(output(host, "systemctl show -p ActiveState,NRestarts %s", unit))
        assert actual["ActiveState"] == "active" and actual.get("NRestarts", "0") == "0", f"{unit}: {actual}"


@booted
@with_layer
def test_runtime_processes_have_the_limits(host: Host, v: V) -> None:
    """The containerd process has the declared limits."""
    process = output(host, "systemctl show -p MainPID --value containerd.service")
    limits = read(host, f"/proc/{process}/limits")
    rows = {line[:26].strip(): line[26:].split()[0] for line in limits.splitlines()[1:]}
    memlock = str(v["container_runtime_limit_memlock"]).replace("infinity", "unlimited")
    expected = {"Max open files": str(v["container_runtime_limit_nofile"]), "Max locked memory": memlock}
    nothing(differences(expected, rows))
