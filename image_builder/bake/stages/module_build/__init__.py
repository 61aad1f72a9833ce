"""The plan of a driver's kernel modules, which are built for the locked kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from image_builder.bake.lock.requirements import Group, Requirements
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages.kind import FIXED_EPOCH, MIB, Draft, Need, Sizes, StageKind
from image_builder.bake.stages.layer import repositories
from image_builder.bake.stages.root import root
from image_builder.definition import ImageDefinition, resolved_variables
from image_builder.errors import LockError

# The layer that installs the GPU driver; the package groups of its modules' build root and of their source.
GPU_LAYER = "gpu"
MODULE_ROOT = "module_root"
MODULE_BUILD = "module_build"
# The packages of the build root besides the kernel's headers, which pull in the compiler that built the kernel.
_PACKAGES = ("dkms", "kmod", "make", "xz-utils")
_KERNEL_IMAGE = re.compile(r"linux-image-(\d+\..+)")
# The space for a driver's source, unpacked twice, with its objects; and for the modules.
_OBJECTS, _MODULES = 700 * MIB, 50 * MIB


@dataclass(frozen=True)
class ModuleBuild:
    """Modules to build: the ``package`` with their DKMS source and that with the kernel's ``headers``, as apt takes
    them; ``driver`` is the exact version, ``flavour`` is open or proprietary, and ``certificate`` (PEM) is that of the
    signing key, or empty.
    """

    package: str
    headers: str
    driver: str
    flavour: str
    certificate: str


@dataclass(frozen=True)
class _Kernel:
    """A kernel: its name (``6.1.0-50-cloud-amd64``) and its package's version (``6.1.176-1``)."""

    name: str
    version: str


def modules_from_source(definition: ImageDefinition) -> ModuleBuild | None:
    """Return the driver's modules to build for an image, or None."""
    if GPU_LAYER not in definition.layers:
        return None
    build = resolved_variables(definition).get("__nvidia_build")
    if not isinstance(build, Mapping) or not build:
        return None
    names = ("package", "headers", "driver", "flavour", "certificate")
    return ModuleBuild(**{name: str(build[name]) for name in names})


def _needs(definition: ImageDefinition) -> Requirements:
    build = modules_from_source(definition)
    if not build:
        return Requirements()
    # Use the same indices as the image, or the headers may be another kernel's.
    suite, components = definition.base.suite, tuple(definition.base.components)
    origins = repositories(definition)
    return Requirements(
        {
            MODULE_ROOT: Group(suite, (*_PACKAGES, build.headers), components, None, origins),
            MODULE_BUILD: Group(suite, (build.package,), components, MODULE_ROOT, origins, alone=True),
        }
    )


def _plan(draft: Draft) -> Iterator[StagePlan]:
    """Yield the root with the kernel's headers, and the build of a driver's modules in it.

    Raises LockError when the locked headers are not those of the locked kernel.
    """
    build = modules_from_source(draft.definition)
    if not build:
        return
    kernel = _kernel(draft)
    headers = f"linux-headers-{kernel.name}"
    versions = {p.name: p.version for p in draft.lock.group(MODULE_ROOT).packages}
    if versions.get(headers) != kernel.version:
        raise LockError(
            f"the lock of {draft.definition.name} has the kernel {kernel.name} {kernel.version}, "
            f"and its headers are {versions.get(headers, 'missing')}",
            hint="make a new one: image-builder lock",
        )
    module_root = root(draft, MODULE_ROOT, (*_PACKAGES, headers))
    yield module_root
    yield StagePlan(
        MODULE_BUILD,
        KIND.name,
        {
            "kernel": kernel.name,
            "driver": build.driver,
            "flavour": build.flavour,
            "certificate": build.certificate,
            "packages": draft.lock.group(MODULE_BUILD).digest,
            "source_date_epoch": FIXED_EPOCH,
        },
        draft.code(KIND),
        inputs={MODULE_ROOT: module_root.id},
    )


def _kernel(draft: Draft) -> _Kernel:
    """Return the image's kernel; raises LockError unless exactly one is locked."""
    packages = [p for name in draft.definition.layers for p in draft.lock.group(name).packages]
    kernels = [_Kernel(m[1], p.version) for p in packages if (m := _KERNEL_IMAGE.fullmatch(p.name))]
    if len(kernels) != 1:
        names = ", ".join(k.name for k in kernels) or "none"
        raise LockError(f"modules are built for one kernel, {draft.definition.name} has {names}")
    return kernels[0]


def _space(_stage: StagePlan, _sizes: Sizes) -> Need:
    return Need(_MODULES, _OBJECTS)


KIND = StageKind(
    MODULE_BUILD,
    "image_builder.bake.stages.module_build.run",
    _plan,
    needs=_needs,
    space=_space,
    beside=True,
    layer=GPU_LAYER,
)
