"""Which files of this program are part of a stage's id: a changed byte in one makes the stage anew.

A unit test follows the imports of each stage and finds what is missing here.
"""

from __future__ import annotations

from collections.abc import Mapping

# The files of this program that decide a stage's bytes, by the stage's kind.
CODE: Mapping[str, tuple[str, ...]] = {
    "tools": ("stages/tools.py", "mmdebstrap.py", "repository.py", "sandbox.py"),
    "base": ("stages/base.py", "mmdebstrap.py", "repository.py", "sandbox.py"),
    "kubelet_build": ("stages/kubelet_build.py", "sandbox.py"),
    "module_build": ("stages/module_build.py", "repository.py", "sandbox.py"),
    "layer": (
        "stages/layer.py",
        "ansible.py",
        "repository.py",
        "sandbox.py",
        "plugins/connection/sandbox.py",
    ),
    # Of the lab what makes images and serves them, file by file: its control plane has no part in either.
    "lab_images": (
        "stages/lab_images.py",
        *(f"lab/{name}.py" for name in ("__init__", "certificate", "images", "large", "pause", "registry")),
        "sandbox.py",
    ),
    "control_plane_build": ("stages/control_plane_build.py", "stages/kubelet_build.py", "sandbox.py"),
    "preload": (
        "stages/preload.py",
        "cgroups.py",
        "node/errors.py",
        "node/layout.py",
        "node/settings.py",
        "pull",
        "sandbox.py",
    ),
    "preload_store": (
        "stages/preload_store.py",
        "stages/preload.py",
        "cgroups.py",
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
        "pull",
        "sandbox.py",
    ),
    "rehearsal": ("stages/rehearsal.py", "stages/preload.py", "cgroups.py", "node", "pull", "sandbox.py"),
    "seal": (
        "stages/seal.py",
        "stages/layer.py",
        "ansible.py",
        "repository.py",
        "identity.py",
        "sandbox.py",
        "plugins/connection/sandbox.py",
    ),
    "verify": ("stages/verify.py", "report", "identity.py", "json_lines.py", "sandbox.py"),
    "disk": (
        "stages/disk.py",
        "boot_partition.py",
        "identity.py",
        "formats/gpt.py",
        "formats/pe.py",
        "sandbox.py",
        "sparse.py",
    ),
    "convert": (
        "stages/convert.py",
        "stages/disk.py",
        "boot_partition.py",
        "formats",
        "identity.py",
        "sandbox.py",
        "sparse.py",
    ),
}
