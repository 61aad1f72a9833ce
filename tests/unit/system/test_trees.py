"""The parts of a file and a role that count in a digest."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.definition import layer_reading, load_inventory
from image_builder.system.trees import file_digest, file_digests, named_digests

FOLDERS = (
    *("defaults", "vars", "meta", "tasks", "handlers", "templates", "files"),
    *("library", "module_utils", "action_plugins", "filter_plugins", "lookup_plugins", "test_plugins"),
)
INVENTORY = "images: {hosts: {worker: {image_base: {suite: trixie}, image_layers: [mine]}}}\n"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_of_a_role_counts(tmp_path: Path, folder: str) -> None:
    (tmp_path / "playbooks/layers").mkdir(parents=True)
    (tmp_path / "playbooks/layers/mine.yml").write_text("- hosts: images\n  roles: [mine]\n")
    (tmp_path / "roles/mine/tasks").mkdir(parents=True)
    (tmp_path / "roles/mine/tasks/main.yml").write_text("[]\n")
    (tmp_path / "hosts.yml").write_text(INVENTORY)
    file = tmp_path / "roles/mine" / folder / "deeper/file"
    file.parent.mkdir(parents=True)
    found = []
    for text in ("old", "new"):
        file.write_text(text)
        definition = load_inventory([tmp_path / "hosts.yml"], repo_root=tmp_path).define("worker")
        found.append(named_digests(layer_reading(definition, "mine").files))
    old, new = found
    assert {name for name in new if old[name] != new[name]} == {f"roles/mine/{folder}/deeper/file"}


@pytest.mark.parametrize(
    ("mode", "executable"), [(0o644, False), (0o744, True), (0o645, False), (0o654, False)]
)
def test_the_owners_executable_bit_counts_alone(tmp_path: Path, mode: int, executable: bool) -> None:
    (tmp_path / "script").write_text("x")
    (tmp_path / "script").chmod(mode)
    assert file_digest(tmp_path / "script").endswith("+x") is executable


def test_a_link_counts_by_where_it_leads_and_what_is_there(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text("same")
    link = tmp_path / "link"
    digests = []
    for target, text in (("one", "same"), ("two", "same"), ("two", "other"), ("nowhere", "")):
        (tmp_path / "two").write_text(text)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        digests.append(file_digest(link))
    assert len({*digests, file_digest(tmp_path / "one")}) == 5


def test_a_linked_folder_counts_once(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/ca.pem").write_text("x")
    (tmp_path / "shared/round").symlink_to(tmp_path)
    (tmp_path / "role").mkdir()
    (tmp_path / "role/files").symlink_to("../shared")
    assert "role/files/ca.pem" in file_digests(tmp_path, [tmp_path / "role"])


def test_a_second_link_to_a_folder_counts_in_a_role(tmp_path: Path) -> None:
    (tmp_path / "playbooks/layers").mkdir(parents=True)
    (tmp_path / "playbooks/layers/mine.yml").write_text("- hosts: images\n  roles: [mine]\n")
    files = tmp_path / "roles/mine/files"
    for version in ("v1", "v2"):
        (files / version).mkdir(parents=True)
        (files / version / "a.conf").write_text(version)
    (tmp_path / "hosts.yml").write_text(INVENTORY)

    def counted() -> dict[str, str]:
        definition = load_inventory([tmp_path / "hosts.yml"], repo_root=tmp_path).define("worker")
        return named_digests(layer_reading(definition, "mine").files)

    plain = counted()
    own = {f"roles/mine/files/{version}/a.conf" for version in ("v1", "v2")}
    assert set(plain) == {"playbooks/layers/mine.yml", *own}
    found = []
    for target in ("v1", "v2", None):
        for name in ("a", "b", "c"):
            (files / name).unlink(missing_ok=True)
            (files / name).symlink_to("v1" if name != "b" or not target else target)
        if not target:
            (files / "b").unlink()
        found.append(counted())
        assert plain.items() <= found[-1].items()  # other files count as they did
    assert all(found[n] != found[n - 1] for n in range(3))
    # Links may lead to files that only the image has, or nowhere.
    for name, target in (("x.service", "/usr/lib/systemd/system/x.service"), ("loop.yml", "loop.yml")):
        (files / name).symlink_to(target)
        assert f"roles/mine/files/{name}" in counted()


@pytest.mark.parametrize("name", ["README.md", "molecule/x.yml", "__pycache__/x", "a.pyc", "a.swp", "a~"])
def test_notes_and_leftovers_do_not_count(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
    assert file_digests(tmp_path, [tmp_path]) == {}
