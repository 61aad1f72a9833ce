"""Which files of this program are part of a stage's id: what changes in one, comments apart, makes the stage anew.

A unit test follows the imports of each stage and finds what is missing here.
"""

from __future__ import annotations

from collections.abc import Mapping

# What all programs of a bake are run in.
_ROOT = ("environment.py", "sandbox.py")
# What apt gets to see of locked packages.
_REPOSITORY = ("repository.py", "formats/deb.py")
# How images are kept. How a registry is asked, and when a pull is given up or tried again, decides no byte.
_ENGINES = tuple(f"pull/{name}.py" for name in ("containerd_engine", "docker_engine", "reference"))
# The files of this program that decide a stage's bytes, by the stage's kind.
CODE: Mapping[str, tuple[str, ...]] = {
    "tools": ("stages/tools.py", "mmdebstrap.py", *_REPOSITORY, *_ROOT),
    "base": ("stages/base.py", "mmdebstrap.py", *_REPOSITORY, *_ROOT),
    "kubelet_build": ("stages/kubelet_build.py", *_ROOT),
    "module_build": ("stages/module_build.py", *_REPOSITORY, *_ROOT),
    "layer": (
        "stages/layer.py",
        "ansible.py",
        *_REPOSITORY,
        *_ROOT,
        "plugins/connection/sandbox.py",
    ),
    # Of the lab what makes images and serves them, file by file: its control plane has no part in either.
    "lab_images": (
        "stages/lab_images.py",
        *(f"lab/{name}.py" for name in ("__init__", "certificate", "images", "large", "pause", "registry")),
        *_ROOT,
    ),
    "control_plane_build": ("stages/control_plane_build.py", "stages/kubelet_build.py", *_ROOT),
    "preload": (
        "stages/preload.py",
        "node/errors.py",
        "node/layout.py",
        "node/settings.py",
        *_ENGINES,
        *_ROOT,
    ),
    "preload_store": (
        "stages/preload_store.py",
        "stages/preload.py",
        "identity.py",
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
    "rehearsal": ("stages/rehearsal.py", "stages/preload.py", "node", *_ENGINES, *_ROOT),
    "seal": (
        "stages/seal.py",
        "stages/layer.py",
        "ansible.py",
        *_REPOSITORY,
        "identity.py",
        *_ROOT,
        "plugins/connection/sandbox.py",
    ),
    "verify": ("stages/verify.py", "report", "identity.py", "json_lines.py", *_ROOT),
    "disk": (
        "stages/disk.py",
        "boot_partition.py",
        "firmware_authorities.py",
        "identity.py",
        "formats/gpt.py",
        "formats/pe.py",
        *_ROOT,
        "sparse.py",
    ),
    "convert": (
        "stages/convert.py",
        "stages/disk.py",
        "boot_partition.py",
        "firmware_authorities.py",
        "formats",
        "identity.py",
        *_ROOT,
        "sparse.py",
    ),
}
