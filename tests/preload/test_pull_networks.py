"""The nodes' network as a definition describes it, exercised in three places: by the lock, by the bake, by a node.

In each world, only the variable under test leads to the image, and without it the lock fails. The node is the image's
engine with the files that the role derives from the variables: the trust store, the units' environment, the mirrors.
Pods aren't involved: ``docker pull`` and ``ctr`` make the requests.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast

import pytest
import urllib3

from image_builder.bake.lock import requirements
from image_builder.bake.lock.requirements import node_network
from image_builder.bake.pull import containerd_engine, docker_engine, registry
from image_builder.bake.pull.network import Network
from image_builder.bake.pull.reference import parse
from image_builder.bake.pull.registry import locate
from image_builder.definition import ImageDefinition
from image_builder.system import namespace, process
from image_builder.system.sandbox import Root, open_root
from tests.support.images.builds import Workplace
from tests.support.images.variants import Declaration, define
from tests.support.registries.connect_proxy import connect_proxy
from tests.support.registries.plan import Fault
from tests.support.registries.pull_cases import HASTY, layer_fault, partial, placed, told
from tests.support.registries.pulls import (
    CONTAINERD,
    DOCKER,
    MB,
    PLATFORM,
    Lab,
    Result,
    isolated,
    wait_until,
)
from tests.support.roles.container_runtime import render, value

pytestmark = pytest.mark.root

OUTSIDE = "registry.company.test"
_CERTIFICATES, _PROXY, _MIRRORS = (
    f"container_runtime_{name}" for name in ("ca_certificates", "proxy", "registry_mirrors")
)
# The lock's error without each, and the engines with which it is tested: each has mirrors in a file of its own.
VARIABLES = {
    _CERTIFICATES: ("certificate verify failed", [CONTAINERD]),
    _PROXY: ("can't be reached", [CONTAINERD]),
    _MIRRORS: ("can't be reached", [DOCKER, CONTAINERD]),
}
_ANY = tuple(range(-64, 256))


def walk(lab: Lab, variable: str) -> Result:
    """Lock and pull an image that only one variable leads to, and pull it as a node does."""
    registry._RETRIES = registry.Patience(0)  # what is unreachable here stays unreachable
    image = lab.push("library/walked", MB)
    proxy = lab.serve_proxy(OUTSIDE)
    endpoint = lab.endpoints.pop(OUTSIDE)
    settings: dict[str, Any] = {_CERTIFICATES: {"company": endpoint.ca.read_text()}}
    ref, tunnels = f"{OUTSIDE}/library/walked:1", []
    with ExitStack() as stack:
        if variable == _PROXY:
            known = {OUTSIDE: (endpoint.address, endpoint.port)}
            way = stack.enter_context(connect_proxy(None, known))
            tunnels = way.tunnels
            address = f"http://{way.address[0]}:{way.address[1]}"
            settings[variable] = {"https": address, "no_proxy": ["elsewhere.test"]}
        else:
            lab.names = {OUTSIDE: endpoint.address}
            _name_here(lab)
        if variable == _MIRRORS:
            ref = "docker.io/library/walked:1"
            settings[variable] = {"docker.io": [{"url": f"https://{OUTSIDE}"}]}
        network = _network(lab, settings)
        poor = _declared({name: value for name, value in settings.items() if name != variable})
        result: Result = {"without": told(lambda: locate(ref, PLATFORM, {}, poor.mirrors, poor.outbound))[0]}
        counts = [len(proxy.requests)]
        located = locate(ref, PLATFORM, {}, network.mirrors, network.outbound)
        counts.append(len(proxy.requests))
        with lab.running(lab.folder("state"), network=network) as engine:
            result["bake"] = lab.pull(engine, [located], attempts=1)
            result["has"] = engine.has(located)
        counts.append(len(proxy.requests))
        result["node"] = _pull_as_a_node(lab, parse(ref).at(located.digest), settings)
        counts.append(len(proxy.requests))
        result["asked"] = [after > before for before, after in itertools.pairwise(counts)]
        result["digest"] = located.digest == image.digest
        result["tunnels"] = sorted(set(tunnels))
    return result


def _name_here(lab: Lab) -> None:
    """Let this process resolve the names that the lab's roots resolve."""
    hosts = lab.base / "hosts"
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in lab.names.items())]
    hosts.write_text("\n".join(lines) + "\n")
    namespace.bind(os.fspath(hosts), "/etc/hosts", read_only=True)


def _network(lab: Lab, settings: Mapping[str, Any]) -> Network:
    """Return what a definition with these variables says about the network."""
    image = "worker" if lab.engine == "docker" else "worker_containerd"
    declaration = Declaration(image, json.dumps(settings), ())
    return node_network(define(declaration, lab.folder("inventory")))


def _declared(settings: Mapping[str, Any]) -> Network:
    """Return the same without evaluating a definition."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requirements, "resolved_variables", lambda _: dict(settings))
        return node_network(cast(ImageDefinition, None))


def _pull_as_a_node(lab: Lab, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Start the engine with the files that the role derives from the variables, and pull; return the result."""
    variables = {**settings, "container_runtime_engine": lab.engine}
    binds = {lab.module.DATA_ROOT: lab.folder("state")}
    with open_root(lab.trees, lab.folder("node"), writable_binds=binds, network=True) as root:
        lab.name(root)
        for authority, pem in settings.get(_CERTIFICATES, {}).items():
            file = root.path / f"usr/local/share/ca-certificates/container-runtime-{authority}.crt"
            file.write_text(pem)
        root.run(["update-ca-certificates"])
        for item in value("__container_runtime_files", **variables):
            if "registry" in item:
                file = root.path / f"etc/containerd/certs.d/{item['registry']}/hosts.toml"
                file.parent.mkdir(parents=True)
                file.write_text(render("hosts.toml.j2", item=item, **variables))
        unit = render(f"{lab.engine}.conf.j2", **variables)
        env = dict(re.findall(r'^Environment="(\w+)=([^"]*)"$', unit, re.MULTILINE))
        declared = json.loads(render("daemon.json.j2", **variables)).get("registry-mirrors", [])
        start, ready, pull = (_docker if lab.engine == "docker" else _containerd)(root, name, declared)
        log = lab.base / "node.log"
        with process.background(root.argv(start, env), log=log, stop_seconds=30):
            assert wait_until(lambda: root.run(ready, ok=_ANY).returncode == 0), log.read_text()
            done = root.run(pull, env=env, ok=_ANY)
        return {"status": done.returncode, "text": done.stdout[-500:] + done.stderr[-2000:]}


def _docker(root: Root, name: str, mirrors: list[str]) -> tuple[list[str], list[str], list[str]]:
    config = root.path / "run/daemon.json"
    config.write_text(json.dumps(docker_engine.configuration(3, mirrors)))
    return ["dockerd", "--config-file=/run/daemon.json"], ["docker", "version"], ["docker", "pull", name]


def _containerd(root: Root, name: str, mirrors: list[str]) -> tuple[list[str], list[str], list[str]]:
    (root.path / "run/config.toml").write_text(containerd_engine._CONFIGURATION)
    pull = ["ctr", "images", "pull", "--hosts-dir", "/etc/containerd/certs.d", "--platform", PLATFORM, name]
    return ["containerd", "--config", "/run/config.toml"], ["ctr", "version"], pull


@pytest.mark.parametrize(
    ("variable", "engine"), [(name, engine) for name, (_, engines) in VARIABLES.items() for engine in engines]
)
def test_a_variable_counts_for_lock_bake_and_node(worker: Workplace, variable: str, engine: str) -> None:
    found = isolated(walk, worker, engine, variable)
    assert VARIABLES[variable][0] in found["without"], "something else leads there, too"
    assert found["digest"]
    assert not found["bake"]["bug"] and not found["bake"]["error"] and found["has"], found["bake"]
    assert found["node"]["status"] == 0, found["node"]
    assert found["asked"] == [True, True, True]
    assert found["tunnels"] == ([f"{OUTSIDE}:443"] if variable == _PROXY else [])


# -- where a mirror is the only way out, and fails --------------------------------------------------------------


def _on_manifests(kind: Any, **more: Any) -> tuple[Fault, ...]:
    return tuple(Fault(kind, path="/manifests/", method=method, **more) for method in ("GET", "HEAD"))


# What its mirror does, by image.
FAILURES: Mapping[str, tuple[Fault, ...]] = {
    "absent": _on_manifests("status", status=404),
    "refused": _on_manifests("status", status=403),
    "broken": _on_manifests("status", status=503),
    "silent": _on_manifests("silence"),
    "stalled": (layer_fault("stall", after=300_000),),
}
# Part of the error about the mirror; a layer that stalls only gets the place where it stalled.
SAID = {"absent": "404", "refused": "403", "broken": "503", "silent": "Read timed out"}


def lose_the_mirror(lab: Lab) -> Result:
    """Pull images from Docker Hub, which only a mirror leads to, while it fails; then again once it works."""
    images = {name: lab.push(f"library/{name}", MB) for name in FAILURES}
    mirror = lab.serve_proxy(OUTSIDE)
    endpoint = lab.endpoints.pop(OUTSIDE)
    lab.names = {OUTSIDE: endpoint.address}
    _name_here(lab)
    authorities = {"company": endpoint.ca.read_text()}
    network = _declared(
        {_CERTIFICATES: authorities, _MIRRORS: {"docker.io": [{"url": f"https://{OUTSIDE}"}]}}
    )
    located = {
        name: locate(f"docker.io/library/{name}:1", PLATFORM, {}, network.mirrors, network.outbound)
        for name in images
    }
    mirror.faults = [
        placed(fault, f"library/{name}", located[name])
        for name, faults in FAILURES.items()
        for fault in faults
    ]
    registry._RETRIES, registry._TIMEOUT = registry.Patience(0), urllib3.Timeout(2)

    def locked_error(ref: str) -> str:
        return told(lambda: locate(ref, PLATFORM, {}, network.mirrors, network.outbound))[0]

    result: Result = {"locked": {name: locked_error(located[name].ref) for name in SAID}}
    state = lab.folder("state")
    with lab.running(state, network=network) as engine:
        with ThreadPoolExecutor(len(located)) as threads:
            pulls = {
                name: threads.submit(lab.pull, engine, [image], limits=HASTY, attempts=2)
                for name, image in located.items()
            }
        result["pulled"] = {name: pull.result() for name, pull in pulls.items()}
        result["has"] = [engine.has(image) for image in located.values()]
        mirror.faults = ()
        again = list(located.values())
        result["again"] = [lab.pull(engine, again, attempts=1), [engine.has(image) for image in again]]
    lab.module.strip(state)
    result["partial"] = partial(state)
    return result


def test_a_mirror_that_is_the_only_way_out_and_fails_is_named(worker: Workplace) -> None:
    """Docker passes on only what the registry says; what its mirrors say is asked for by us."""
    found = isolated(lose_the_mirror, worker, DOCKER)
    assert found["has"] == [False] * len(FAILURES)
    for name, case in found["pulled"].items():
        assert not case["bug"], case
        assert case["error"].startswith(f"docker.io/library/{name}:1: "), case
        assert (OUTSIDE if name in SAID else "layer") in case["error"], case
        assert SAID.get(name, "no progress for 0:") in case["error"], case
        assert len(case["records"][0]["attempts"]) == 2, case
    for name, error in found["locked"].items():
        assert f"mirror https://{OUTSIDE}: " in error and SAID[name] in error, error
    again, has = found["again"]
    assert not again["error"] and all(has) and found["partial"] == []
