"""Resolve a definition and its lock to a plan. The order of the stages stands here, once.

    tools ─┬─────────> base ─> (a stage for each entry of image_layers) ─> seal ─> verify ─> disk ─> convert
           ├─> build_root ─> kubelet_build ──────────^                      ^
           ├─> module_root ─> module_build ──────────^ (the layer gpu)      |
           └─> lab_images ··> preload ─> preload_store ─> rehearsal ┘
                              (in the tree of container_runtime)

No network, no clock, no root: only the definition, the lock and the files of this program are read.
"""

from __future__ import annotations

import importlib.metadata
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from image_builder.bake.lock.model import Lock
from image_builder.bake.plan.code import CODE
from image_builder.bake.plan.model import Plan, StagePlan
from image_builder.bake.requirements import (
    CONTROL_PLANE,
    CONTROL_PLANE_PACKAGES,
    GPU_LAYER,
    LAB_IMAGES,
    MODULE_BUILD,
    MODULE_ROOT,
    ModuleBuild,
    kubelet_from_source,
    modules_from_source,
    uses_lab,
)
from image_builder.bake.stages.base import run as base
from image_builder.bake.stages.control_plane_build import run as control_plane_build
from image_builder.bake.stages.kubelet_build import run as kubelet_build
from image_builder.bake.stages.module_build import run as module_build
from image_builder.bake.stages.seal import run as seal
from image_builder.bake.stages.tools import run as tools
from image_builder.canonical import JSON, digest
from image_builder.definition import (
    ImageDefinition,
    PlaybookReading,
    layer_needs,
    layer_reading,
    published_variables,
    resolved_variables,
    seal_reading,
)
from image_builder.errors import LockError
from image_builder.system.digests import code_digests, named_digests

# Trees that aren't part of an image get a fixed date, so that they are shared by images and locks.
_FIXED_EPOCH = 1735689600  # 2025-01-01T00:00:00Z
_PACKAGE = "image_builder"
# The layer that installs the container engine, and the snapshotters that are baked for.
ENGINE_LAYER = "container_runtime"
# What decides bytes when Ansible evaluates and templates, beside its own version.
_EVALUATORS = ("ansible-core", "jinja2", "pyyaml")
# The layer that installs what a stage beside the layers has built.
_LAYER_OF = {"kubelet_build": "kubernetes", MODULE_BUILD: GPU_LAYER}
_KERNEL_IMAGE = re.compile(r"linux-image-(\d+\..+)")
_SNAPSHOTTERS = {"docker": "overlay2", "containerd": "overlayfs"}


def resolve(definition: ImageDefinition, lock: Lock, repo_root: Path) -> Plan:
    """Return the plan of an image. Raises LockError when the lock lacks a stage of the definition."""
    maker = _Maker(definition, lock, repo_root)
    stages = [maker.tools()]
    if kubelet_from_source(definition):
        stages += maker.kubelet(stages[0])
    if modules := modules_from_source(definition):
        stages += maker.modules(stages[0], modules)
    if uses_lab(definition):
        stages.append(maker.lab_images(stages[0]))
    trees = [maker.base(stages[0])]
    made = {s.name: s.id for s in stages if s.kind in _LAYER_OF}
    preload: list[StagePlan] = []
    for layer in definition.layers:
        inputs = {name: stage_id for name, stage_id in made.items() if _LAYER_OF[name] == layer}
        trees.append(maker.layer(layer, trees, inputs))
        if layer == ENGINE_LAYER and definition.preload and maker.preloaded():
            needs = [s.id for s in stages if s.kind == "lab_images"]
            preload = maker.preload_branch(trees, needs, stages[0])
    # The preload's stages come where they can begin; their trees are below the seal's, and no layer's.
    below, trees = trees, [*trees, *(s for s in preload if s.kind != "preload" or s.options["save"])]
    trees.append(maker.seal(trees))
    verify = maker.verify(trees)
    disk = maker.disk(trees, stages[0])
    convert = maker.convert(trees, disk, stages[0])
    at = next((n for n, s in enumerate(below, 1) if s.name == ENGINE_LAYER), len(below))
    ordered = (*below[:at], *preload, *below[at:], trees[-1])
    return Plan(definition.name, (*stages, *ordered, verify, disk, convert), tuple(maker.warnings))


def lab_plan(definition: ImageDefinition, lock: Lock, repo_root: Path) -> Plan:
    """Return the stages that the lab's registry needs, before it is known what its images' tags mean."""
    maker = _Maker(definition, lock, repo_root)
    tools_stage = maker.tools()
    return Plan(definition.name, (tools_stage, maker.lab_images(tools_stage)))


def control_plane_plan(
    definition: ImageDefinition,
    lock: Lock,
    repo_root: Path,
    programs: Sequence[str] = control_plane_build.PROGRAMS,
) -> Plan:
    """Return the stages that the lab's control plane needs: its own programs, and a tree with Debian's etcd.

    ``definition`` is an image whose kubelet is built from source, ``lock`` its lock with the group CONTROL_PLANE.
    """
    maker = _Maker(definition, lock, repo_root)
    tools_stage = maker.tools()
    stages = maker.control_plane_build(tools_stage, programs)
    return Plan(CONTROL_PLANE, (tools_stage, *stages, maker.control_plane(tools_stage)))


def _ids(trees: Iterable[StagePlan]) -> tuple[str, ...]:
    """Return the ids of the trees below a stage, topmost first: the order of overlay's lowerdir."""
    return tuple(reversed([tree.id for tree in trees]))


@dataclass(frozen=True)
class _Kernel:
    """A kernel: its name (``6.1.0-50-cloud-amd64``) and its package's version (``6.1.176-1``)."""

    name: str
    version: str


class _Maker:
    """Makes the stages of one image; holds what they all are made from."""

    def __init__(self, definition: ImageDefinition, lock: Lock, repo_root: Path) -> None:
        self.definition = definition
        self.lock = lock
        self.repo_root = repo_root
        self.epoch = lock.source_date_epoch
        self.warnings: list[str] = []

    def _code(self, kind: str, *more: Path) -> dict[str, str]:
        own = [self.repo_root / _PACKAGE / name for name in CODE[kind]]
        return code_digests(self.repo_root, [*own, *more])

    def _played(self, stage: str, reading: PlaybookReading) -> dict[str, JSON]:
        """Return the options that say what a play reads. What it alone can know never is the same."""
        options: dict[str, JSON] = {
            "variables": reading.variables,
            "values": reading.values,
            "ansible": {name: importlib.metadata.version(name) for name in _EVALUATORS},
        }
        if reading.unknown:
            options["unknown"] = reading.unknown
            options["run"] = secrets.token_hex(16)
            self.warnings += [f"stage {stage} runs in every build: {what}" for what in reading.unknown]
        return options

    def tools(self) -> StagePlan:
        return StagePlan(
            "tools", "tools", self._tree_options("tools", tools.TOOLS_PACKAGES), self._code("tools")
        )

    def _tree_options(self, group: str, include: Iterable[str]) -> dict[str, JSON]:
        locked = self.lock.group(group)
        of_image = group == "base"
        return {
            "suite": locked.suite,
            "architecture": self.definition.base.architecture,
            "include": tuple(include),
            "packages": locked.digest,
            "source_date_epoch": self.epoch if of_image else _FIXED_EPOCH,
        }

    def base(self, tools_stage: StagePlan) -> StagePlan:
        options = self._tree_options("base", base.PACKAGES)
        return StagePlan("base", "base", options, self._code("base"), inputs={"tools": tools_stage.id})

    def kubelet(self, tools_stage: StagePlan) -> list[StagePlan]:
        """Return the root that the kubelet is compiled in, and its compilation."""
        options = self._tree_options("build_root", kubelet_build.BUILD_PACKAGES)
        root = StagePlan("build_root", "base", options, self._code("base"), inputs={"tools": tools_stage.id})
        source = self.lock.sources[kubelet_build.SOURCE_PACKAGE]
        build = StagePlan(
            "kubelet_build",
            "kubelet_build",
            {
                "version": source.version.split("-")[0].split("+")[0],
                "sources": [{"name": f.name, "sha256": f.sha256} for f in source.files],
            },
            self._code("kubelet_build"),
            inputs={"build_root": root.id},
        )
        return [root, build]

    def modules(self, tools_stage: StagePlan, wanted: ModuleBuild) -> list[StagePlan]:
        """Return the root with the kernel's headers, and the build of a driver's modules in it.

        Raises LockError when the locked headers are not those of the locked kernel.
        """
        kernel = self._kernel()
        headers = f"linux-headers-{kernel.name}"
        found = {p.name: p.version for p in self.lock.group(MODULE_ROOT).packages}
        if found.get(headers) != kernel.version:
            raise LockError(
                f"the lock of {self.definition.name} has the kernel {kernel.name} {kernel.version}, "
                f"and its headers are {found.get(headers, 'missing')}",
                hint="make a new one: image-builder lock",
            )
        options = self._tree_options(MODULE_ROOT, (*module_build.BUILD_PACKAGES, headers))
        root = StagePlan(MODULE_ROOT, "base", options, self._code("base"), inputs={"tools": tools_stage.id})
        build = StagePlan(
            MODULE_BUILD,
            "module_build",
            {
                "kernel": kernel.name,
                "driver": wanted.driver,
                "flavour": wanted.flavour,
                "certificate": wanted.certificate,
                "packages": self.lock.group(MODULE_BUILD).digest,
                "source_date_epoch": _FIXED_EPOCH,
            },
            self._code("module_build"),
            inputs={MODULE_ROOT: root.id},
        )
        return [root, build]

    def _kernel(self) -> _Kernel:
        """Return the image's kernel; raises LockError unless exactly one is locked."""
        packages = [p for name in self.definition.layers for p in self.lock.group(name).packages]
        found = [_Kernel(m[1], p.version) for p in packages if (m := _KERNEL_IMAGE.fullmatch(p.name))]
        if len(found) != 1:
            names = ", ".join(k.name for k in found) or "none"
            raise LockError(f"modules are built for one kernel, {self.definition.name} has {names}")
        return found[0]

    def control_plane_build(self, tools_stage: StagePlan, programs: Sequence[str]) -> list[StagePlan]:
        """Return the root that the control plane is compiled in, and its compilation."""
        root, kubelet = self.kubelet(tools_stage)
        build = StagePlan(
            "control_plane_build",
            "control_plane_build",
            {**kubelet.options, "programs": tuple(programs)},
            self._code("control_plane_build"),
            inputs={"build_root": root.id},
        )
        return [root, build]

    def control_plane(self, tools_stage: StagePlan) -> StagePlan:
        """Return the tree with Debian's etcd, in which the control plane runs."""
        options = self._tree_options(CONTROL_PLANE, CONTROL_PLANE_PACKAGES)
        return StagePlan(CONTROL_PLANE, "base", options, self._code("base"), inputs={"tools": tools_stage.id})

    def lab_images(self, tools_stage: StagePlan) -> StagePlan:
        """Return the stage that makes the lab's own images and the storage of its registry."""
        options: dict[str, JSON] = {"packages": self.lock.group(LAB_IMAGES).digest}
        return StagePlan(
            LAB_IMAGES, "lab_images", options, self._code("lab_images"), inputs={"tools": tools_stage.id}
        )

    def preloaded(self) -> list[dict[str, JSON]]:
        """Return the images to preload as they are locked; raises LockError for one that isn't."""
        found: list[dict[str, JSON]] = []
        for wanted in self.definition.preload:
            locked = self.lock.locked_image(wanted.ref)
            if locked is not None:
                found.append({**locked.model_dump(mode="json"), "pin": wanted.pin})
            elif wanted.ref not in self.lock.left_out:
                raise LockError(
                    f"the lock of {self.definition.name} has no digest for {wanted.ref}",
                    hint="image-builder lock asks the registry",
                )
        return found

    def engines(self) -> list[str]:
        """Return the engines whose data a node may be given: the one that runs containers, then others installed."""
        variables = resolved_variables(self.definition)
        first = str(variables["container_runtime_engine"])
        installed = variables.get("container_runtime_install") or []
        others = sorted({str(name) for name in installed} & set(_SNAPSHOTTERS) - {first})  # type: ignore[union-attr]
        return [first, *others]

    def preload(self, engine: str, trees: list[StagePlan], needs: Iterable[str], *, first: bool) -> StagePlan:
        """Return the stage that pulls; its id covers the engine's packages and the images, no role.

        The first engine's images are saved as an archive, too; a further one's go into the store alone.
        """
        options: dict[str, JSON] = {
            "engine": engine,
            "snapshotter": _SNAPSHOTTERS[engine],
            "packages": self.lock.group(ENGINE_LAYER).digest,
            "archives": sorted(a.sha256 for a in layer_needs(self.definition, ENGINE_LAYER).archives),
            "images": self.preloaded(),
            "save": first,
        }
        name = "preload" if first else f"preload_{engine}"
        return StagePlan(
            name, "preload", options, self._code("preload"), ground=_ids(trees), needs=tuple(needs)
        )

    def preload_branch(
        self, trees: list[StagePlan], needs: Iterable[str], tools_stage: StagePlan
    ) -> list[StagePlan]:
        """Return the stages that pull, pack and rehearse; no role's change reaches them."""
        engines = self.engines()
        pulls = {engine: self.preload(engine, trees, needs, first=engine == engines[0]) for engine in engines}
        modes = {i.ref: i.mode or self.definition.preload_mode for i in self.definition.preload}
        required = {i.ref: i.required for i in self.definition.preload}
        images = [
            {**i, "mode": modes[str(i["ref"])], "required": required[str(i["ref"])]} for i in self.preloaded()
        ]
        store = StagePlan(
            "preload_store",
            "preload_store",
            {
                "images": images,
                "verity": self.definition.preload_verity,
                "source_date_epoch": _FIXED_EPOCH,
            },
            self._code("preload_store"),
            inputs={"tools": tools_stage.id, **{engine: stage.id for engine, stage in pulls.items()}},
            ground=_ids(trees),
        )
        rehearsal = StagePlan(
            "rehearsal",
            "rehearsal",
            {"images": images, "engines": list(engines)},
            self._code("rehearsal"),
            inputs={"preload_store": store.id},
            ground=_ids(trees),
        )
        return [*pulls.values(), store, rehearsal]

    def layer(self, name: str, below: list[StagePlan], inputs: Mapping[str, str]) -> StagePlan:
        reading = layer_reading(self.definition, name)
        return StagePlan(
            name,
            "layer",
            {
                "playbook": f"playbooks/layers/{name}.yml",
                "packages": self.lock.group(name).digest,
                "archives": sorted(a.sha256 for a in layer_needs(self.definition, name).archives),
                "source_date_epoch": self.epoch,
                **self._played(name, reading),
            },
            {**self._code("layer"), **named_digests(reading.files)},
            _ids(below),
            dict(inputs),
        )

    def seal(self, below: list[StagePlan]) -> StagePlan:
        reading = seal_reading(self.definition, seal.PLAYBOOK)
        options: dict[str, JSON] = {
            "image": self.definition.name,
            "distribution": self.definition.base.distribution,
            "layers": self.definition.layers,
            "source_date_epoch": self.epoch,
            **self._played("seal", reading),
        }
        code = {**self._code("seal"), **named_digests(reading.files)}
        return StagePlan("seal", "seal", options, code, _ids(below))

    def verify(self, trees: list[StagePlan]) -> StagePlan:
        code = self._code("verify", self.repo_root / "image_builder/suite")
        options: dict[str, JSON] = {
            "build_id": trees[-1].id,
            "facts": digest(published_variables(self.definition)),
            "packages": self._packages(),
            "preload": [
                image.model_dump(mode="json")
                for image in self.definition.preload
                if self.lock.locked_image(image.ref)
            ],
            "pytest": importlib.metadata.version("pytest"),
            "testinfra": importlib.metadata.version("pytest-testinfra"),
        }
        return StagePlan("verify", "verify", options, code, _ids(trees))

    def _packages(self) -> list[dict[str, JSON]]:
        """Return what must be installed in the image: every package that the lock has for its stages."""
        found = [p for name in ("base", *self.definition.layers) for p in self.lock.group(name).packages]
        return [
            {"name": p.name, "version": p.version, "architecture": p.architecture}
            for p in sorted(found, key=lambda p: (p.name, p.architecture))
        ]

    def disk(self, trees: list[StagePlan], tools_stage: StagePlan) -> StagePlan:
        options: dict[str, JSON] = {
            "disk": self.definition.disk.model_dump(mode="json"),
            "kernel_args": self.definition.kernel_args,
            "secure_boot": self.definition.secure_boot,
            "build_id": trees[-1].id,
            "source_date_epoch": self.epoch,
        }
        inputs = {"tools": tools_stage.id}
        return StagePlan("disk", "disk", options, self._code("disk"), _ids(trees), inputs)

    def convert(self, trees: list[StagePlan], disk: StagePlan, tools_stage: StagePlan) -> StagePlan:
        options: dict[str, JSON] = {
            "image": self.definition.name,
            "formats": self.definition.formats,
            "build_id": trees[-1].id,
            "source_date_epoch": self.epoch,
        }
        inputs = {"disk": disk.id, "tools": tools_stage.id}
        return StagePlan("convert", "convert", options, self._code("convert"), _ids(trees), inputs)
