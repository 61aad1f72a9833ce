"""The program installed from its wheel: in an empty directory, it builds what a checkout builds."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from image_builder.cli import init
from image_builder.errors import HostError, UsageError
from image_builder.settings import LAUNCHER, REPOSITORY_ID
from tests.support.images.builds import Workplace, make_tiny
from tests.support.installed import Installed, build_wheel, install
from tests.support.users import open_to_all

pytestmark = pytest.mark.root
USER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-sys_admin,-mknod")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    open_to_all(folder)
    return install(build_wheel(folder / "dist"), folder / "venv")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Make an empty directory that an ordinary user may write to."""
    place = tmp_path / "place"
    place.mkdir()
    open_to_all(tmp_path)
    os.chown(place, 65534, 65534)
    return place


def test_ids_are_those_of_a_checkout(installed: Installed, tiny: Workplace, place: Path) -> None:
    """With the same lock, nothing is rebuilt: what a checkout made is taken from the store."""
    where = ("--store", tiny.store, "--output", place / "output")
    built = installed.run("build", "tiny", "--locked", tiny.lock, *where, "--json", cwd=place)
    assert built.returncode == 0, built.stderr
    stages = json.loads(built.stdout)["stages"]
    assert len(stages) > 5 and all(stage["cached"] for stage in stages)


@pytest.mark.slow
def test_a_repository_of_ones_own_is_built(installed: Installed, tiny: Workplace, place: Path) -> None:
    started = installed.run("init", "ours", cwd=place)
    assert started.returncode == 0, started.stderr
    assert not list((place / "ours").rglob("__pycache__"))
    ours, store = place / "ours", ("--store", tiny.store)
    make_tiny(ours)
    assert installed.run("validate", cwd=ours).stdout == "node: no problems\n"
    plan = installed.run("plan", "node", *store, "--json", cwd=ours)
    assert plan.returncode == 0, plan.stderr
    built = installed.run("build", "node", *store, "--output", place / "output", "--json", cwd=ours)
    assert built.returncode == 0, built.stderr
    assert json.loads(built.stdout)["build_id"] == json.loads(plan.stdout)["build_id"]
    assert (place / "output/node/latest/manifest.json").is_file()


def test_a_repository_starts_with_the_files_of_a_checkouts(installed: Installed, place: Path) -> None:
    started = installed.run("init", "ours", "--json", cwd=place)
    assert started.returncode == 0, started.stderr
    templates = (init.TEMPLATE, init.PIPELINES / "github")
    files = {
        os.fspath(p.relative_to(folder)) for folder in templates for p in folder.rglob("*") if p.is_file()
    }
    compiled = {name for name in files if "__pycache__" in name}
    assert set(json.loads(started.stdout)["files"]) == files - compiled | {REPOSITORY_ID}


def test_missing_packages_are_named_before_anything_is_done(installed: Installed, place: Path) -> None:
    table = installed.root / "image_builder/system/host.txt"
    text = table.read_text()
    table.write_text(text.replace("/usr/bin/mmdebstrap", "/nonexistent/mmdebstrap"))
    try:
        done = installed.run("build", "tiny", "--store", place / "store", cwd=place)
    finally:
        table.write_text(text)
    assert done.returncode == HostError.exit_code
    assert "error: these packages are missing: mmdebstrap\nhint: apt-get install" in done.stderr
    assert list(place.iterdir()) == []


def test_rights_that_are_missing_are_named(installed: Installed, place: Path) -> None:
    store = ("--store", place / "store")
    done = installed.run("build", "tiny", *store, cwd=place, prefix=WITHOUT_RIGHTS)
    assert done.returncode == HostError.exit_code
    assert "this process lacks CAP_SYS_ADMIN, CAP_MKNOD" in done.stderr and "hint:" in done.stderr
    lacks = installed.run("doctor", *store, "--json", cwd=place, prefix=WITHOUT_RIGHTS)
    assert lacks.returncode == HostError.exit_code
    assert "build" not in json.loads(lacks.stdout)["ready"]
    done = installed.run("build", "tiny", *store, cwd=place, prefix=USER)
    assert done.returncode == HostError.exit_code and "this needs root" in done.stderr
    in_namespace = ("unshare", "--user", "--map-root-user")
    done = installed.run("build", "tiny", *store, cwd=place, prefix=in_namespace)
    assert done.returncode == HostError.exit_code and "user namespace" in done.stderr
    assert list(place.iterdir()) == []


def test_what_an_ordinary_user_may_do(installed: Installed, place: Path) -> None:
    def run(*argv: str | Path) -> str:
        done = installed.run(*argv, cwd=place, prefix=USER, HOME=str(place))
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "tiny" in run("images").split()
    assert run("validate", "tiny", "-i", installed.root / "inventories/lab") == "tiny: no problems\n"
    store = ("--store", place / "store")
    assert "packages" in run("lock", "tiny", *store)
    assert len(json.loads(run("plan", "tiny", *store, "--json"))["stages"]) > 5
    assert {path.owner() for path in place.iterdir()} == {"nobody"}
    roots = installed.run("lock", "tiny", "--store", place.parent / "store", cwd=place, prefix=USER)
    assert roots.returncode == HostError.exit_code and "--store DIR" in roots.stderr


def test_the_checks_of_this_project_are_only_in_a_checkout(installed: Installed, place: Path) -> None:
    done = installed.run("test", "--fast", cwd=place)
    assert done.returncode == UsageError.exit_code and "No such command 'test'" in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(installed: Installed, place: Path, shell: str) -> None:
    """Test both the wheel and the launcher; the script that a shell reads calls the command as it was typed."""
    for program in (installed.program, LAUNCHER):

        def run(instruction: str, program: Path = program, **variables: str) -> str:
            environment = {**os.environ, **variables, "_IMAGE_BUILDER_COMPLETE": f"{instruction}_{shell}"}
            done = subprocess.run(
                [program], cwd=place, env=environment, capture_output=True, text=True, check=False
            )
            assert done.stdout, done.stderr
            return done.stdout

        assert "image-builder" in run("source")
        line = "image-builder vali"
        completed = run(
            "complete",
            COMP_WORDS=line,
            COMP_CWORD="1",
            _TYPER_COMPLETE_ARGS=line,
            _TYPER_COMPLETE_FISH_ACTION="get-args",
        )
        assert "validate" in completed and "build" not in completed


def test_the_manual_page_is_installed_and_without_faults(installed: Installed) -> None:
    page = installed.venv / "share/man/man1/image-builder.1"
    shown = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8", page], capture_output=True, text=True, check=True
    )
    assert shown.stderr == ""
    text = re.sub(".\x08", "", shown.stdout)  # bold letters are overstruck
    assert "EXIT STATUS" in text and "--stop-after STAGE" in text
