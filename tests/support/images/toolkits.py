"""NVIDIA's container toolkit as far as it is available: stand-ins for its packages, installed by the project's roles.

NVIDIA's repository is out of reach of the tests. The stand-ins have what the roles rely on: the names, a version,
programs that print it and record how they are called, units that are enabled by their package, and a udev rule that
starts one of them. The runtime delegates to runc. The stand-ins don't do what the real programs do with a GPU, and
nothing claims that they do.
"""

from __future__ import annotations

import pytest

from tests.support.images.builds import Workplace
from tests.support.images.variants import Declaration, StandIn, Variant, apply

VERSION = "1.20.0"
# Where the programs record how they are called; gone at the next boot, like the effects of the real ones.
NOTES = "/run/nvidia-stand-in"
CDI_UNIT = "nvidia-cdi-refresh.service"

# What an inventory declares to get the toolkit.
VARIABLES = f"""
nvidia_container_toolkit_version: "{VERSION}"
nvidia_container_toolkit_repository:
  {{uris: ["https://packages.test/toolkit"], suites: ["/"], signed_by: /usr/share/keyrings/toolkit.gpg}}
container_runtime_docker_options: {{runtimes: {{nvidia: {{path: nvidia-container-runtime}}}}}}
"""
_NOTE = f'echo "${{0##*/}} $*" >> {NOTES}'
_RUNTIME = f"""#!/bin/sh
if [ "$1" = --version ]; then echo "NVIDIA Container Runtime version {VERSION}, a stand-in"; exit; fi
{_NOTE}
exec runc "$@"
"""
_CTK = f"""#!/bin/sh
if [ "$1" = --version ]; then echo "NVIDIA Container Toolkit CLI version {VERSION}, a stand-in"; exit; fi
{_NOTE}
"""
# Worse than any one version of the real unit: it waits for the whole boot, and fails without a GPU.
_UNIT = """[Unit]
Description=A stand-in for the toolkit's own unit
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/usr/bin/nvidia-smi -L
[Install]
WantedBy=multi-user.target
"""
_PATH = """[Unit]
Description=A stand-in for the toolkit's own trigger
[Path]
PathChanged=/lib/modules/%v/modules.dep
[Install]
WantedBy=multi-user.target
"""
_RULE = f"""# A stand-in: whenever the driver's module appears, even for a moment.
SUBSYSTEM=="module", ACTION=="add", KERNEL=="nvidia", TAG+="systemd", ENV{{SYSTEMD_WANTS}}+="{CDI_UNIT}"
"""
_POSTINST = f"""#!/bin/sh
set -e
deb-systemd-helper enable {CDI_UNIT} nvidia-cdi-refresh.path
"""
_BASE = {
    "usr/bin/nvidia-container-runtime": (0o755, _RUNTIME),
    "usr/bin/nvidia-ctk": (0o755, _CTK),
    "usr/lib/systemd/system/nvidia-cdi-refresh.path": (0o644, _PATH),
    f"usr/lib/systemd/system/{CDI_UNIT}": (0o644, _UNIT),
    "usr/lib/udev/rules.d/99-nvidia-cdi-refresh.rules": (0o644, _RULE),
}
_DEB, _REPOSITORY = f"{VERSION}-1", "nvidia-container-toolkit"
DECLARATION = Declaration(
    image="worker_gpu",
    variables=VARIABLES,
    # Both layers that deal with the toolkit, in their order.
    layers=("container_runtime", "gpu"),
    packages=(
        StandIn("libnvidia-container1", _DEB, _REPOSITORY),
        StandIn("libnvidia-container-tools", _DEB, _REPOSITORY),
        StandIn("nvidia-container-toolkit-base", _DEB, _REPOSITORY, _BASE, _POSTINST),
        StandIn("nvidia-container-toolkit", _DEB, _REPOSITORY),
    ),
)


@pytest.fixture(scope="session")
def toolkit(worker_gpu: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Variant:
    """The GPU image with the container toolkit's stand-in."""
    return apply(worker_gpu, DECLARATION, tmp_path_factory.mktemp("toolkit"))
