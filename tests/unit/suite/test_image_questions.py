"""A target's answers as the suite processes them, tested without a target: split, merged, narrowed down."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from types import ModuleType

import pytest
import testinfra

from image_builder.settings import SUITE

# As systemd 257 prints them; 252 has the line about a missing file.
PRINTED = """\
# /usr/lib/systemd/journald.conf
# Entries in this file show the compile time defaults.
# /etc/passwd
[Journal]
#Storage=auto

# /etc/systemd/journald.conf.d/90-image.conf
[Journal]
SystemMaxUse=1G


# Main configuration file systemd/nothing.conf not found


# /etc/systemd/system/x.service
[Service]
ExecStart=/bin/x
"""


@pytest.fixture(scope="module")
def suite() -> Iterator[dict[str, ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(os.fspath(SUITE))
        yield {
            name: importlib.import_module(name)
            for name in ("answers", "cloud_config", "preloaded", "questions", "suite", "tree")
        }


def test_merged_configurations_are_told_apart(suite: dict[str, ModuleType]) -> None:
    names = ("systemd/journald.conf", "systemd/nothing.conf", "systemd/system/x.service")
    found = suite["questions"].texts_of(PRINTED, names)
    assert list(found) == list(names)
    settings = {
        name: [line for line in text.splitlines() if line[:1] not in ("#", "")]
        for name, text in found.items()
    }
    assert settings == {
        "systemd/journald.conf": ["[Journal]", "[Journal]", "SystemMaxUse=1G"],
        "systemd/nothing.conf": [],
        "systemd/system/x.service": ["[Service]", "ExecStart=/bin/x"],
    }


def test_the_first_of_two_configurations_wins(suite: dict[str, ModuleType]) -> None:
    merge = suite["cloud_config"].merge
    first = {"a": 1, "list": [1], "none": None, "deep": {"x": 1, "y": {"z": 0}}, "was": {"k": 1}, "text": "t"}
    second = {
        "a": 2,
        "list": [2],
        "none": {"n": 1},
        "deep": {"x": 2, "y": {"w": 1}},
        "was": 3,
        "new": {"m": 1},
    }
    assert merge(first, second) == {**first, "deep": {"x": 1, "y": {"z": 0, "w": 1}}, "new": {"m": 1}}
    assert first["deep"] == {"x": 1, "y": {"z": 0}}


def test_modules_count_whether_they_are_built_in_or_not(suite: dict[str, ModuleType]) -> None:
    folder = "/usr/lib/modules/6.12-amd64"
    lists = {
        f"{folder}/modules.dep": "kernel/drivers/md/dm-verity.ko.xz: kernel/drivers/md/dm-bufio.ko.xz\n",
        f"{folder}/modules.builtin": "kernel/fs/erofs/erofs.ko\n",
        "/usr/lib/modules/6.1/modules.dep": "",
    }
    modules = {"6.12-amd64": {"dm_verity", "erofs"}, "6.1": set()}
    assert suite["preloaded"].kernel_modules(lists) == modules


ODD = [
    ("ff 644 0 0", 5, "/etc/with\ttab\nand line", ""),
    ("lf 777 0 0", 7, "/etc/a", "b\tc\nd"),
    ("lN 777 0 0", 4, "/usr/dead", "gone"),
    ("dd 1777 0 0", 40, "/tmp", ""),
    ("ff 4755 0 0", 9, "/usr/bin/sudo", ""),
    ("ff 644 1000 7", 9, "/usr/bin/mine", ""),
    ("ff 644 0 0", 9, "/usr2", ""),
    ("ff 644 0 0", 9, "/not \udcff utf-8", ""),
]


def listing(entries: Iterable[tuple[str, int, str, str]]) -> bytes:
    return os.fsencode("".join(f"{status}\0{size}\0{path}\0{link}\0" for status, size, path, link in entries))


def test_a_listing_is_split_whatever_files_are_called(suite: dict[str, ModuleType]) -> None:
    entries = [*ODD, *(("ff 644 0 0", 1, f"/n/{n}", "") for n in range(1000))]
    module = suite["tree"]
    tree = module.Tree(listing(entries))
    assert tree["/etc/a"] == module.Entry("/etc/a", "l", "f", 0o777, 0, 0, 7, "b\tc\nd")
    assert tree["/not \udcff utf-8"].size == 9
    assert [entry.path for entry in tree.under("/etc")] == ["/etc/a", "/etc/with\ttab\nand line"]
    assert list(tree.below("/usr/")) == ["/usr/bin/mine", "/usr/bin/sudo", "/usr/dead"]
    assert "/usr" not in tree and tree.get("/usr") is None
    with pytest.raises(AssertionError, match=r"/usr does not exist"):
        tree["/usr"]
    assert [entry.path for entry in tree.where(lambda s: s.mode & 0o4000)] == ["/usr/bin/sudo"]
    assert [entry.path for entry in tree.where(lambda s: s.kind == "l", "/usr", "/opt")] == ["/usr/dead"]
    assert tree.without("/usr", {"/usr/dead", "/usr/x"}) == ["/usr/bin/mine", "/usr/bin/sudo"]
    assert tree.matching(r"/n/9\d?9", having="99") == ["/n/99", "/n/999"]
    assert tree.matching(r".*", having="a") == ["/etc/a", "/etc/with\ttab\nand line", "/usr/dead"]
    assert tree.matching(r".*b.*", having="usr") == ["/usr/bin/mine", "/usr/bin/sudo"]
    assert tree.matching(r".*", having="nobody") == []
    assert tree.matching(r"/usr/dead|/tmp") == ["/tmp", "/usr/dead"]
    statuses: set[object] = set()
    assert tree.where(statuses.add) == []
    assert len(statuses) == 6


@pytest.mark.parametrize(
    ("wanted", "link", "starts"), [(True, "", True), (True, "/dev/null", False), (False, "", False)]
)
def test_a_masked_unit_does_not_start_at_boot(
    suite: dict[str, ModuleType], wanted: bool, link: str, starts: bool
) -> None:
    folder = "/etc/systemd/system"
    entries = [("ff 644 0 0", 1, f"/n/{n}", "") for n in range(1001)]
    entries += [("lf 777 0 0", 1, f"{folder}/multi-user.target.wants/a.service", "/x")] * wanted
    entries += [("lc 777 0 0", 1, f"{folder}/a.service", link)] * bool(link)
    assert suite["suite"].starts_at_boot(suite["tree"].Tree(listing(entries)), "a.service") is starts


def test_a_listing_that_is_not_one_of_a_system_is_none(suite: dict[str, ModuleType]) -> None:
    with pytest.raises(AssertionError, match="find saw only 8 files"):
        suite["tree"].Tree(listing(ODD))


def test_a_question_that_failed_is_not_asked_again(suite: dict[str, ModuleType]) -> None:
    host = testinfra.get_host("local://")
    asked: list[int] = []

    def fail() -> str:
        asked.append(1)
        raise AssertionError("it failed")

    def break_off() -> str:
        asked.append(2)
        raise ConnectionError

    for _ in range(2):
        with pytest.raises(AssertionError, match="it failed"):
            suite["answers"].once(host, "a", fail)
        with pytest.raises(ConnectionError):
            suite["answers"].once(host, "b", break_off)
    assert asked == [1, 2, 2]
