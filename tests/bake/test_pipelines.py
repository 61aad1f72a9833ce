"""The pipelines that `init` writes, with their commands run line by line as each service does, on blank runners."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_builder.cli import init
from image_builder.errors import FetchError, StoreError, VerifyError
from image_builder.settings import DEFAULT_STORE, REPO_ROOT
from tests.support.images.builds import Workplace, make_tiny

pytestmark = pytest.mark.root

EXPORT = "store-export"
PASSED_ON = (
    "IMAGE_BUILDER_MIRROR",
    "HOME",
    "PATH",
    *filter(re.compile("(?i)_proxy$|^ssl_").search, os.environ),
)
_GETS_IMAGE_BUILDER = ("apt-get ", "git clone ")


def _document(service: str) -> dict[Any, Any]:
    (file,) = (path for path in (init.PIPELINES / service).rglob("*") if path.is_file())
    document: dict[Any, Any] = yaml.safe_load(file.read_text())
    return document


def _github() -> tuple[list[str], list[str]]:
    steps = _document("github")["jobs"]["build"]["steps"]
    records = next(s["with"]["path"] for s in steps if s.get("with", {}).get("name") == "records")
    assert next(s for s in steps if s.get("with", {}).get("name") == "records")["if"] == "always()"
    assert {s["with"]["path"] for s in steps if "cache" in s.get("uses", "")} == {EXPORT}
    return [s["run"] for s in steps if "run" in s], records.split()


def _azure() -> tuple[list[str], list[str]]:
    steps = _document("azure")["steps"]
    tasks = {step["task"]: step for step in steps if "task" in step}
    results = tasks["PublishTestResults@2"]
    assert results["condition"] == "succeededOrFailed()"
    assert tasks["Cache@2"]["inputs"]["path"] == f"$(Build.SourcesDirectory)/{EXPORT}"
    return [s["script"] for s in steps if "script" in s], results["inputs"]["testResultsFiles"].split()


def _gitlab() -> tuple[list[str], list[str]]:
    job = _document("gitlab")["node"]
    assert job["cache"]["paths"] == [f"{EXPORT}/"] and job["artifacts"]["when"] == "always"
    assert job["retry"]["exit_codes"] == [FetchError.exit_code]
    return [*job["before_script"], *job["script"]], job["artifacts"]["reports"]["junit"]


@dataclass
class Runner:
    """A machine of a service: a checkout, a store that doesn't exist yet, and the output of the steps so far."""

    service: str
    place: Path
    store: Path
    shell: tuple[str, ...]
    output: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def checkout(self) -> Path:
        return self.place / "s"

    def prepare(self, cache: Path) -> None:
        """Do what the service does before the first command: check out, restore the cache, set variables."""
        for template in (init.TEMPLATE, init.PIPELINES / self.service):
            shutil.copytree(template, self.checkout, dirs_exist_ok=True)
        make_tiny(self.checkout)
        shutil.copytree(cache, self.checkout / EXPORT)
        for link in (self.checkout / ".image-builder", self.place / "image-builder"):
            link.symlink_to(REPO_ROOT)
        given = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        self.environment = {**given, "CI": "true", "IMAGE_BUILDER_STORE": os.fspath(self.store)}
        document = _document(self.service)
        variables = document.get("env", {}) | document.get("variables", {})
        self.environment |= {name: str(value) for name, value in variables.items()}
        if self.service == "gitlab":
            self.checkout.chmod(0o777)  # as its runners leave it
            of_job = document["node"]["variables"].items()
            place = os.fspath(self.checkout)
            own = {name: value.replace("$CI_PROJECT_DIR", place) for name, value in of_job}
            self.environment = {**own, **self.environment}
        if self.service == "github":
            for name in ("GITHUB_PATH", "GITHUB_STEP_SUMMARY"):
                (self.place / name).touch()
                self.environment[name] = os.fspath(self.place / name)

    def step(self, command: str) -> int:
        """Run a command as a separate step; return its status."""
        for name, path in (("Agent.BuildDirectory", self.place), ("Build.SourcesDirectory", self.checkout)):
            command = command.replace(f"$({name})", os.fspath(path))
        done = subprocess.run(
            [*self.shell, command],
            cwd=self.checkout,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.output += done.stdout
        added = re.findall(r"^##vso\[task.prependpath\](.*)$", done.stdout, re.MULTILINE)
        if self.service == "github":
            added = (self.place / "GITHUB_PATH").read_text().split()
        if self.service == "gitlab" and command.startswith("export PATH="):
            added = [f"{self.checkout}/.image-builder"]  # there, the next line runs in the same shell
        for path in added:
            self.environment["PATH"] = f"{path}:{self.environment['PATH']}"
        return done.returncode

    def summary(self) -> str:
        name = "GITHUB_STEP_SUMMARY" if self.service == "github" else "s/summary.md"
        return (self.place / name).read_text()

    def records(self, patterns: list[str]) -> list[Path]:
        """Return the files that the service is told to keep in all cases."""
        stores = rf"^(\.store|{DEFAULT_STORE})/"
        placed = [re.sub(stores, f"{self.store}/", pattern) for pattern in patterns]
        return [Path(name) for pattern in placed for name in glob.glob(os.path.join(self.checkout, pattern))]


# The shell that each service's runner passes a command to.
SHELLS = {
    "github": (_github, ("bash", "-ec")),
    "azure": (_azure, ("bash", "--noprofile", "--norc", "-c")),
    "gitlab": (_gitlab, ("bash", "-eo", "pipefail", "-c")),
}


@pytest.fixture(scope="session")
def cache(tiny: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide what an earlier run of the pipeline has left in the service's cache."""
    place = tmp_path_factory.mktemp("earlier") / "images"
    shutil.copytree(init.TEMPLATE, place)
    make_tiny(place)
    for words in (("build", "node"), ("store", "export", "--to", EXPORT, "node")):
        argv = [REPO_ROOT / "image-builder", *words, "--store", tiny.store]
        done = subprocess.run(argv, cwd=place, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return place / EXPORT


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Callable[[str], Runner]]:
    store = Path(os.environ.get("IMAGE_BUILDER_STORE", DEFAULT_STORE))
    folder = store.parent / f"{store.name}-pipeline-{os.getpid()}"
    yield lambda service: Runner(service, tmp_path, folder / "store", SHELLS[service][1])
    subprocess.run(["rm", "-rf", "--one-file-system", folder], check=True)


def _steps(service: str) -> list[str]:
    """Return the commands in order, without those that fetch image-builder or boot."""
    commands, _ = SHELLS[service][0]()
    ours = [c for c in commands if not c.startswith(_GETS_IMAGE_BUILDER)]
    assert sum(" boot " in command for command in ours) == 1
    return [command for command in ours if " boot " not in command]


def test_each_service_of_the_command_is_tested() -> None:
    assert sorted(SHELLS) == init.SERVICES


@pytest.mark.slow
@pytest.mark.parametrize("service", SHELLS)
def test_a_blank_runner_takes_up_where_the_last_run_ended(
    service: str, runner: Callable[[str], Runner], cache: Path
) -> None:
    machine = runner(service)
    machine.prepare(cache)
    for command in _steps(service):
        assert machine.step(command) == 0, machine.output
    assert "| convert " in machine.summary() and "✅" in machine.summary()
    rows = [line for line in machine.summary().splitlines() if line.startswith("| ")][2:]
    assert rows and all(row.endswith("| there already |") for row in rows), rows
    assert "0 stages and 0 downloads written" in machine.output
    assert (machine.checkout / "output/node/latest/manifest.json").exists()
    assert _failures(machine) == []
    _fail_a_check(machine)


def _fail_a_check(machine: Runner) -> None:
    """Make the next push break a check: the step fails once, and its record is where the service looks for it."""
    check = machine.checkout / "checks/test_site_banner.py"
    check.write_text(check.read_text().replace("assert ", "assert not "))
    (build,) = (command for command in _steps(machine.service) if "build node" in command)
    machine.output = ""
    assert machine.step(build) == VerifyError.exit_code, machine.output
    assert len(re.findall(r" verify +started", machine.output)) == 1, "that is no reason to try again"
    marks = {"github": "::error", "azure": "##vso[task.logissue type=error;", "gitlab": "error: stage verify"}
    assert f"\n{marks[machine.service]}" in machine.output, machine.output
    assert "❌" in machine.summary() and "test_site_banner" in machine.summary()
    (junit,) = _failures(machine)
    assert junit.stat().st_mode & 0o004, "the service's own programs read it"


def _failures(machine: Runner) -> list[Path]:
    """Return the records of failed checks among those that the service is told to keep."""
    _, patterns = SHELLS[machine.service][0]()
    junit = [path for path in machine.records(patterns) if path.name.endswith("junit.xml")]
    return [path for path in junit if "<failure" in path.read_text()]


@pytest.mark.parametrize("service", SHELLS)
def test_the_records_of_failed_checks_are_kept(service: str, runner: Callable[[str], Runner]) -> None:
    """Those of a build are in the store's logs, those of a booted machine in the output."""
    machine = runner(service)
    records = (
        machine.checkout / "output/boot/0123456789ab/junit.xml",
        machine.store / "logs/node-verify-0123456789ab-junit.xml",
    )
    for record in records:
        record.parent.mkdir(parents=True)
        record.write_text("<failure/>")
    assert set(_failures(machine)) == set(records)


@pytest.mark.parametrize("service", SHELLS)
def test_a_damaged_cache_costs_time_only(
    service: str, runner: Callable[[str], Runner], tmp_path: Path
) -> None:
    machine = runner(service)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/index.json").write_text("{")
    machine.prepare(tmp_path / "cut")
    commands = _steps(service)
    place = next(number for number, command in enumerate(commands) if "store import" in command)
    for command in commands[: place + 1]:
        assert machine.step(command) == 0, machine.output
    assert "is damaged" in machine.output and not (machine.checkout / EXPORT).exists()
    assert machine.step(commands[place]) == 0, "as in the very first run"


@pytest.mark.parametrize("service", ["github", "azure"])
@pytest.mark.parametrize(
    ("statuses", "runs", "ends"),
    [
        ((FetchError.exit_code, 0), 2, 0),
        ((FetchError.exit_code, FetchError.exit_code), 2, FetchError.exit_code),
        ((VerifyError.exit_code,), 1, VerifyError.exit_code),
        ((StoreError.exit_code,), 1, StoreError.exit_code),
        ((0,), 1, 0),
    ],
)
def test_only_a_failed_download_is_tried_again(
    service: str,
    statuses: tuple[int, ...],
    runs: int,
    ends: int,
    runner: Callable[[str], Runner],
    tmp_path: Path,
) -> None:
    """A program in place of image-builder exits with one status after another."""
    machine = runner(service)
    (tmp_path / "cache").mkdir()
    machine.prepare(tmp_path / "cache")
    (tmp_path / "bin").mkdir()
    (tmp_path / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    program = tmp_path / "bin/image-builder"
    program.write_text(
        f'#!/bin/sh\ncd {tmp_path}\nstatus=$(head -n 1 statuses)\nsed -i 1d statuses\necho ran\nexit "$status"\n'
    )
    program.chmod(0o755)
    machine.environment["PATH"] = f"{tmp_path}/bin:{machine.environment['PATH']}"
    (build,) = (command for command in _steps(service) if "build node" in command)
    assert machine.step(build) == ends
    assert machine.output.count("ran") == runs
