"""The launcher: what it refuses before it changes anything, and the venv that it makes.

A copy of the launcher is in a checkout of its own; its lock is empty, so making a venv takes seconds and no network.
Anyone who runs these tests has already installed the real lock.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from image_builder import errors
from image_builder.settings import REPO_ROOT
from tests.support.users import open_to_all

pytestmark = pytest.mark.root

NOBODY = 65534
TABLE = "image_builder/system/host.txt"


@dataclass(frozen=True)
class Checkout:
    """A directory with a launcher, and the environment to start it in."""

    path: Path
    bin: Path
    python: Path

    def start(
        self, *argv: str, uid: int | None = None, path: str | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.path / "image-builder", *argv],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            user=uid,
            env={**self.environment, **({"PATH": path} if path else {}), **env},
        )

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/nonexistent",
            "IMAGE_BUILDER_PYTHON": str(self.python),
        }

    @property
    def venv(self) -> Path:
        return self.path / ".venv"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide an interpreter that makes a venv by copying one: `python -m venv` takes seconds for pip alone."""
    folder = tmp_path_factory.mktemp("python")
    subprocess.run(["/usr/bin/python3", "-m", "venv", folder / "venv"], check=True)
    script = folder / "python3"
    script.write_text(
        f'#!/bin/sh\n[ "$1 $2" = "-m venv" ] && exec cp -a {folder}/venv "$4"\nexec /usr/bin/python3 "$@"\n'
    )
    script.chmod(0o755)
    return script


@pytest.fixture
def checkout(tmp_path: Path, python: Path) -> Checkout:
    open_to_all(tmp_path)
    path = tmp_path / "check out"  # with a space on purpose
    for folder in ("cli", "system"):
        (path / "image_builder" / folder).mkdir(parents=True)
    shutil.copy(REPO_ROOT / "image-builder", path)
    shutil.copy(REPO_ROOT / TABLE, path / TABLE)
    (path / "requirements.lock").write_text("# nothing\n")
    (path / "image_builder/__init__.py").touch()
    (path / "image_builder/cli/__init__.py").touch()
    (path / "image_builder/cli/__main__.py").write_text(
        "import os, sys\nprint('cli', os.geteuid(), *sys.argv[1:], '|', sys.prefix)\n"
    )
    programs = tmp_path / "bin"
    programs.mkdir()
    return Checkout(path, programs, python)


def _os_release(folder: Path, text: str) -> str:
    file = folder / "os-release"
    file.write_text(text)
    return str(file)


def test_the_venv_is_made_once_and_used(checkout: Checkout) -> None:
    first = checkout.start("images", "a b", IMAGE_BUILDER_PYTHON="")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"cli 0 images a b | {checkout.venv}\n"
    assert "setting up .venv" in first.stderr
    second = checkout.start("images")
    assert (second.returncode, second.stderr) == (0, "")


@pytest.mark.parametrize(
    "name", ["{place}/image-builder", "./image-builder", "image-builder", "sh image-builder"]
)
def test_a_line_to_paste_starts_the_same_program(checkout: Checkout, name: str) -> None:
    """It is read as the launcher's program prints it, and given to a shell."""
    (checkout.path / "image_builder/cli/__main__.py").write_text(
        f"import sys\nsys.path[:0] = {[str(REPO_ROOT), *filter(None, sys.path)]!r}\n"
        "for name in [name for name in sys.modules if name.startswith('image_builder')]: del sys.modules[name]\n"
        "from image_builder.cli import failure\nprint(failure.command_line() + ' --shell-on-failure')\n"
    )
    checkout.start("images")  # makes its venv
    environment = {**os.environ, "PATH": f"{checkout.path}:{os.environ['PATH']}"}

    def line(command: str) -> str:
        return subprocess.run(
            ["sh", "-euc", command],
            cwd=checkout.path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    printed = line(f"{name.replace('{place}', shlex.quote(str(checkout.path)))} images 'a b'")
    assert printed.endswith(" images 'a b' --shell-on-failure")
    assert line(printed) == f"{printed} --shell-on-failure"


def test_a_second_start_adds_little(checkout: Checkout) -> None:
    checkout.start("images")
    python: list[str | Path] = [checkout.venv / "bin/python", "-P", "-m", "image_builder.cli"]

    def best(argv: list[str | Path]) -> float:
        """Return the CPU seconds that a start takes, however busy the machine is."""
        seconds = []
        for _ in range(5):
            before = os.times()
            subprocess.run(argv, check=True, capture_output=True, env={"PYTHONPATH": str(checkout.path)})
            after = os.times()
            seconds.append(sum(after[2:4]) - sum(before[2:4]))  # of children
        return min(seconds)

    assert best([checkout.path / "image-builder", "images"]) - best([*python, "images"]) < 0.3


@pytest.mark.parametrize("harm", ["no stamp", "another lock", "no interpreter", "another place"])
def test_a_half_made_or_outdated_venv_is_redone(checkout: Checkout, harm: str) -> None:
    checkout.start("images")
    left_over = checkout.venv / "left-over"
    left_over.touch()
    stamp = checkout.venv / ".stamp"
    match harm:
        case "no stamp":
            stamp.unlink()
        case "another lock":
            (checkout.path / "requirements.lock").write_text("# something else\n")
        case "no interpreter":
            (checkout.venv / "bin/python").unlink()
        case _:
            stamp.write_text(stamp.read_text().replace(str(checkout.path), "/elsewhere"))
    done = checkout.start("images")
    assert done.returncode == 0, done.stderr
    assert "setting up .venv" in done.stderr
    assert not left_over.exists()


def test_two_first_starts_make_one_venv(checkout: Checkout) -> None:
    both = [
        subprocess.Popen(
            [checkout.path / "image-builder", "images"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=checkout.environment,
        )
        for _ in range(2)
    ]
    told = [child.communicate() for child in both]
    assert [child.returncode for child in both] == [0, 0], told
    assert sum("setting up .venv" in err for _, err in told) == 1


def test_a_wrong_hash_is_refused_and_leaves_no_finished_venv(checkout: Checkout, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "nothing-1.0-py3-none-any.whl").write_bytes(b"not what was promised")
    (checkout.path / "requirements.lock").write_text(f"nothing==1.0 --hash=sha256:{'0' * 64}\n")
    done = checkout.start("images", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels), PIP_CONFIG_FILE="/dev/null")
    assert done.returncode == errors.FetchError.exit_code
    assert "requirements.lock" in done.stderr and "hint:" in done.stderr
    assert not (checkout.venv / ".stamp").exists()


def test_the_venv_belongs_to_the_owner_of_the_checkout(checkout: Checkout) -> None:
    subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", checkout.path], check=True)
    assert checkout.start("images").returncode == 0
    owners = {p.lstat().st_uid for p in checkout.path.rglob("*")}
    assert owners == {NOBODY}


@pytest.mark.parametrize(
    ("release", "accepted"),
    [
        ('ID=debian\nVERSION_ID="12"\n', True),
        ('ID=debian\nVERSION_ID="13"\n', True),
        ('ID=ubuntu\nVERSION_ID="24.04"\n', True),
        ('ID=ubuntu\nVERSION_ID="22.04"\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n', False),
        ('PRETTY_NAME="Debian GNU/Linux forky/sid"\nID=debian\n', False),
        ('ID="rhel"\nVERSION_ID="9.4"\nPRETTY_NAME="Red Hat 9.4"', False),
    ],
)
def test_hosts(checkout: Checkout, tmp_path: Path, release: str, accepted: bool) -> None:
    done = checkout.start("images", IMAGE_BUILDER_OS_RELEASE=_os_release(tmp_path, release))
    if accepted:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == errors.HostError.exit_code
    assert "is not supported: image-builder runs on Debian 12, Debian 13 and Ubuntu 24.04" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not checkout.venv.exists()


def test_no_root_and_no_sudo(checkout: Checkout) -> None:
    for name in ("readlink", "id", "sh", "stat"):
        (checkout.bin / name).symlink_to(f"/usr/bin/{name}")
    done = checkout.start("build", "worker", uid=NOBODY, path=str(checkout.bin))
    assert done.returncode == errors.HostError.exit_code
    assert "image-builder build needs root, and this host has no sudo" in done.stderr
    assert not checkout.venv.exists()


def test_root_by_sudo_keeps_the_arguments_and_what_matters_of_the_environment(checkout: Checkout) -> None:
    assert checkout.start("images").returncode == 0
    for name in ("readlink", "id", "sh", "stat", "sha256sum"):
        (checkout.bin / name).symlink_to(f"/usr/bin/{name}")
    sudo = checkout.bin / "sudo"
    sudo.write_text('#!/bin/sh\nprintf "[%s]" "$@"\necho "${DOCKER_CONFIG-none}" >&2\n')
    sudo.chmod(0o755)
    launcher = checkout.path / "image-builder"
    # This host may lack packages that a build needs, which doesn't matter here.
    table = checkout.path / TABLE
    table.write_text("".join(re.findall("^system .*\n", table.read_text(), re.MULTILINE)))
    done = checkout.start("verify", "--store", "/a b", "/tree", uid=NOBODY, path=str(checkout.bin))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"[--][{launcher}][verify][--store][/a b][/tree]")
    assert done.stdout.startswith("[--preserve-env=") and "IMAGE_BUILDER_STORE" in done.stdout
    assert done.stderr == "none\n"
    folder = checkout.bin / ".docker"
    folder.mkdir()
    (folder / "config.json").touch()
    done = checkout.start("verify", "/tree", uid=NOBODY, path=str(checkout.bin), HOME=str(checkout.bin))
    assert done.stderr == f"{folder}\n"  # root pulls with the caller's logins
    mine = checkout.bin / "store"
    mine.mkdir()
    mine.chmod(0o777)
    assert checkout.start("lock", "x", uid=NOBODY, path=str(checkout.bin)).stdout.startswith("[--preserve")
    for command in (
        ["lock", "x", "--store", str(mine)],
        ["images"],
        ["build", "--help"],
        ["verify", "ssh://x"],
        ["test", "--fast"],
        [],
    ):
        done = checkout.start(*command, uid=NOBODY, path=str(checkout.bin))
        assert done.stdout.startswith(f"cli {NOBODY}"), command


def test_every_variable_that_the_program_reads_gets_through_sudo() -> None:
    launcher = (REPO_ROOT / "image-builder").read_text()
    kept = set(re.findall(r"\w+", "".join(re.findall(r"^kept=(.*)$", launcher, re.MULTILINE))))
    read = {
        name
        for path in (REPO_ROOT / "image_builder").rglob("*.py")
        for name in re.findall(r"\bIMAGE_BUILDER_[A-Z_]+", path.read_text())
    }
    assert read - kept == set()


def _without_packages(checkout: Checkout, *names: str) -> None:
    """Make the launcher look for files that no host has, for these packages."""
    table = checkout.path / TABLE
    lines = [line.split(" ") for line in table.read_text().splitlines()]
    for line in lines:
        if line[1] in names:
            line[2] = f"/nonexistent/{line[1]}"
    table.write_text("".join(f"{' '.join(line)}\n" for line in lines))


def test_missing_packages_are_named_by_command(checkout: Checkout, tmp_path: Path) -> None:
    _without_packages(checkout, "mmdebstrap", "qemu-system-x86")
    store = ("--store", str(tmp_path / "store"))
    done = checkout.start("build", "worker", *store)
    assert done.returncode == errors.HostError.exit_code
    assert "packages are missing: mmdebstrap\n" in done.stderr
    assert "--install-deps" in done.stderr
    assert not checkout.venv.exists() and not (tmp_path / "store").exists()
    assert "packages are missing: qemu-system-x86\n" in checkout.start("boot", "x", *store).stderr
    assert "packages are missing: mmdebstrap qemu-system-x86\n" in checkout.start("test", *store).stderr
    for command in (("images",), ("test", "--fast")):
        assert checkout.start(*command).returncode == 0


def test_missing_packages_are_installed_when_asked_to(checkout: Checkout, tmp_path: Path) -> None:
    _without_packages(checkout, "mmdebstrap")
    said = tmp_path / "said"
    apt = checkout.bin / "apt-get"
    apt.write_text(f'#!/bin/sh\necho "$DEBIAN_FRONTEND: $*" >>{said}\n')
    apt.chmod(0o755)
    path = f"{checkout.bin}:/usr/sbin:/usr/bin:/sbin:/bin"
    done = checkout.start("build", "x", "--install-deps", "--store", str(tmp_path / "store"), path=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cli 0 build x --store")
    assert said.read_text().splitlines() == [
        "noninteractive: -q update",
        "noninteractive: -q install --yes --no-install-recommends mmdebstrap",
    ]


def test_another_apt_at_work_is_waited_for(checkout: Checkout, tmp_path: Path) -> None:
    _without_packages(checkout, "mmdebstrap")
    busy, apt = tmp_path / "busy", checkout.bin / "apt-get"
    busy.touch()
    apt.write_text(
        f"#!/bin/sh\nrm {busy} 2>/dev/null || exit 0\n"
        "echo 'E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt-get)'\nexit 100\n"
    )
    apt.chmod(0o755)
    path = f"{checkout.bin}:/usr/sbin:/usr/bin:/sbin:/bin"
    done = checkout.start("--install-deps", "build", "x", "--store", str(tmp_path / "store"), path=path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("another apt is running") == 1


def test_a_failing_apt_is_shown(checkout: Checkout, tmp_path: Path) -> None:
    _without_packages(checkout, "mmdebstrap")
    apt = checkout.bin / "apt-get"
    apt.write_text("#!/bin/sh\necho E: no such mirror\nexit 100\n")
    apt.chmod(0o755)
    path = f"{checkout.bin}:/usr/sbin:/usr/bin:/sbin:/bin"
    done = checkout.start("--install-deps", "build", "x", "--store", str(tmp_path / "store"), path=path)
    assert done.returncode == errors.FetchError.exit_code
    assert "E: no such mirror" in done.stderr and "error: apt-get update failed" in done.stderr
    assert not checkout.venv.exists()


def test_a_python_that_can_not_serve(checkout: Checkout, tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\n")
    old.chmod(0o755)
    done = checkout.start("images", IMAGE_BUILDER_PYTHON=str(old))
    assert done.returncode == errors.HostError.exit_code
    assert f"{old} must be Python 3.11, 3.12 or 3.13" in done.stderr


def test_a_store_on_an_overlay_or_a_full_disk_is_refused_first(checkout: Checkout, tmp_path: Path) -> None:
    script = (
        'mkdir -p "$1/lower" "$1/upper" "$1/work" "$1/merged" "$1/small" || exit 99\n'
        'mount -t overlay overlay -o "lowerdir=$1/lower,upperdir=$1/upper,workdir=$1/work" "$1/merged" || exit 99\n'
        'mount -t tmpfs -o size=8m tmpfs "$1/small" || exit 99\n'
        '"$2" build x --store "$1/merged/deep/store"; echo "$?"\n'
        '"$2" build x --store="$1/small/store"; echo "$?"\n'
    )
    work = tmp_path / "mounts"
    work.mkdir()
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", work, checkout.path / "image-builder"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(errors.StoreError.exit_code), str(errors.SpaceError.exit_code)], (
        done.stderr
    )
    assert "is on overlayfs, which can't hold the upper layer of an overlay" in done.stderr
    assert "MiB free, but needs at least" in done.stderr
    assert not checkout.venv.exists()


def test_help_is_quick_and_brings_in_nothing_heavy() -> None:
    code = (
        "import sys; from image_builder.cli import main as cli\n"
        "try: cli.app(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('ansible', 'pydantic', 'paramiko', 'docker', 'rich') if m in sys.modules], file=sys.stderr)"
    )
    env = {**os.environ, "PYTHONPATH": str(REPO_ROOT)}
    python = REPO_ROOT / ".venv/bin/python"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stderr.strip() == "[]"
