"""Mutations for test_gpu_containers.py."""

from __future__ import annotations

from tests.suite.booted import awaited, record_booted
from tests.suite.offline import append, change, chmod, link, record, remove, write

STATUS = "/var/lib/dpkg/status"
RUNTIME = "/usr/bin/nvidia-container-runtime"
CONFIG = "/etc/nvidia-container-runtime/config.toml"
DAEMON = "/etc/docker/daemon.json"
CONTAINERD = "/etc/containerd/conf.d/99-nvidia.toml"
UNITS = "/etc/systemd/system"
UNIT = f"{UNITS}/nvidia-cdi-refresh.service"
TRIGGER = f"{UNITS}/nvidia-cdi-refresh.path"
RULES = "/etc/udev/rules.d/71-nvidia.rules"

record(
    "test_gpu_toolkit_is_of_one_version",
    change(STATUS, r"(Package: libnvidia-container1\n(?:.+\n)*?Version:) .*", r"\1 1.19.0-1"),
    change(STATUS, r"(Package: nvidia-container-toolkit-base\nStatus:) hold", r"\1 install"),
    write(RUNTIME, "#!/bin/sh\necho NVIDIA Container Runtime version 1.19.0\n", 0o755),
)
record(
    "test_gpu_runtime_takes_gpus_from_cdi",
    remove(CONFIG),
    change(CONFIG, 'mode = "cdi"', 'mode = "legacy"'),
    change(CONFIG, "no-cgroups = false", "no-cgroups = true"),
)
record(
    "test_gpu_docker_knows_the_runtime",
    change(DAEMON, '"runtimes"', '"runtime"'),
    change(DAEMON, '"path": "nvidia-container-runtime"', '"path": "runc"'),
    change(DAEMON, r"\n\}\s*\Z", ',\n"default-runtime": "nvidia"\n}\n'),
)
record(
    "test_gpu_containerd_knows_the_runtime",
    remove(CONTAINERD),
    change("/etc/containerd/config.toml", "^imports = .*", ""),
    change(CONTAINERD, "BinaryName = .*", 'BinaryName = "/usr/bin/runc"'),
    change(CONTAINERD, 'default_runtime_name = "runc"', 'default_runtime_name = "nvidia"'),
)
record(
    "test_gpu_cdi_is_made_at_boot",
    remove(UNIT),
    change(UNIT, "--output=/run/", "--output=/etc/"),
    change(UNIT, "^ExecCondition=.*\n", ""),
    change(UNIT, " kubelet.service", ""),
    change(UNIT, "^After=", "After=multi-user.target "),
    change(UNIT, "^TimeoutStartSec=.*\n", ""),
    change(UNIT, "^Restart=.*\n", ""),
    remove(TRIGGER),
    link(f"{UNITS}/multi-user.target.wants/nvidia-cdi-refresh.service", UNIT),
)
record(
    "test_gpu_devices_will_have_links",
    change(RULES, "create-dev-char-symlinks", "print"),
    append(RULES, 'RUN+="/usr/bin/nvidia-ctk system create-dev-char-symlinks"\n'),
    chmod("/usr/bin/nvidia-ctk", 0o644),
)

# None of these survives a reboot: after the next boot the toolkit is as it was.
record_booted("test_gpu_devices_have_links", "mknod /dev/nvidia7 c 195 7")
record_booted(
    "test_gpu_cdi_describes_what_is_there",
    "mkdir -p /run/systemd/system/nvidia-cdi-refresh.service.d && "
    "printf '[Service]\\nExecCondition=\\n' > /run/systemd/system/nvidia-cdi-refresh.service.d/99.conf && "
    "systemctl daemon-reload",
)
record_booted(
    "test_gpu_docker_runs_with_the_runtime",
    'python3 -c \'import json; c = json.load(open("/etc/docker/daemon.json")); c["runtimes"] = {"x": {"path": "runc"}}; '
    'json.dump(c, open("/run/daemon.json", "w"))\' && mount --bind /run/daemon.json /etc/docker/daemon.json '
    "&& systemctl reload docker.service; " + awaited("docker info | grep -Eq 'Runtimes:.* x( |$)'"),
)
