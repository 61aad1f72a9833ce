"""Images as real-world registries have them: each is there by its digest, or the problem with it is named."""

from __future__ import annotations

import gzip
import random

import pytest

from image_builder.bake.lock.model import LockedImage
from image_builder.bake.pull.registry import locate
from image_builder.errors import PullError
from tests.support.images.builds import Workplace
from tests.support.registries.company import HUB, REGISTRY, company
from tests.support.registries.pulls import PLATFORM, Lab, Result, with_each_engine
from tests.support.registries.raw_images import (
    LAYER,
    Descriptor,
    RawRepository,
    index,
    manifest,
    tar_of,
    zstd,
)

pytestmark = pytest.mark.root

_IN_TOTO = "application/vnd.in-toto+json"
_ELSEWHERE = "https://nowhere.company.test"
_FOREIGN = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"


def _tar(name: str) -> bytes:
    return tar_of(f"srv/{name}", random.Random(name).randbytes(400_000))


def _plain(place: RawRepository, name: str, tag: str = "", architecture: str = "amd64") -> Descriptor:
    tar = _tar(name)
    return place.image(
        [place.blob(gzip.compress(tar, 1, mtime=0), f"{LAYER}+gzip")], [tar], tag, architecture
    )


def _attestation(place: RawRepository) -> Descriptor:
    """Push what BuildKit puts next to an image: a manifest whose layer is a statement."""
    layer = place.blob(b'{"_type":"https://in-toto.io/Statement/v0.1"}', _IN_TOTO)
    config = place.blob(
        b'{"architecture":"unknown","os":"unknown"}', "application/vnd.oci.image.config.v1+json"
    )
    notes = {"vnd.docker.reference.type": "attestation-manifest"}
    return {**place.document(manifest(config, [layer])), "annotations": notes}


def push_contents(lab: Lab) -> dict[str, str]:
    """Push each shape; return the digest of the expected manifest, for those that have one."""
    place = RawRepository(lab, "shapes")
    tar = _tar("zstd")
    meant = {"zstd": place.image([place.blob(zstd(tar), f"{LAYER}+zstd")], [tar], "zstd")["digest"]}
    plain, arm = _plain(place, "plain"), _plain(place, "arm", architecture="arm64")
    newer = _plain(place, "newer")
    shapes = {
        "attested": [(_attestation(place), "unknown/unknown"), (arm, "linux/arm64"), (plain, PLATFORM)],
        "variants": [(newer, f"{PLATFORM}/v3"), (plain, PLATFORM), (arm, "linux/arm64/v8")],
        "oldest": [(newer, f"{PLATFORM}/v3"), (plain, f"{PLATFORM}/v1")],
        # The platform is optional: the configuration says it, too.
        "bare": [(plain, ""), (arm, "")],
        "bare-attested": [(_attestation(place), "unknown/unknown"), (plain, "")],
        "newest": [(newer, f"{PLATFORM}/v3"), (newer, f"{PLATFORM}/v4")],
    }
    for tag, entries in shapes.items():
        place.document(index(entries), tag)
        meant[tag] = plain["digest"]
    tar = _tar("foreign")
    layer = place.blob(gzip.compress(tar, 1, mtime=0), _FOREIGN)
    # The registry keeps it anyway: Docker takes it from there, containerd only asks the other place.
    meant["foreign"] = place.image([{**layer, "urls": [f"{_ELSEWHERE}/layer"]}], [tar], "foreign")["digest"]
    meant["hub"] = _plain(RawRepository(lab, "library/hubs"), "hubs", "1")["digest"]
    return meant


# Images that no engine can pull, or not all of them, and what the lock says about them.
REFUSED = {
    "newest": f"none for {PLATFORM}; the registry has {PLATFORM}/v3, {PLATFORM}/v4",
    "foreign": f"is foreign: it is kept outside of the registry, at {_ELSEWHERE}/layer",
}


def pull_contents(lab: Lab) -> Result:
    """Lock and pull every shape from a company's registry and from Docker Hub."""
    meant = push_contents(lab)
    result: Result = {"meant": meant, "lock": {}, "located": {}, "pulled": {}, "has": {}}
    with company(lab) as place:
        located: dict[str, LockedImage] = {}
        for name in meant:
            ref = "docker.io/library/hubs:1" if name == "hub" else f"{REGISTRY}/shapes:{name}"
            try:
                located[name] = locate(ref, PLATFORM, {})
            except PullError as error:
                result["lock"][name] = error.message
        result["located"] = {name: image.manifest for name, image in located.items()}
        with lab.running(lab.folder("state")) as engine:
            for name, image in located.items():
                result["pulled"][name] = lab.pull(engine, [image], attempts=1)
                result["has"][name] = engine.has(image) and len(engine.layer_folders(image)) == len(
                    image.layers
                )
        result["tunnels"] = sorted(set(place.way.tunnels))
    return result


@pytest.fixture(scope="module")
def pulled(worker: Workplace, engine: str) -> Result:
    result: Result = with_each_engine(pull_contents, worker, engine)
    return result


def test_each_shape_is_there_by_its_digest(pulled: Result) -> None:
    there = pulled["meant"].keys() - REFUSED
    assert pulled["located"] == {name: pulled["meant"][name] for name in there}
    for name in there:
        assert not pulled["pulled"][name]["error"] and not pulled["pulled"][name]["bug"], pulled["pulled"]
    assert pulled["has"] == dict.fromkeys(there, True)
    assert set(pulled["tunnels"]) == {f"{REGISTRY}:443", f"{HUB}:443"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_engine_or_not_each_can_have_is_refused_by_the_lock(pulled: Result, name: str) -> None:
    assert pulled["lock"][name].startswith(f"{REGISTRY}/shapes:{name}: ")
    assert pulled["lock"][name].endswith(REFUSED[name])
