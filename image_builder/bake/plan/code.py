"""Which files of this program are part of a stage's id: what changes in one, comments apart, makes the stage anew.

A unit test follows the imports of each stage and finds what is missing here.
"""

from __future__ import annotations

from collections.abc import Mapping

# What all programs of a bake are run in.
_ROOT = ("system/environment.py", "system/sandbox.py")
# What apt gets to see of locked packages.
_REPOSITORY = ("bake/lock/repository.py", "bake/formats/deb.py")
# How images are kept. How a registry is asked, and when a pull is given up or tried again, decides no byte.
_ENGINES = tuple(f"bake/pull/{name}.py" for name in ("containerd_engine", "docker_engine", "reference"))
# The files of this program that decide a stage's bytes, by the stage's kind.
CODE: Mapping[str, tuple[str, ...]] = {
    "tools": ("bake/stages/tools/run.py", "bake/lock/mmdebstrap.py", *_REPOSITORY, *_ROOT),
    "base": ("bake/stages/base/run.py", "bake/lock/mmdebstrap.py", *_REPOSITORY, *_ROOT),
    "kubelet_build": ("bake/stages/kubelet_build/run.py", *_ROOT),
    "module_build": ("bake/stages/module_build/run.py", *_REPOSITORY, *_ROOT),
    "layer": (
        "bake/stages/layer/run.py",
        "bake/ansible.py",
        *_REPOSITORY,
        *_ROOT,
        "bake/plugins/connection/sandbox.py",
    ),
    # Of the lab what makes images and serves them, file by file: its control plane has no part in either.
    "lab_images": (
        "bake/stages/lab_images/run.py",
        *(f"lab/{name}.py" for name in ("__init__", "certificate", "images", "large", "pause", "registry")),
        *_ROOT,
    ),
    "control_plane_build": (
        "bake/stages/control_plane_build/run.py",
        "bake/stages/kubelet_build/run.py",
        *_ROOT,
    ),
    "preload": (
        "bake/stages/preload/run.py",
        "node/errors.py",
        "node/layout.py",
        "node/settings.py",
        *_ENGINES,
        *_ROOT,
    ),
    "preload_store": (
        "bake/stages/preload_store/run.py",
        "bake/stages/preload/run.py",
        "bake/identity.py",
        "node/errors.py",
        "node/layout.py",
        "node/mounts.py",
        "node/programs.py",
        "node/seed/__init__.py",
        "node/seed/files.py",
        "node/seed/records.py",
        "node/settings.py",
        "node/store.py",
        "node/trees.py",
        *_ENGINES,
        *_ROOT,
    ),
    "rehearsal": ("bake/stages/rehearsal/run.py", "bake/stages/preload/run.py", "node", *_ENGINES, *_ROOT),
    "seal": (
        "bake/stages/seal/run.py",
        "bake/stages/layer/run.py",
        "bake/ansible.py",
        *_REPOSITORY,
        "bake/identity.py",
        *_ROOT,
        "bake/plugins/connection/sandbox.py",
    ),
    "verify": ("verify/runner.py", "verify/report.py", "bake/identity.py", "json_lines.py", *_ROOT),
    "disk": (
        "bake/stages/disk/run.py",
        "bake/boot_partition.py",
        "bake/firmware_authorities.py",
        "bake/identity.py",
        "bake/formats/gpt.py",
        "bake/formats/pe.py",
        *_ROOT,
        "system/sparse.py",
    ),
    "convert": (
        "bake/stages/convert/run.py",
        "bake/stages/disk/run.py",
        "bake/boot_partition.py",
        "bake/firmware_authorities.py",
        "bake/formats",
        "bake/identity.py",
        *_ROOT,
        "system/sparse.py",
    ),
}
