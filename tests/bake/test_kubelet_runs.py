"""Today's kubelets run pods of preloaded images with what the role renders for each, on a real containerd.

Nothing is pulled: the images are seeded on a blank disk, and the registry gets no request. Each kubelet runs with a
containerd series that the role's table has for it: Debian's, and a newer one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from image_builder import errors
from image_builder.bake.lock.fetch import PROGRAMS
from image_builder.bake.lock.model import LockedImage
from image_builder.lab.registry import HOST
from tests.support.images import programs
from tests.support.images.builds import REPO, Ended, Workplace
from tests.support.images.programs import needs_programs
from tests.support.nodes.kubelets import (
    EXPECTED_OF_1_7,
    NEWER_ENGINE,
    containerd_with_cri,
    image_names,
    kubelet,
    program,
    role,
    running_images,
    series,
    use_mirror,
)
from tests.support.registries.plan import Tokens
from tests.support.registries.pulls import Lab, isolated, wait_until
from tests.support.roles.kubelet import Rendered
from tests.support.stores.data_roots import links_in, trees
from tests.support.stores.seeds import Node, Result, bake, ctr, differences, listing, node, runnable

pytestmark = [pytest.mark.root, needs_programs]
_HEALTHZ = "http://127.0.0.1:10248/healthz"
_AT_ONCE = {"reserve_percent": 0, "settle_seconds": 0, "bytes_per_second": 0, "wait_seconds": 30}


# -- a node's life -----------------------------------------------------------------------------------------------


def live(lab: Lab, version: str, path: str) -> Result:
    """Run a pod from seeded links, restart containerd, promote, run another pod."""
    below, above, other = trees(lab)
    pause, one, two = runnable(lab, "pause"), runnable(lab, "one", below, above), runnable(lab, "two", other)
    baked = bake(lab, [pause, one, two], pins=[pause.ref, one.ref])
    with node(lab, baked.opt) as here:
        here.settings(promote=_AT_ONCE, kubelet_healthz=_HEALTHZ)
        here.told_of_disk()
        rendered = role(here, version, pause.ref)
        result: Result = {
            "seed": here.seed()["state"],
            "links": links_in(here),
            "problems": rendered.problems,
        }
        before = len(lab.proxy.requests)
        with containerd_with_cri(here, pause.ref) as restart:
            with kubelet(here, Path(path), rendered) as running:
                running.start_pod("one", one)
                result["runs"] = running.runs(one)
                result["complaints"] = running.complaints()
                restart()
                result["runs_on"] = one.ref in running_images(here)
                result["promoted"] = here.agent("promote").communicate(timeout=120)[0].decode()
                result["links_then"] = links_in(here)
                result["runs_promoted"] = one.ref in running_images(here)
                running.start_pod("two", two)
                result["runs_two"] = running.runs(two)
                result["names"] = image_names(here)
            result["left"], result["exit"] = running_images(here), running.daemon.returncode
        result["requests"] = len(lab.proxy.requests) - before
    return result


@pytest.mark.parametrize(
    ("version", "engine"),
    [
        ("1.31.14", "containerd"),
        pytest.param("1.35.6", "containerd_2", marks=pytest.mark.slow),
        ("1.36.2", "containerd_2"),
        pytest.param("1.31.14", "containerd_2", marks=pytest.mark.slow),
        pytest.param("1.35.6", "containerd", marks=pytest.mark.slow),
    ],
)
def test_pods_of_preloaded_images_run(worker: Workplace, version: str, engine: str, tmp_path: Path) -> None:
    found = isolated(live, worker, engine, version, os.fspath(program(version, tmp_path)))
    assert found["problems"] == [] and found["seed"] == "ok" and found["links"] == 4
    assert found["runs"] and found["runs_on"]
    expected = EXPECTED_OF_1_7 if engine == "containerd" else "nothing at all"
    assert [words for words in found["complaints"] if expected not in words] == []
    assert found["links_then"] == 0, found["promoted"]
    assert found["runs_promoted"] and found["runs_two"]
    assert found["names"] == [f"{HOST}/{name}:1" for name in ("one", "pause", "two")]
    assert found["left"] == [] and found["exit"] == 0
    assert found["requests"] == 0


# -- who may use a preloaded image -------------------------------------------------------------------------------

POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "never": {"kubelet_image_credentials_policy": "NeverVerify"},
    "preloaded": {"kubelet_image_credentials_policy": "NeverVerifyPreloadedImages"},
    "listed": {
        "kubelet_image_credentials_policy": "NeverVerifyAllowlistedImages",
        "kubelet_image_credentials_allowlist": [f"{HOST}/team/*"],
    },
    "not-listed": {
        "kubelet_image_credentials_policy": "NeverVerifyAllowlistedImages",
        "kubelet_image_credentials_allowlist": [f"{HOST}/other"],
    },
    "always": {"kubelet_image_credentials_policy": "AlwaysVerify"},
}


def use_a_private_image(lab: Lab, version: str, path: str) -> Result:
    """Start a pod without a secret, from a preloaded image whose registry requires one, under each policy."""
    pause, private = runnable(lab, "pause"), runnable(lab, "team/private", trees(lab)[2])
    baked = bake(lab, [pause, private])
    lab.proxy.tokens = Tokens(("user", "secret"), 60)
    result: Result = {}
    with node(lab, baked.opt) as here:
        here.seed()
        use_mirror(here)
        with containerd_with_cri(here, pause.ref):
            for name, policy in POLICIES.items():
                result[name] = use_under_policy(here, path, role(here, version, pause.ref, **policy), private)
    return result


def use_under_policy(here: Node, path: str, rendered: Rendered, image: LockedImage) -> list[Any]:
    """Return the role's problems, whether a pod runs, whether the registry was asked, and what the kubelet said."""
    before = len(here.lab.proxy.requests)

    def is_asked() -> bool:
        return any("/team/private/" in request.path for request in here.lab.proxy.requests[before:])

    with kubelet(here, Path(path), rendered) as running:
        running.start_pod("private", image)
        wait_until(lambda: image.ref in running_images(here) or is_asked(), 60)
        runs = running.runs(image, 3)
        complaints = running.complaints()
    # Its records of attempted pulls.
    shutil.rmtree(here.root.path / "var/lib/kubelet/image_manager", ignore_errors=True)
    return [rendered.problems, runs, is_asked(), complaints]


def test_a_preloaded_private_image_needs_a_secret_only_where_the_policy_says_so(
    worker: Workplace, tmp_path: Path
) -> None:
    path = os.fspath(program("1.36.2", tmp_path))
    found = isolated(use_a_private_image, worker, NEWER_ENGINE, "1.36.2", path)
    for name in ("default", "never", "preloaded", "listed"):
        assert found[name] == [[], True, False, []], name
    for name in ("not-listed", "always"):
        problems, runs, has_asked, complaints = found[name]
        assert (problems, runs, has_asked) == ([], False, True), name
        assert any("401" in words or "authorization" in words for words in complaints), complaints


# -- garbage -----------------------------------------------------------------------------------------------------


def collect(lab: Lab, version: str, path: str) -> Result:
    """Have a kubelet delete unused images, as on a full disk."""
    below, above, other = trees(lab)
    pause, one, two = runnable(lab, "pause"), runnable(lab, "one", below, above), runnable(lab, "two", other)
    baked = bake(lab, [pause, one, two], pins=[pause.ref, one.ref])
    with node(lab, baked.opt) as here:
        here.seed()
        store = listing(here.store)
        full = {"kubelet_eviction_hard": {"imagefs.available": "99%"}, "kubelet_image_minimum_gc_age": "1s"}
        with containerd_with_cri(here, pause.ref):
            before = image_names(here)
            with kubelet(here, Path(path), role(here, version, pause.ref, **full)):
                wait_until(lambda: two.ref not in ctr(here, "images", "ls", "-q").split(), 90)
                # It checks every ten seconds, and deletes everything that it may.
                time.sleep(15)
            result: Result = {"before": before, "after": image_names(here)}
        result["store"] = differences(store, listing(here.store))
        here.shut_down()
        result["seed"] = here.seed()["action"]
    return result


@pytest.mark.parametrize("engine", [pytest.param("containerd", marks=pytest.mark.slow), "containerd_2"])
def test_a_kubelet_deletes_unpinned_images_and_no_others(
    worker: Workplace, engine: str, tmp_path: Path
) -> None:
    found = isolated(collect, worker, engine, "1.35.6", os.fspath(program("1.35.6", tmp_path)))
    assert found["before"] == [f"{HOST}/{name}:1" for name in ("one", "pause", "two")]
    assert found["after"] == [f"{HOST}/{name}:1" for name in ("one", "pause")]
    assert found["store"] == [] and found["seed"] == "current"


# -- a newer engine ----------------------------------------------------------------------------------------------


def upgrade(lab: Lab, version: str, path: str, package: str) -> Result:
    """Install a newer containerd over the one that the disk was seeded for, while a pod runs; then reboot."""
    below, above, other = trees(lab)
    pause, one, two = runnable(lab, "pause"), runnable(lab, "one", below, above), runnable(lab, "two", other)
    baked = bake(lab, [pause, one, two], pins=[one.ref])
    with node(lab, baked.opt) as here:
        here.seed()
        before = len(lab.proxy.requests)
        result: Result = {"series": [series(here)]}
        old = role(here, version, pause.ref)
        with containerd_with_cri(here, pause.ref) as restart, kubelet(here, Path(path), old) as running:
            running.start_pod("one", one)
            result["runs"] = running.runs(one)
            subprocess.run(["dpkg-deb", "--extract", package, here.root.path], check=True)
            restart()
            result["series"].append(series(here))
            result["runs_on"] = one.ref in running_images(here)
            running.start_pod("two", two)
            result["runs_two"] = running.runs(two)
            result["names"] = image_names(here)
        here.shut_down()
        section = here.seed()
        result["boot"] = [section["state"], section.get("action")]
        new = role(here, version, pause.ref)
        with containerd_with_cri(here, pause.ref), kubelet(here, Path(path), new) as running:
            running.start_pod("two", two)
            result["runs_after_boot"] = running.runs(two)
        # A blank disk isn't seeded for an engine that may store its data differently.
        here.blank()
        section = here.seed()
        result["blank"] = [section["state"], section.get("code"), links_in(here)]
        result["requests"] = len(lab.proxy.requests) - before
    return result


def test_an_engine_is_upgraded_above_a_seeded_disk(worker: Workplace, tmp_path: Path) -> None:
    (package,) = programs.find("repository/containerd.io_2.*.deb")
    path = os.fspath(program("1.35.6", tmp_path))
    found = isolated(upgrade, worker, "containerd", "1.35.6", path, os.fspath(package))
    assert found["series"] == ["1.7", "2.1"]
    assert found["runs"] and found["runs_on"] and found["runs_two"]
    assert found["names"] == [f"{HOST}/{name}:1" for name in ("one", "pause", "two")]
    assert found["boot"] == ["ok", "current"] and found["runs_after_boot"]
    assert found["blank"] == ["degraded", "seed.version", 0]
    assert found["requests"] == 0


# -- user namespaces ---------------------------------------------------------------------------------------------

_NO_NETWORK = """#!/bin/sh
# In place of each plugin: an address and nothing else.
case $CNI_COMMAND in ADD) echo '{"cniVersion":"0.4.0","ips":[{"version":"4","address":"192.0.2.7/32"}]}' ;; esac
"""


def isolate_users(lab: Lab, version: str, path: str) -> Result:
    """Run a pod in a user namespace, before and after the promotion; return who owns a file, as the host sees it."""
    below, above, _ = trees(lab)
    pause, one = runnable(lab, "pause"), runnable(lab, "one", below, above)
    baked = bake(lab, [pause, one])
    plugin = baked.opt / "cni/bin/loopback"
    plugin.parent.mkdir(parents=True)
    plugin.write_text(_NO_NETWORK)
    plugin.chmod(0o755)
    result: Result = {}
    with node(lab, baked.opt) as here:
        here.settings(promote=_AT_ONCE, kubelet_healthz=_HEALTHZ)
        here.told_of_disk()
        here.seed()
        network = here.root.path / "etc/cni/net.d"
        network.mkdir(parents=True, exist_ok=True)
        (network / "10-lab.conf").write_text('{"cniVersion": "0.4.0", "name": "lab", "type": "loopback"}')
        with (
            containerd_with_cri(here, pause.ref),
            kubelet(here, Path(path), role(here, version, pause.ref)) as running,
        ):
            for name in ("before", "after"):
                running.start_pod(name, one, hostNetwork=False, hostUsers=False)
                runs = running.runs(one, 30)
                result[name] = [runs, *(owners(here, one.ref) if runs else ())]
                running.end_pods()
                if name == "before":
                    here.agent("promote").communicate(timeout=120)
                    result["links"] = links_in(here)
    return result


def owners(here: Node, ref: str) -> list[int]:
    """Return which user of the host a container's root is, and who owns a file of its image."""
    rows = [line.split() for line in ctr(here, "containers", "ls").splitlines()[1:]]
    names = {row[0] for row in rows if row[1] == ref}
    tasks = [line.split() for line in ctr(here, "tasks", "ls").splitlines()[1:]]
    pid = next(task[1] for task in tasks if task[0] in names and task[2] == "RUNNING")
    users = Path(f"/proc/{pid}/uid_map").read_text().split()
    return [int(users[1]), Path(f"/proc/{pid}/root/etc/kept").stat().st_uid]


def test_pods_with_users_of_their_own_work_once_all_is_promoted(worker: Workplace, tmp_path: Path) -> None:
    found = isolated(isolate_users, worker, NEWER_ENGINE, "1.36.2", os.fspath(program("1.36.2", tmp_path)))
    assert found["before"] == [False], "a link leads out of what containerd maps the owners of"
    assert found["links"] == 0
    runs, root, owner = found["after"]
    assert runs and owner == root > 0


# -- a network of the image's own ---------------------------------------------------------------------------------

# Debian's plugins instead of Azure's, under the names of Azure's: whatever runs must have been baked.
_PLUGINS = {"azure-vnet": "bridge", "azure-vnet-ipam": "host-local"}
_BAKED = """---
kubelet_cni: baked
kubelet_cni_plugins:
  url: file:azure-vnet-cni.tgz
  sha256: {sha256}
  programs: {programs}
kubelet_cni_conf:
  cniVersion: 0.4.0
  name: azure
  plugins:
    - type: azure-vnet
      bridge: azure0
      isGateway: true
      ipam: {{type: azure-vnet-ipam, ranges: [[{{subnet: 10.99.0.0/24}}]]}}
"""


def plugins_archive(plugins: Path, target: Path) -> str:
    """Pack Debian's plugins under the names of Azure's, plus what comes with those; return the archive's SHA-256."""
    with tarfile.open(target, "w:gz") as tar:
        for name, program_of in _PLUGINS.items():
            tar.add(plugins / program_of, arcname=name)
        tar.add(plugins / "portmap", arcname="azure-vnet-telemetry")
    return hashlib.sha256(target.read_bytes()).hexdigest()


@pytest.fixture
def place(copies: Callable[[Workplace], Workplace], worker_current: Workplace) -> Workplace:
    return copies(worker_current)


@pytest.fixture
def bake_network(
    place: Workplace, worker_current: Workplace, tmp_path: Path
) -> Callable[[Sequence[str]], Ended]:
    """Return a function that builds the layer `kubernetes` with some plugins from an archive."""
    directory, inventory = tmp_path / "programs", tmp_path / "inventory"
    directory.mkdir()
    assert programs.DIRECTORY
    for path in programs.DIRECTORY.iterdir():
        (directory / path.name).symlink_to(path)
    plugins = worker_current.object("kubernetes") / "product/tree/usr/lib/cni"
    sha256 = plugins_archive(plugins, directory / "azure-vnet-cni.tgz")
    subprocess.run(["cp", "-a", REPO / "inventories/lab", inventory], check=True)

    def build(names: Sequence[str]) -> Ended:
        text = _BAKED.format(sha256=sha256, programs=json.dumps(names))
        (inventory / "host_vars/worker_current.yml").write_text(text)
        return place.build(
            "--stop-after", "kubernetes", inventory=inventory, env={PROGRAMS: os.fspath(directory)}
        )

    return build


def use_a_baked_network(lab: Lab, trees_of_layer: str) -> Result:
    """Run a pod on the image's own network, connect to it, end it."""
    lab.trees = [Path(tree) for tree in json.loads(trees_of_layer)]
    pause, one = runnable(lab, "pause"), runnable(lab, "one")
    baked = bake(lab, [pause, one])
    layer = lab.trees[0]
    shutil.copytree(layer / "opt/cni", baked.opt / "cni", symlinks=True)
    with node(lab, baked.opt) as here:
        here.seed()
        rendered = role(here, "1.36.2", pause.ref)
        addresses = here.root.path / "var/lib/cni/networks/azure"

        def given() -> list[str]:
            found = addresses.iterdir() if addresses.is_dir() else ()
            return sorted(path.name for path in found if path.name.startswith("10.99.0."))

        with (
            containerd_with_cri(here, pause.ref),
            kubelet(here, layer / "usr/local/bin/kubelet", rendered) as running,
        ):
            running.start_pod("one", one, hostNetwork=False)
            result: Result = {"runs": running.runs(one), "given": given()}
            # Nothing listens there, so it is the pod that refuses.
            result["answers"] = [refuses(address) for address in result["given"]]
            result["complaints"] = running.complaints()
            result["ended"] = running.end_pods() and wait_until(lambda: not given(), 30)
    return result


def refuses(address: str) -> bool:
    """Return whether there is a machine at this address that refuses a connection."""
    try:
        socket.create_connection((address, 9), 5).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def test_a_pod_has_the_network_that_is_baked_into_the_image(
    place: Workplace, bake_network: Callable[[Sequence[str]], Ended]
) -> None:
    done = bake_network(list(_PLUGINS))
    assert done.status == 0, done.stderr
    layers = place.layers(next(one["id"] for one in done.result["stages"] if one["name"] == "kubernetes"))
    installed = {path.name: path.stat() for path in (layers[0] / "usr/lib/cni").iterdir()}
    assert "azure-vnet-telemetry" not in installed, "what isn't declared isn't unpacked"
    for name in _PLUGINS:
        assert (installed[name].st_mode & 0o7777, installed[name].st_uid) == (0o755, 0)
    trees_of_layer = json.dumps([os.fspath(tree) for tree in layers])
    found = isolated(use_a_baked_network, place, "containerd", trees_of_layer)
    assert found["runs"] and found["complaints"] == []
    assert len(found["given"]) == 1 and found["answers"] == [True]
    assert found["ended"], "its address is free again"


@pytest.mark.slow
def test_an_archive_without_a_declared_plugin_ends_the_bake(
    place: Workplace, worker_current: Workplace, bake_network: Callable[[Sequence[str]], Ended]
) -> None:
    before = place.take_artefact(worker_current)
    done = bake_network(["azure-vnet", "azure-vnet-ipv6"])
    assert done.status == errors.StageError.exit_code, done.stderr
    assert "azure-vnet-ipv6" in done.stderr and "Traceback" not in done.stderr
    assert place.published() == before and list((place.store / "staging").iterdir()) == []
