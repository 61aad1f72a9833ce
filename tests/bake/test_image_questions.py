"""The suite's shortcuts to an answer: on a real image, they give the same result as the program itself."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import testinfra
from testinfra.host import Host

from image_builder.settings import SUITE
from image_builder.system.namespace import run_isolated
from image_builder.system.sandbox import open_root
from tests.support.images.builds import Workplace

pytestmark = pytest.mark.root

D = "etc/cloud/cloud.cfg.d"
# Files next to cloud.cfg, and whether cloud-init itself then has to be asked.
CONFIGURATIONS: tuple[tuple[dict[str, str], bool], ...] = (
    ({}, False),
    (
        {
            f"{D}/99-later.cfg": "datasource_list: [ None ]\nsystem_info: {default_user: {name: x, groups: null}}\n",
            f"{D}/.hidden.cfg": "ssh_pwauth: true\nresize_rootfs: {a: 1}\n",
            f"{D}/99-text.txt": "disable_root: false\n",
            f"{D}/97-empty.cfg": "",
            f"{D}/96-comment.cfg": "# nothing\n",
            f"{D}/95-folder.cfg/x.cfg": "disable_root: false\n",
            f"{D}/94-ü.cfg": "hostname: ü\ngrowpart: [1, 2]\n",
        },
        False,
    ),
    (
        {
            f"{D}/99-append.cfg": "merge_how: list(append)+dict(recurse_array)+str()\ncloud_init_modules: [x]\n"
        },
        True,
    ),
    ({f"{D}/99-no-mapping.cfg": "- one\n"}, True),
    ({"etc/other/x.cfg": "disable_root: false\n", "etc/cloud/cloud.cfg": "conf_d: /etc/other\na: 1\n"}, True),
)


def on_image(place: Workplace, work: Path, look: Callable[[Path, dict[str, ModuleType]], None]) -> None:
    """Run ``look`` with a writable root of an image, and the suite's modules."""

    def isolated() -> int:
        names = ("answers", "cloud_config", "questions")
        with pytest.MonkeyPatch.context() as patch, open_root(place.sealed()[0], work) as root:
            patch.syspath_prepend(os.fspath(SUITE))
            look(root.path, {name: importlib.import_module(name) for name in names})
        return 0

    assert run_isolated(isolated) == 0


def enter(root: Path) -> Host:
    """Return a host that hasn't been asked anything yet."""
    host: Host = testinfra.get_host(os.fspath(root), connection="chroot")
    vars(host).pop("answers", None)  # testinfra has one host for each root
    return host


def test_cloud_inits_configuration_is_the_one_that_it_merges(minimal: Workplace, tmp_path: Path) -> None:
    def look(root: Path, suite: dict[str, ModuleType]) -> None:
        for added, asked in CONFIGURATIONS:
            before = {name: (root / name).read_text() for name in added if (root / name).exists()}
            for name, text in added.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            host = enter(root)
            found, own = suite["cloud_config"].cloud_config(host), suite["cloud_config"].its_own(host)
            assert found == own, added
            assert len(own) > 1
            assert (suite["cloud_config"].merged_here(host) is None) == asked, added
            for name in added:
                (root / name).unlink()
            for name, text in before.items():
                (root / name).write_text(text)

    on_image(minimal, tmp_path, look)


def test_answers_together_are_those_of_each_question(minimal: Workplace, tmp_path: Path) -> None:
    def look(root: Path, suite: dict[str, ModuleType]) -> None:
        asked, host = suite["questions"], enter(root)
        (root / "etc/modules-load.d/no-end.conf").write_bytes(b"a\r\n\xff\0b\n\nlast")
        (root / "etc/modules-load.d/empty.conf").touch()
        (root / "etc/modules-load.d/nowhere.conf").symlink_to("/nowhere")
        os.mkfifo(root / "etc/modules-load.d/fifo.conf")
        (root / "etc/fstab").write_text("")
        (root / "etc/waagent.conf").unlink(missing_ok=True)
        texts = suite["answers"].files(host)
        assert texts["/etc/fstab"] == "" and "/etc/waagent.conf" not in texts
        assert texts.pop("/etc/modules-load.d/no-end.conf").encode("utf-8", "surrogateescape") == (
            b"a\r\n\xff\0b\n\nlast\n"
        )
        in_etc = {path: text for path, text in texts.items() if path.startswith("/etc/")}
        assert {"/etc/passwd", "/etc/cloud/cloud.cfg", "/etc/fstab"} <= in_etc.keys()
        assert in_etc == {path: host.run("cat %s", path).stdout for path in in_etc}
        assert not {"/etc/modules-load.d/empty.conf", "/etc/modules-load.d/nowhere.conf"} & in_etc.keys()

        units = ["ssh.service", "no-such.service", "swap.target", "apt-daily.timer"]
        states = asked.unit_states(host, units)
        assert states == {unit: host.run("systemctl is-enabled %s", unit).stdout.strip() for unit in units}
        assert states["swap.target"] == "masked"

        for name in asked.CONFIGURATIONS:
            own = host.run("systemd-analyze cat-config %s", name).stdout
            assert lines(asked.merged(host, name)) == lines(own), name
        held = host.run("apt-mark showhold").stdout.split()
        assert sorted(n for n, package in asked.packages(host).items() if package.held) == held != []

        names = ("growpart", "no-such-program", "sh", "make")
        assert (
            asked.programs(host, names)
            == {n for n in names if host.run("command -v %s", n).rc == 0}
            >= {"growpart"}
        )

        program, stray = "/usr/bin/env", "/usr/bin/stray"
        for path in (program, stray, "/usr/bin", "/etc/passwd"):
            assert (path in asked.owned_files(host)) == (host.run("dpkg-query --search %s", path).rc == 0), (
                path
            )

    on_image(minimal, tmp_path, look)


def test_an_answer_follows_the_files_that_it_comes_from(minimal: Workplace, tmp_path: Path) -> None:
    """Drop-ins override by name, and an empty one in /etc hides that in /usr/lib."""

    def look(root: Path, suite: dict[str, ModuleType]) -> None:
        asked, packages = suite["questions"], importlib.import_module("test_packages")

        def answers() -> tuple[bool, bool, bool]:
            host = enter(root)
            return (
                "SyncIntervalSec=7s" in asked.merged(host, "systemd/journald.conf"),
                "kernel.domainname" in asked.boot_sysctls(host),
                any("http://probe.test" in line for line in asked.apt_settings(host)),
            )

        assert answers() == (False, False, False)
        for path, text in (
            ("usr/lib/systemd/journald.conf.d/50-probe.conf", "[Journal]\nSyncIntervalSec=7s\n"),
            ("usr/lib/sysctl.d/50-probe.conf", "kernel.domainname = probe\n"),
            ("etc/apt/apt.conf.d/99probe.bak", 'Acquire::http::Proxy "http://probe.test/";\n'),
        ):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        assert answers() == (True, True, False)
        (root / "etc/apt/apt.conf.d/99probe.bak").rename(root / "etc/apt/apt.conf.d/99probe")
        assert answers() == (True, True, True)
        for hidden in ("etc/systemd/journald.conf.d/50-probe.conf", "etc/sysctl.d/50-probe.conf"):
            (root / hidden).parent.mkdir(parents=True, exist_ok=True)
            (root / hidden).touch()
        assert answers() == (False, False, True)

        packages.test_dpkg_has_no_unfinished_work(enter(root))
        (root / "var/lib/dpkg/info/bash.list").unlink()
        with pytest.raises(AssertionError):
            packages.test_dpkg_has_no_unfinished_work(enter(root))

    on_image(minimal, tmp_path, look)


def lines(text: str) -> list[str]:
    """Return a configuration's lines without comments and blank lines."""
    return [line for line in text.splitlines() if line.strip() and line[0] != "#"]
