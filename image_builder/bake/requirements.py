"""What a definition needs from outside, stage by stage: the question that a lock answers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from image_builder.bake.lock.model import Lock, LockedArchive, Question
from image_builder.bake.pull.mirrors import Mirror, Mirrors
from image_builder.bake.stages.base import run as base
from image_builder.bake.stages.kubelet_build import run as kubelet_build
from image_builder.bake.stages.module_build import run as module_build
from image_builder.bake.stages.tools import run as tools
from image_builder.definition import ImageDefinition, Repository, layer_needs, resolved_variables
from image_builder.lab import large, pause

# The stage that makes the lab's images, and the group of the packages that they are made of.
LAB_IMAGES = "lab_images"
# The tree that the lab's control plane runs in, and what it has beside the essential packages. No image needs it:
# ``tests.support.control_plane.programs`` locks it on top of an image's lock.
CONTROL_PLANE = "control_plane"
CONTROL_PLANE_PACKAGES = ("etcd-server",)
# The layer that installs the GPU's driver, and the groups of the root that its modules are built in and of their
# source.
GPU_LAYER = "gpu"
MODULE_ROOT = "module_root"
MODULE_BUILD = "module_build"


@dataclass(frozen=True)
class Group:
    """The packages one stage asks apt for, of one suite, on top of the group ``after``.

    ``alone``: these files are wanted and nothing is installed, so nothing that they depend on.
    """

    suite: str
    names: tuple[str, ...]
    components: tuple[str, ...] = ("main",)
    after: str | None = None
    repositories: tuple[Repository, ...] = ()
    alone: bool = False

    @property
    def question(self) -> Question:
        """Return what is asked of apt, in the form in which a lock remembers it."""
        return Question(
            suite=self.suite,
            components=list(self.components),
            repositories=[_line(r) for r in self.repositories],
            requested=sorted(self.names),
        )


@dataclass(frozen=True)
class Requirements:
    """``groups`` by stage name, in the order in which they are installed; ``sources`` maps a Debian source
    package to the suite it comes from, ``archives`` a layer to the files that its roles fetch by address,
    ``preload`` are the references of the container images to preload."""

    groups: Mapping[str, Group]
    sources: Mapping[str, str]
    archives: Mapping[str, tuple[LockedArchive, ...]]
    preload: tuple[str, ...] = ()

    @property
    def all_archives(self) -> tuple[LockedArchive, ...]:
        """Return the archives of all layers, each once."""
        return tuple({a.sha256: a for found in self.archives.values() for a in found}.values())

    def unlocked_images(self, lock: Lock) -> list[str]:
        """Return the references that ``lock`` says nothing of."""
        return [ref for ref in self.preload if lock.locked_image(ref) is None and ref not in lock.left_out]

    def misfit(self, lock: Lock) -> list[str]:
        """Tell why ``lock`` doesn't answer these requirements, images apart: one sentence a difference."""
        questions = {name: group.question for name, group in self.groups.items()}
        return lock.misfit(questions, self.sources, self.all_archives)


def requirements(definition: ImageDefinition) -> Requirements:
    """Collect the needs of the tools tree, the base, every layer and what is built from source."""
    groups = {"tools": Group(tools.SUITE, tuple(tools.TOOLS_PACKAGES))}
    sources: dict[str, str] = {}
    archives: dict[str, tuple[LockedArchive, ...]] = {}
    components = tuple(definition.base.components)
    from_source = kubelet_from_source(definition)
    if from_source:
        groups["build_root"] = Group(from_source, tuple(kubelet_build.BUILD_PACKAGES))
        sources[kubelet_build.SOURCE_PACKAGE] = from_source
    if uses_lab(definition):
        packages = tuple(name for layer in large.LARGE_LAYERS for name in layer)
        groups[LAB_IMAGES] = Group(large.SUITE, packages)
    suite = definition.base.suite
    groups["base"] = Group(suite, base.PACKAGES, components)
    below = "base"
    repositories: dict[str, Repository] = {}
    for layer in definition.layers:
        needs = layer_needs(definition, layer)
        repositories.update({r.name: r for r in needs.repositories})
        names = tuple(sorted(set(needs.packages)))
        groups[layer] = Group(suite, names, components, below, tuple(repositories.values()))
        archives[layer] = tuple(LockedArchive(url=a.url, sha256=a.sha256) for a in needs.archives)
        below = layer
    if build := modules_from_source(definition):
        # The same indices as the image's, or the headers may be another kernel's.
        groups[MODULE_ROOT] = Group(
            suite,
            (*module_build.BUILD_PACKAGES, build.headers),
            components,
            None,
            tuple(repositories.values()),
        )
        groups[MODULE_BUILD] = Group(
            suite, (build.package,), components, MODULE_ROOT, tuple(repositories.values()), alone=True
        )
    preload = tuple(image.ref for image in definition.preload)
    return Requirements(groups, sources, archives, preload)


def registry_mirrors(definition: ImageDefinition) -> Mirrors:
    """Return the mirrors that the nodes have of each registry: a bake may have no other way either."""
    declared = resolved_variables(definition).get("container_runtime_registry_mirrors")
    if not isinstance(declared, Mapping):
        return {}
    return {
        str(registry): [Mirror.declared(mirror) for mirror in mirrors if isinstance(mirror, Mapping)]
        for registry, mirrors in declared.items()
        if isinstance(mirrors, list)
    }


def uses_lab(definition: ImageDefinition) -> bool:
    """Tell whether an image preloads something from the lab's own registry."""
    return any(image.ref.startswith(f"{pause.HOST}/") for image in definition.preload)


def kubelet_from_source(definition: ImageDefinition) -> str | None:
    """Return the suite whose ``kubernetes`` source package the kubelet is built from, or None."""
    if "kubernetes" not in definition.layers:
        return None
    source = resolved_variables(definition).get("kubelet_source")
    if not isinstance(source, Mapping) or source.get("type") != "debian_source":
        return None
    return str(source.get("suite", "bookworm"))


@dataclass(frozen=True)
class ModuleBuild:
    """Modules to build: the ``package`` with their DKMS source and that of the kernel's ``headers``, as apt takes them;
    ``driver`` is the exact version, ``flavour`` open or proprietary, ``certificate`` (PEM) that of the key that signs
    them, or empty."""

    package: str
    headers: str
    driver: str
    flavour: str
    certificate: str


def modules_from_source(definition: ImageDefinition) -> ModuleBuild | None:
    """Return the driver's modules that have to be built for an image, or None."""
    if GPU_LAYER not in definition.layers:
        return None
    wanted = resolved_variables(definition).get("__nvidia_build")
    if not isinstance(wanted, Mapping) or not wanted:
        return None
    names = ("package", "headers", "driver", "flavour", "certificate")
    return ModuleBuild(**{name: str(wanted[name]) for name in names})


def keyring(definition: ImageDefinition) -> Path:
    """Return the keyring that the base's repositories are signed with."""
    default = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    return Path(definition.base.keyring) if definition.base.keyring else default


def _line(repository: Repository) -> str:
    """Return a repository in one line; ``signed_by`` is a keyring's path or an armoured key."""
    key = repository.signed_by.encode()
    if "BEGIN PGP" not in repository.signed_by and Path(repository.signed_by).is_file():
        key = Path(repository.signed_by).read_bytes()
    digest = hashlib.sha256(key).hexdigest()[:16]
    return " ".join([*repository.uris, *repository.suites, *repository.components, f"[key {digest}]"])
