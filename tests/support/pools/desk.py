"""The desk of a roll's operator: an inventory, keys, and the facts of the new build."""

from __future__ import annotations

import json
import os
import subprocess

from image_builder.verify.runner import FACTS
from tests.support.arm.fleet import BUILDS, NEW
from tests.support.pools.rolls import World


def write_desk(fleet: World) -> list[str]:
    """Write what an operator has: an inventory, keys, and the facts of the new build; return the options of a run."""
    folder = fleet.folder
    lines = [
        f"        {h.name}: {{ansible_host: 192.0.2.{n}, pool_scale_set: {h.scale_set}, pool_vm_id: {h.vm_id},"
        f" pool_scale_set_id: {h.scale_set_id}, pool_instance_id: '{h.instance}', pool_zone: '{h.zone}'}}\n"
        for n, h in enumerate(fleet.hosts, 1)
    ]
    head = "all:\n  children:\n    gpu:\n      vars: {pool_image: worker, pool_vm_size: s}\n      hosts:\n"
    (folder / "hosts.yml").write_text(head + "".join(lines))
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    (folder / "authorities").write_text(f"@cert-authority * {(folder / 'key.pub').read_text()}")
    facts = dict.fromkeys(FACTS, "") | {"image": "worker", "build_id": BUILDS[NEW] + "0" * 52}
    (folder / "facts.json").write_text(json.dumps(facts))
    files = {"--host-ca": "authorities", "--key": "key", "--facts": "facts.json"}
    options = [text for option, file in files.items() for text in (option, os.fspath(folder / file))]
    return [*options, "--kubeconfig", os.fspath(fleet.account())]
