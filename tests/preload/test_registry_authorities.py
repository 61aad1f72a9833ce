"""CAs and mirrors of registries on a live node: what the role wrote earlier goes away once it is no longer declared."""

from __future__ import annotations

import os
from typing import Any

import pytest

from image_builder.bake import ansible
from image_builder.lab import certificate
from image_builder.settings import Settings
from image_builder.system.sandbox import Root, open_root
from tests.support.images.builds import REPO, Workplace
from tests.support.registries.pulls import Lab, Result, isolated

pytestmark = pytest.mark.root

_FOLDER = "usr/local/share/ca-certificates"
# The parts of the role on a booted node that don't need systemd: its files and its CAs, but none of its units.
_PLAY = """---
- name: Configure a live node
  hosts: images
  gather_facts: false
  tasks:
    - name: Configure the engines
      ansible.builtin.include_role:
        name: container_runtime
        tasks_from: configure.yml
"""


def configure(lab: Lab, root: Root, **variables: Any) -> int:
    """Run the role's configuration; return how many tasks changed something."""
    work = lab.folder("play")
    (work / "play.yml").write_text(_PLAY)
    play = ansible.play(
        work / "play.yml",
        "worker",
        inventories=[REPO / "inventories/lab"],
        root=root.path,
        environment_in_root=root.environment,
        variables={
            "__container_runtime_units": [],
            "target_booted": True,
            **variables,
        },
        work=work,
        log=lab.base / "play.log",
        roles=[REPO / "roles"],
        collections=[],
        config=REPO / "ansible.cfg",
        doing=lambda _: None,
        python=Settings().python,
    )
    return play.changed


# What is declared, run after run; "other" belongs to someone else, and is there all the time.
STEPS = {"two": ("new", "old"), "two again": ("new", "old"), "one": ("new",), "none": (), "none again": ()}
_CERTS = "etc/containerd/certs.d"


def take_back(lab: Lab) -> Result:
    """Declare CAs and mirrors of two registries, of one, then of none; others' are there all the time."""
    pems = {
        name: certificate.make(f"{name}.test", lab.folder(name)).ca.read_text()
        for name in ("new", "old", "other")
    }
    found: Result = {}
    with open_root(lab.trees, lab.folder("root")) as root:
        (root.path / _FOLDER / "other.crt").write_text(pems["other"])
        for name in pems:
            (root.path / _CERTS / f"{name}.test").mkdir(parents=True)
        (root.path / _CERTS / "other.test/hosts.toml").write_text('server = "https://elsewhere.test"\n')
        for step, declared in STEPS.items():
            if step == "none":  # as a run leaves it that was stopped before it updated the trust store
                (root.path / _FOLDER / "container-runtime-new.crt").unlink()
            changed = configure(
                lab,
                root,
                container_runtime_engine="containerd",
                container_runtime_install=["docker", "containerd"],
                container_runtime_ca_certificates={name: pems[name] for name in declared},
                container_runtime_registry_mirrors={
                    f"{name}.test": [{"url": "https://mirror.test"}] for name in declared
                },
            )
            found[step] = {"changed": changed, **_on_disk(root, pems)}
    return found


def _on_disk(root: Root, pems: dict[str, str]) -> Result:
    """Return whose CAs have files and links, which are trusted, and whose registries have mirrors."""
    bundle = (root.path / "etc/ssl/certs/ca-certificates.crt").read_text()
    links = (path for path in (root.path / "etc/ssl/certs").iterdir() if path.is_symlink())
    targets = [path.readlink().name for path in links if os.fspath(path.readlink()).startswith(f"/{_FOLDER}")]
    return {
        "files": sorted(path.name for path in (root.path / _FOLDER).iterdir()),
        "links": sorted(targets),
        "trusted": sorted(name for name, pem in pems.items() if pem.strip() in bundle),
        "mirrors": sorted(path.parent.name for path in (root.path / _CERTS).glob("*/hosts.toml")),
    }


@pytest.mark.slow
def test_what_is_declared_no_more_is_trusted_and_asked_no_more(worker: Workplace) -> None:
    found = isolated(take_back, worker, "docker")
    for step, declared in STEPS.items():
        names = [*declared, "other"]
        files = [f"container-runtime-{name}.crt" if name != "other" else "other.crt" for name in names]
        assert found[step]["files"] == found[step]["links"] == files, step
        assert found[step]["trusted"] == names, step
        assert found[step]["mirrors"] == [f"{name}.test" for name in names], step
        assert (found[step]["changed"] == 0) == step.endswith("again"), step
