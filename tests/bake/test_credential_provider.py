"""Today's kubelets pull private images with a credential provider that uses the azure.json written by joining.

The provider is a stand-in for Azure's (tests/data/credential-provider.py): it uses the kubelet's own protocol, the
metadata service's documented answers, and a registry that requires a login. One kubelet has a pod for each way in
which a provider fails, all at once.
"""

from __future__ import annotations

import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from image_builder.bake.lock.model import LockedImage
from image_builder.lab.registry import HOST
from tests.support.images.builds import REPO, Workplace
from tests.support.images.programs import needs_programs
from tests.support.nodes import joining_machine, joins
from tests.support.nodes.kubelets import (
    NEWER_ENGINE,
    Kubelet,
    containerd_with_cri,
    kubelet,
    program,
    role,
    running_images,
    use_mirror,
)
from tests.support.registries.plan import Tokens
from tests.support.registries.pulls import Lab, have_addresses, isolated, wait_until
from tests.support.roles.kubelet import Rendered
from tests.support.stores.seeds import Node, Result, bake, node, runnable

pytestmark = [pytest.mark.root, needs_programs]
VERSION = "1.36.2"
IMDS = "169.254.169.254"
CLIENT = "2b9a3f1e-3a5e-4b57-9d5a-0a7b4f6d8c11"
AZURE = {"tenant_id": "72f988bf-86f1-41af-91ab-2d7cd011db47", "client_id": CLIENT}
PROGRAM = "acr-credential-provider"
PROVIDER = {"name": PROGRAM, "match_images": [HOST], "args": ["/etc/kubernetes/azure.json"]}
# The user name that Azure's registry expects with a token.
LOGIN = ("00000000-0000-0000-0000-000000000000", joins.IDENTITY["access_token"])
# The kubelet's messages about a provider, and then about the pod's image.
SAID = {
    "fails": "exit status 1: the metadata service gives no identity to this machine",
    "foreign": "actual apiVersion:credentialprovider.kubelet.k8s.io/v9",
}
HANGING = {
    "hangs": "error execing credential provider plugin acr-credential-provider .*: context deadline exceeded"
}
# The time after which a kubelet ends a provider (pkg/credentialprovider/plugin, pluginExecTimeout).
PROVIDER_SECONDS = 60
_SECONDS = 30


def install(here: Node, rendered: Rendered, azure: bytes) -> None:
    """Put the provider and its configuration where the role puts them, and ``azure.json`` where joining does."""
    kubernetes = here.root.path / "etc/kubernetes"
    kubernetes.mkdir(parents=True, exist_ok=True)
    (kubernetes / "credential-providers.yaml").write_text(rendered.file("credential-providers.yaml.j2"))
    (kubernetes / "azure.json").write_bytes(azure)
    place = here.root.path / rendered.flags["image-credential-provider-bin-dir"].lstrip("/")
    place.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(REPO / "tests/data/credential-provider.py", place / PROGRAM)
    (place / PROGRAM).chmod(0o755)


def pull(lab: Lab, path: str, seconds: str) -> Result:
    """Join, then start pods of images that the registry only gives to the machine's identity.

    ``seconds`` is how long to wait for a provider that hangs.
    """
    images = {name: private(lab, name) for name in ("right", *SAID, "hangs")}
    pause, preloaded = runnable(lab, "pause"), private(lab, "preloaded")
    baked = bake(lab, [pause, preloaded])
    lab.proxy.tokens = Tokens(LOGIN, 60)
    have_addresses(IMDS)
    with (
        joining_machine.served(lab.folder("join")) as world,
        joins.serving(joins.as_imds(world.imds), address=(IMDS, 80)) as imds,
        node(lab, baked.opt) as here,
    ):
        world.tell(azure=AZURE)
        result: Result = {"joined": world.join()}
        here.seed()
        use_mirror(here)
        rendered = role(here, VERSION, pause.ref, kubelet_image_credential_providers=[PROVIDER])
        result["problems"] = rendered.problems
        install(here, rendered, (world.kubernetes / "azure.json").read_bytes())
        with containerd_with_cri(here, pause.ref), kubelet(here, Path(path), rendered) as running:
            for name, image in (images | {"preloaded": preloaded}).items():
                running.start_pod(name, image)
            result["runs"] = running.runs(images["right"], _SECONDS)
            result["runs_preloaded"] = running.runs(preloaded, _SECONDS)
            for name, limit in {"fails": _SECONDS, "foreign": _SECONDS, "hangs": float(seconds)}.items():
                result[name] = wait_until(partial(is_refused, running, images[name]), limit)
            result["images"] = running_images(here)
            result["log"] = running.log.read_text("utf-8", "replace")
        result["identities"] = [one for one in imds.asked if "oauth2" in one]
    return result


def private(lab: Lab, name: str) -> LockedImage:
    """Push a unique image: an engine uses one name for equal images."""
    tree = lab.folder("tree")
    (tree / name).touch()
    return runnable(lab, f"team/{name}", tree)


def is_refused(running: Kubelet, image: LockedImage) -> bool:
    """Return whether the kubelet reports that a pod's image can't be pulled."""
    return any("ErrImagePull" in line and image.ref in line for line in running.complaints())


@pytest.mark.parametrize("seconds", [0, pytest.param(2 * PROVIDER_SECONDS, marks=pytest.mark.slow)])
def test_a_provider_reads_what_joining_wrote(worker: Workplace, tmp_path: Path, seconds: int) -> None:
    found = isolated(pull, worker, NEWER_ENGINE, os.fspath(program(VERSION, tmp_path)), str(seconds))
    assert found["joined"] == 0 and found["problems"] == []
    # A provider that hangs doesn't delay any other pod.
    assert found["runs"] and found["runs_preloaded"]
    assert found["images"] == [f"{HOST}/team/{name}:1" for name in ("preloaded", "right")]
    assert found["identities"] and all(f"client_id={CLIENT}" in one for one in found["identities"])
    assert [found["fails"], found["foreign"], found["hangs"]] == [True, True, seconds > 0]
    assert LOGIN[1] not in found["log"]
    for name, words in (SAID | (HANGING if seconds else {})).items():
        assert re.search(rf"{words}[^\n]*(\n[^\n]*)?{HOST}/team/{name}", found["log"]), name
