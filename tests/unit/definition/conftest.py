"""A small repository with roles and layers, and inventories for it, written afresh for each test."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from image_builder.cli import init
from image_builder.definition import Inventory, load_inventory
from image_builder.settings import VaultId

REPOSITORY = {
    "playbooks/layers/system.yml": """
        - name: Bake the system
          hosts: images
          gather_facts: false
          roles:
            - role: system
        """,
    "playbooks/layers/runtime.yml": """
        - name: Bake the runtime
          hosts: images
          gather_facts: false
          roles:
            - role: runtime
              vars:
                runtime_swap: "{{ system_swap | default(false) }}"
        """,
    "roles/system/defaults/main.yml": """
        system_swap: false
        system_packages: [chrony]
        system_mode: loose
        system_limits: {}
        """,
    "roles/system/vars/main.yml": """
        __system_packages: >-
          {{ ['systemd'] + system_packages + (['new'] if image_base.suite == 'trixie' else []) }}
        __system_kernel: "{{ ansible_facts['kernel'] }}"
        """,
    "roles/system/meta/argument_specs.yml": """
        argument_specs:
          main:
            short_description: The system
            options:
              system_swap: {type: bool, description: Keep swap on}
              system_packages: {type: list, elements: str, description: [Packages, Sorted]}
              system_mode: {type: str, choices: [loose, tight], description: "How | tight"}
              system_limits:
                type: dict
                description: Limits
                options:
                  nofile: {type: int, description: Files}
        """,
    "roles/system/README.md": "text",
    "roles/system/molecule/default/molecule.yml": "---\n",
    "roles/system/tasks/main.yml": "- ansible.builtin.debug:\n",
    "roles/runtime/defaults/main.yml": """
        runtime_version: "1.1"
        runtime_swap: false
        runtime_repository: {}
        runtime_archive: {}
        """,
    "roles/runtime/vars/main.yml": """
        __runtime_packages: "{{ ['engine=' ~ runtime_version ~ '.*'] }}"
        __runtime_repositories: "{{ [runtime_repository] if runtime_repository else [] }}"
        __runtime_archives: "{{ [runtime_archive] if runtime_archive else [] }}"
        __runtime_problems: >-
          {{ [] if runtime_version in __runtime_versions
             else ['runtime_version: ' ~ runtime_version ~ ' is not known; known are '
                   ~ __runtime_versions | join(', ')] }}
        """,
    "roles/runtime/vars/versions.yml": """
        __runtime_versions: {"1.1": {}, "1.2": {}}
        """,
    "roles/runtime/meta/argument_specs.yml": """
        argument_specs:
          main:
            options:
              runtime_version: {type: str}
              runtime_swap: {type: bool}
              runtime_repository: {type: dict}
              runtime_archive: {type: dict}
              runtime_token: {type: str, required: true}
        """,
}

HOSTS = """
    all:
      children:
        images:
          hosts:
            plain:
          children:
            workers:
              hosts:
                worker:
    """

IMAGES = """
    image_base: {suite: trixie}
    image_layers:
      - system
    """

Load = Callable[..., Inventory]


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"))


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    write(root, REPOSITORY)
    return root


@pytest.fixture
def load(tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a function that writes an inventory's files and loads it; locations are relative to it."""
    root = tmp_path / "inventory"
    root.mkdir()
    monkeypatch.chdir(root)

    def go(*passwords: Path | VaultId, **files: str) -> Inventory:
        named = {name.replace("__", "/") + ".yml": text for name, text in files.items()}
        write(root, {"hosts.yml": HOSTS, "group_vars/images.yml": IMAGES, **named})
        vault = [one if isinstance(one, VaultId) else VaultId("default", one) for one in passwords]
        return load_inventory([root], vault, repo_root=repo)

    return go


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a repository as `init` creates it, in a directory whose name needs quoting."""
    place = tmp_path / "images of the büro"
    shutil.copytree(init.TEMPLATE, place)
    return place


@pytest.fixture
def site(project: Path) -> Path:
    """Return the project; its image has only the layer that is its own, as reading ours takes most of the time."""
    images = project / "inventories/site/group_vars/images.yml"
    images.write_text(images.read_text().replace("  - system\n", "  # system\n"))
    return project


def lines(inventory: Inventory) -> list[str]:
    """Return all problems as they are printed."""
    return [str(p) for p in inventory.problems()]
