"""The plans of Go programs: the kubelet of an image whose definition builds it from Debian's source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from image_builder.bake.lock.model import Lock, LockedFile
from image_builder.bake.lock.requirements import Group, Requirements
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages.kind import MIB, Draft, Need, Sizes, StageKind
from image_builder.bake.stages.root import root
from image_builder.definition import ImageDefinition, resolved_variables

KUBELET_BUILD, BUILD_ROOT = "kubelet_build", "build_root"
SOURCE_PACKAGE = "kubernetes"
# The packages of the build root besides mmdebstrap's `apt` variant. golang-go would pull in gcc, which a build without
# cgo never calls.
_PACKAGES = ("ca-certificates", "dpkg-dev", "golang-1.19-go")
_LAYER = "kubernetes"
# The space for a build's scratch, which is Go's caches, and for the programs that are kept.
_CACHES, _PROGRAMS = 2500 * MIB, 150 * MIB


def source_suite(definition: ImageDefinition) -> str | None:
    """Return the suite whose ``kubernetes`` source package the kubelet is built from, or None."""
    if _LAYER not in definition.layers:
        return None
    source = resolved_variables(definition).get("kubelet_source")
    if not isinstance(source, Mapping) or source.get("type") != "debian_source":
        return None
    return str(source.get("suite", "bookworm"))


def programs(draft: Draft, name: str, names: Sequence[str]) -> list[StagePlan]:
    """Return the root in which Kubernetes programs are compiled, and the stage ``name`` that compiles them."""
    build_root = root(draft, BUILD_ROOT, _PACKAGES)
    source = draft.lock.sources[SOURCE_PACKAGE]
    build = StagePlan(
        name,
        KIND.name,
        {
            "version": source.version.split("-")[0].split("+")[0],
            "programs": tuple(names),
            "sources": {f.name: f.sha256 for f in source.files},
        },
        draft.code(KIND),
        inputs={BUILD_ROOT: build_root.id},
    )
    return [build_root, build]


def _needs(definition: ImageDefinition) -> Requirements:
    suite = source_suite(definition)
    if not suite:
        return Requirements()
    return Requirements({BUILD_ROOT: Group(suite, _PACKAGES, sources=(SOURCE_PACKAGE,))})


def _plan(draft: Draft) -> Iterator[StagePlan]:
    if source_suite(draft.definition):
        yield from programs(draft, KUBELET_BUILD, ("kubelet",))


def _space(_stage: StagePlan, _sizes: Sizes) -> Need:
    return Need(_PROGRAMS, _CACHES)


def _files(_stage: StagePlan, lock: Lock) -> Sequence[LockedFile]:
    return lock.sources[SOURCE_PACKAGE].files


KIND = StageKind(
    "go",
    "image_builder.bake.stages.go.run",
    _plan,
    needs=_needs,
    space=_space,
    files=_files,
    beside=True,
    layer=_LAYER,
)
