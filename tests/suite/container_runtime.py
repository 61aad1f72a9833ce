"""Mutations for test_container_runtime.py."""

from __future__ import annotations

from typing import Any

from tests.suite.offline import Mutation, append, change, chmod, chown, given, link, record, remove, write

DAEMON = "/etc/docker/daemon.json"
CONTAINERD = "/etc/containerd/config.toml"
DOCKER_DROPIN = "/etc/systemd/system/docker.service.d/10-container-runtime.conf"
CONTAINERD_DROPIN = "/etc/systemd/system/containerd.service.d/10-container-runtime.conf"


def key(name: str, value: str) -> Mutation:
    """Change the value of a key in daemon.json."""
    return change(DAEMON, rf'("{name}":) (\[[^\]]*\]|"[^"]*"|[^,\n]+)', rf"\1 {value}")


def added(text: str) -> Mutation:
    """Add a key at the end of daemon.json, where it overrides an earlier one of the same name."""
    return change(DAEMON, r"\n\}\s*\Z", f",\n{text}\n}}\n")


def without(name: str) -> Mutation:
    """Remove a key and its value, both on one line, from daemon.json."""
    return change(DAEMON, rf'^ *"{name}": ("[^"]*"|[^,\[{{\n]+),?\n', "")


def _pulling_dropin(variables: dict[str, Any]) -> str:
    """Return the drop-in of the service that pulls images."""
    return DOCKER_DROPIN if variables["__container_runtime_with_docker"] else CONTAINERD_DROPIN


def _without_helper(variables: dict[str, Any]) -> Mutation:
    """Remove the first credential helper's program."""
    helper = next(iter(variables["container_runtime_credential_helpers"].values()))
    return remove(f"/usr/bin/docker-credential-{helper}")


def _other_engine(variables: dict[str, Any]) -> Mutation:
    """Disable the engine's last unit, or enable it where it should be off."""
    unit = variables["__container_runtime_units"][-1]
    wants = f"/etc/systemd/system/multi-user.target.wants/{unit['name']}"
    return remove(wants) if unit["enabled"] else link(wants, f"/usr/lib/systemd/system/{unit['name']}")


record(
    "test_docker_stores_layers_with_overlay2",
    key("storage-driver", '"vfs"'),
    without("storage-driver"),
    added('"features": {"containerd-snapshotter": true}'),
    remove(DAEMON),
)
record("test_docker_root_is_on_the_local_disk", key("data-root", '"/var/lib/docker"'), without("data-root"))
record(
    "test_docker_downloads_in_parallel",
    key("max-concurrent-downloads", "3"),
    without("max-download-attempts"),
)
record("test_docker_containers_outlive_the_daemon", without("live-restore"))
record(
    "test_docker_logs_are_bounded",
    key("log-driver", '"journald"'),
    key("max-size", '"100g"'),
    key("max-file", '"99"'),
)
record("test_docker_leaves_cgroups_to_systemd", key("exec-opts", '["native.cgroupdriver=cgroupfs"]'))
record("test_docker_mirrors", added('"registry-mirrors": ["https://mirror.invalid"]'))
record(
    "test_docker_has_no_other_options",
    added('"hosts": ["tcp://0.0.0.0:2375"]'),
    key("userland-proxy", "true"),
    added('"insecure-registries": ["x"]'),
)
record(
    "test_docker_accepts_its_configuration",
    added('"storage-drivre": "overlay2"'),
    key("max-concurrent-downloads", '"ten"'),
    write(DAEMON, "{"),
)
record(
    "test_docker_is_the_declared_version",
    write("/usr/bin/docker", "#!/bin/sh\necho Docker version 1.13.1, build x\n", 0o755),
)
record(
    "test_docker_listens_on_its_socket_alone",
    append(
        DOCKER_DROPIN, "[Service]\nExecStart=\nExecStart=/usr/sbin/dockerd -H fd:// -H tcp://0.0.0.0:2375\n"
    ),
    append(DOCKER_DROPIN, "[Service]\nExecStart=\nExecStart=/usr/sbin/dockerd -H fd:// -H 0.0.0.0:2375\n"),
    append(DOCKER_DROPIN, "[Service]\nExecStart=\nExecStart=/usr/sbin/dockerd -H fd:// --host=:2375\n"),
    write("/etc/systemd/system/docker.socket.d/99-mutation.conf", "[Socket]\nListenStream=2375\n"),
    change("/etc/group", r"^(docker:[^:]*:[^:]*:).*", r"\1build"),
)
record(
    "test_containerd_is_the_declared_version",
    write("/usr/bin/containerd", "#!/bin/sh\necho containerd x 1.2.3 y\n", 0o755),
)
record(
    "test_containerd_root_is_on_the_local_disk",
    change(CONTAINERD, "^root = .*", 'root = "/var/lib/containerd"'),
    write(CONTAINERD, "version = "),
)
record("test_containerd_serves_docker_alone", change(CONTAINERD, "^disabled_plugins.*", ""))
record(
    "test_containerd_leaves_cgroups_to_systemd",
    change(CONTAINERD, "SystemdCgroup = true", "SystemdCgroup = false"),
)
record("test_containerd_unpacks_with_overlayfs", change(CONTAINERD, '"overlayfs"', '"native"'))
record(
    "test_containerd_protects_the_pause_image",
    change(CONTAINERD, "(sandbox(_image)?) = .*", r'\1 = "registry.invalid/pause:1"'),
)
record(
    "test_containerd_waits_for_slow_pulls",
    change(CONTAINERD, "image_pull_progress_timeout = .*", 'image_pull_progress_timeout = "1m"'),
    change(CONTAINERD, "^.*image_pull_progress_timeout.*\n", ""),
)
record(
    "test_containerd_downloads_in_parallel",
    change(CONTAINERD, "max_concurrent_downloads = .*", "max_concurrent_downloads = 2"),
)
record(
    "test_containerd_reads_registries_from_a_directory",
    change(CONTAINERD, "config_path = .*", 'config_path = ""'),
)
record(
    "test_containerd_mirrors", given(lambda v: remove(f"{v['__container_runtime_certs_dir']}/*/hosts.toml"))
)
record(
    "test_cas_of_registries_are_trusted",
    write("/etc/ssl/certs/ca-certificates.crt", ""),
    change("/etc/ssl/certs/ca-certificates.crt", "MII", "MIJ"),
)
record(
    "test_engines_pull_through_the_proxy",
    given(lambda v: change(_pulling_dropin(v), "^Environment=.*HTTPS_PROXY.*\n", "")),
    given(
        lambda v: append(_pulling_dropin(v), '[Service]\nEnvironment="HTTPS_PROXY=http://other.invalid:1"\n')
    ),
)
record(
    "test_credential_helpers",
    change("/root/.docker/config.json", '"credHelpers"', '"credHelper"'),
    given(_without_helper),
)
record(
    "test_cri_dockerd",
    change(
        "/etc/systemd/system/cri-docker.service",
        r"--image-pull-progress-deadline=\S+",
        "--image-pull-progress-deadline=1m",
    ),
    change(
        "/etc/systemd/system/cri-docker.service",
        r"--streaming-bind-addr=\S+",
        "--streaming-bind-addr=0.0.0.0:0",
    ),
)
record(
    "test_runtime_units_are_enabled",
    remove("/etc/systemd/system/multi-user.target.wants/containerd.service"),
    given(_other_engine),
)
record(
    "test_runtime_limits",
    change(CONTAINERD_DROPIN, "^LimitMEMLOCK=.*", "LimitMEMLOCK=64K"),
    remove(CONTAINERD_DROPIN),
)
record(
    "test_crictl_asks_the_engine_in_use",
    change("/etc/crictl.yaml", "^runtime-endpoint: .*", "runtime-endpoint: unix:///run/other.sock"),
)
record("test_runtime_configuration_belongs_to_root", chmod(CONTAINERD, 0o664), chown(CONTAINERD, 1, 0))
record("test_runc_runs", chmod("/usr/sbin/runc", 0o644), write("/usr/sbin/runc", "\x7fELF", 0o755))
