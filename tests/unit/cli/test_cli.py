"""The commands: their help, their results, and the exit codes of failures."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from image_builder import errors
from image_builder.bake import build as builds
from image_builder.bake.lock.model import Lock, LockedGroup
from image_builder.cli import failure
from image_builder.cli.main import app
from image_builder.cli.pool import drain as drain_command
from image_builder.cli.pool import plan as pool_plan
from image_builder.drain import run as drains
from image_builder.drain.policy import Policy
from image_builder.pool.run import abort as pool_abort
from image_builder.pool.show import report as pool_report
from image_builder.settings import PROJECT_VARIABLE, REPO_ROOT
from image_builder.verify import boot as booting
from image_builder.verify.result import Check, SuiteResult
from tests.support.azure.attested import SUBSCRIPTION

COMMANDS = [
    ("images",),
    ("collections",),
    ("validate",),
    ("lock",),
    ("plan",),
    ("build",),
    ("boot",),
    ("publish", "plan"),
    ("publish", "run"),
    ("publish", "status"),
    ("publish", "promote"),
    ("publish", "withdraw"),
    ("publish", "prune"),
    ("publish", "age"),
    ("init",),
    ("doctor",),
    ("verify",),
    ("test",),
    ("lab", "up"),
    ("lab", "down"),
    ("lab", "status"),
    ("gate", "run"),
    ("gate", "admit"),
    ("gate", "release"),
    ("gate", "report"),
    ("gate", "forget"),
    ("gate", "status"),
    ("pool", "snapshot"),
    ("pool", "slice"),
    ("pool", "plan"),
    ("pool", "status"),
    ("pool", "report"),
    ("pool", "rollback"),
    ("pool", "run"),
    ("pool", "resume"),
    ("pool", "abort"),
    ("pool", "drain"),
    ("pool", "free"),
    ("pool", "why"),
    ("pool", "repair"),
    ("pool", "verify"),
    ("pool", "render"),
    ("pool", "template"),
    ("pool", "broker"),
    ("store", "gc"),
    ("store", "verify"),
    ("store", "export"),
    ("store", "import"),
]


def _run(*argv: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, argv)
    return done.exit_code, done.stdout, done.stderr


def test_the_list_of_commands_is_whole() -> None:
    top = get_command(app)
    found: set[tuple[str, ...]] = set()
    for name, command in top.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found |= {(name, n) for n, c in inner.items() if not c.hidden} if inner else {(name,)}
    assert found == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example_and_json(command: tuple[str, ...]) -> None:
    status, out, _ = _run(*command, "--help")
    assert status == 0
    assert f"Example:\n\n      image-builder {' '.join(command)}" in out
    assert "--json" in out


def test_help_of_everything_has_the_exit_codes() -> None:
    _, out, _ = _run("--help")
    for code, name, _meaning in failure.exit_codes():
        assert re.search(rf"^  {code}\s+{name}", out, re.MULTILINE)


def test_images_are_listed() -> None:
    status, out, _ = _run("images", "--json")
    assert status == 0
    assert {"worker", "worker_containerd", "minimal"} <= set(json.loads(out)["images"])
    status, plain, _ = _run("images")
    assert plain.split() == json.loads(out)["images"]


@pytest.fixture
def bad_inventory(tmp_path: Path) -> Path:
    (tmp_path / "hosts.yml").write_text("images:\n  hosts:\n    broken:\n")
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars/broken.yml").write_text("image_layers: 7\nimage_formats: [floppy]\n")
    return tmp_path


def test_validate_names_all_problems_at_once(bad_inventory: Path) -> None:
    status, out, err = _run("validate", "-i", str(bad_inventory))
    assert status == errors.DefinitionError.exit_code
    assert out == ""
    assert "image_layers" in err and "image_formats" in err
    assert "broken.yml:1" in err and "broken.yml:2" in err


@pytest.mark.usefixtures("unread_layers")
def test_validate_names_what_is_left_to_replace_in_the_example() -> None:
    status, out, err = _run("validate", "-i", str(REPO_ROOT / "inventories/azure_vmss"))
    assert (status, out) == (errors.DefinitionError.exit_code, "")
    named = [line for line in err.splitlines() if "REPLACE" in line or "of zeros" in line]
    assert len(named) > 5 and all(re.search(r"\.yml:\d+  [\w.]+: ", line) for line in named), named


def test_validate_tells_programs_the_same(bad_inventory: Path) -> None:
    status, out, _ = _run("validate", "--json", "-i", str(bad_inventory))
    told = json.loads(out)["error"]
    assert status == told["exit_code"] == errors.DefinitionError.exit_code
    assert {p["path"].split("[")[0] for p in told["problems"]} >= {"image_layers", "image_formats"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["plan", "wroker"], "did you mean `worker`"),
        (["boot", "nothing-here"], "no such file, directory or built image"),
        (["validate", "--no-such-option"], "--no-such-option"),
        (["verify", "ssh://admin@node7?key=/k", "--facts", __file__], "known_hosts=FILE"),
        (
            ["verify", f"ssh://a@b?key={__file__}&known_hosts=/none", "--facts", __file__],
            "no such file: /none",
        ),
        (
            ["verify", f"ssh://a@b?key={__file__}&known_hosts={__file__}", "--facts", "/none"],
            "no such file: /none",
        ),
        (["pool", "drain", "gpu-1", "--mode", "force"], "mode: Input should be 'idle-only', 'fence'"),
        (["pool", "drain"], "HOST"),
        (["store", "gc"], "--keep"),
        (["store", "gc", "--keep", "-1"], "--keep"),
    ],
)
def test_a_wrong_command_line(argv: list[str], words: str) -> None:
    status, _, err = _run(*argv)
    assert status == errors.UsageError.exit_code
    assert words in err


@pytest.mark.parametrize(
    ("options", "secure_boot"), [((), None), (("--secure-boot",), True), (("--no-secure-boot",), False)]
)
def test_an_image_is_booted_with_the_firmware_that_it_declares(
    options: tuple[str, ...], secure_boot: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []

    def boot(_: Path, **settings: object) -> None:
        taken.append(settings["secure_boot"])
        raise errors.BootError("no machine here")

    monkeypatch.setattr(booting, "boot", boot)
    (tmp_path / "worker.raw").touch()
    status, _, err = _run("boot", str(tmp_path / "worker.raw"), "--output", str(tmp_path), *options)
    assert (status, taken) == (errors.BootError.exit_code, [secure_boot]), err


@pytest.mark.parametrize(
    ("outcome", "options", "status", "annotations"),
    [
        ("passed", ("--verify",), 0, 0),
        ("failed", ("--verify",), errors.VerifyError.exit_code, 1),
        ("failed", (), 0, 0),
    ],
)
def test_a_booted_image_that_fails_a_check_fails_the_command(
    outcome: Any,
    options: tuple[str, ...],
    status: int,
    annotations: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    suite = SuiteResult("ssh://x", "booted", (Check("test_a.py::test_a", outcome, 1.0),), (), 1.0)
    booted: list[Path] = []

    def boot(disk: Path, *, verify: bool, out_dir: Path, **_: object) -> booting.BootResult:
        booted.append(disk)
        checked = suite if verify else None
        result = booting.BootResult("worker", "b", "tcg", False, 1.0, 2.0, "running", None, checked, ())
        out_dir.mkdir(parents=True)
        result.write(out_dir)
        return result

    monkeypatch.setattr(booting, "boot", boot)
    monkeypatch.setattr(failure, "service", None)  # the option sets it
    (tmp_path / "worker/latest").mkdir(parents=True)
    argv = ("boot", "worker", "--output", str(tmp_path), "--store", str(tmp_path / "store"), "--json")
    code, out, err = _run("--annotations", "github", *argv, *options)
    assert (code, booted) == (status, [tmp_path / "worker/latest"]), err
    result = json.loads(out)
    reports = Path(result.pop("reports"))
    assert reports.parent == tmp_path / "boot"
    assert json.loads((reports / "boot.json").read_text()) == result
    assert sum(line.startswith("::error::") for line in err.splitlines()) == annotations


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ((), {}),
        (("--insist",), {"insist": True}),
        (("--take-cordoned",), {"take_cordoned": True}),
        (("--whole-gangs",), {"whole_gangs": True}),
        (("--mode", "evict"), {"mode": "evict"}),
        (("--wait", "0"), {"max_wait_seconds": 0.0}),
    ],
)
@pytest.mark.parametrize("file", [{}, {"insist": True, "max_wait_seconds": 7.0}], ids=["default", "file"])
def test_an_option_of_a_drain_changes_its_policy(
    options: tuple[str, ...],
    changes: dict[str, Any],
    file: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policies: list[Policy] = []

    def drain(_client: object, _run: str, policy: Policy, _tell: object) -> SimpleNamespace:
        policies.append(policy)
        return SimpleNamespace(add=list, open_hosts=(), release=lambda: None, outcomes={})

    client = nullcontext(SimpleNamespace(serves_evictions=lambda: True))
    monkeypatch.setattr(drains, "Drain", drain)
    monkeypatch.setattr(drain_command, "connect", lambda *_: client)
    (tmp_path / "policy.yml").write_text(json.dumps(file))
    status, _, err = _run("pool", "drain", "gpu-1", "--policy", str(tmp_path / "policy.yml"), *options)
    assert (status, policies) == (0, [Policy(**{**file, **changes})]), err


@pytest.mark.parametrize("place", ["empty", "project"])
def test_a_directory_without_a_project_is_not_sound(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inventory of this program's own checkout would be checked instead."""
    monkeypatch.delenv(PROJECT_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    if place == "project":
        monkeypatch.setenv(PROJECT_VARIABLE, str(tmp_path))
    status, out, err = _run("validate", "minimal")
    assert (status, out) == (errors.UsageError.exit_code, "") and str(tmp_path) in err
    lab = str(REPO_ROOT / "inventories/lab")
    if place == "empty":
        assert _run("validate", "minimal", "-i", lab)[0] == 0
        status, out, err = _run("images")  # which checks nothing
        assert status == 0 and "minimal" in out and str(tmp_path) in err and lab in err
        status, _, err = _run("plan", "node")
        assert status == errors.UsageError.exit_code and lab in err.partition("hint: ")[2]
    monkeypatch.setenv(PROJECT_VARIABLE, str(REPO_ROOT))
    assert _run("validate", "minimal")[0] == 0


@pytest.mark.parametrize("place", [REPO_ROOT, REPO_ROOT / "docs"])
def test_a_checkout_of_this_program_is_a_project(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROJECT_VARIABLE, raising=False)
    monkeypatch.chdir(place)
    status, out, err = _run("validate", "minimal")
    assert (status, out, err) == (0, "minimal: no problems\n", "")


def test_explain_says_of_no_stage_that_is_there_that_it_was_never_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build of another image made the stage; this image was never built."""
    groups = {
        name: LockedGroup(suite="trixie", components=["main"], requested=[], packages=[])
        for name in ("tools", "base", "system")
    }
    lock = Lock(image="minimal", source_date_epoch=1, repositories={"debian": None}, groups=groups)
    monkeypatch.setattr(builds, "obtain_lock", lambda *_: lock)

    def plan() -> dict[str, Any]:
        status, out, err = _run("plan", "minimal", "--explain", "--json", "--store", str(tmp_path))
        assert status == 0, err
        told: dict[str, Any] = json.loads(out)
        return told

    first = plan()
    assert first["stored"] == [] and first["reasons"]["base"] == ["it was never built before"]
    stage_id = next(stage["id"] for stage in first["stages"] if stage["name"] == "base")
    (tmp_path / "objects" / stage_id).mkdir(parents=True)
    (tmp_path / "objects" / stage_id / "meta.json").write_text("{}")
    second = plan()
    assert second["stored"] == ["base"]
    assert second["reasons"] == {name: why for name, why in first["reasons"].items() if name != "base"}


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    status, _, err = _run("store", "verify", "--store", str(tmp_path / "none"))
    assert status == errors.StoreError.exit_code
    assert "no store at" in err
    assert not (tmp_path / "none").exists()


def test_an_empty_store_is_sound(tmp_path: Path) -> None:
    for name in ("objects", "staging", "locks", "debs", "files"):
        (tmp_path / name).mkdir()
    status, out, _ = _run("store", "verify", "--json", "--store", str(tmp_path))
    assert (status, json.loads(out)) == (0, {"stages": 0, "damages": []})
    status, out, _ = _run("store", "gc", "--keep", "0", "--json", "--store", str(tmp_path))
    assert (status, json.loads(out)) == (0, {"removed": [], "downloads": [], "bytes": 0})


def test_the_brokers_configuration_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "broker.yml"
    tls = "listen: {certificate: /tls/tls.crt, key: /tls/tls.key}"
    identity = "identity: {tenant: 3d2f1b8e-7c55-4f8b-9a55-1d6a0c9e4b11, audience: api://node-broker}"
    pool = "pools: [{name: h100, nodes: 'h100-[0-9]+', objects: [9b1f6c1e-52a3-4b55-8a0e-6f2f3d1f7a01]}]"
    proof = f"attestation: {{authorities: /azure.pem, subscriptions: [{SUBSCRIPTION}]}}"
    path.write_text("\n".join([tls, identity, proof, pool]))
    status, out, _ = _run("pool", "broker", "--config", str(path), "--check", "--json")
    assert (status, json.loads(out)) == (0, {"pools": ["h100"], "audience": "api://node-broker"})
    path.write_text("pools: []")
    status, _, err = _run("pool", "broker", "--config", str(path), "--check")
    assert status == errors.DefinitionError.exit_code and "listen" in err and "identity" in err


def test_an_abort_names_the_hosts_that_a_roll_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {
        "a": "draining",
        "b": "reimaging",
        "c": "waiting",
        "d": "ended",
        "e": "restoring",
        "f": "joining",
    }
    report = {
        "state": "running",
        "reason": "",
        "counts": {},
        "results": {name: {"state": state} for name, state in states.items()},
    }
    monkeypatch.setattr(pool_plan, "read_run", lambda _: (SimpleNamespace(stopped=""), None, report))
    monkeypatch.setattr(pool_abort, "ask_to_stop", lambda _: None)
    monkeypatch.setattr(pool_report, "text", lambda _: "")
    (tmp_path / "plan.json").touch()
    status, out, err = _run("pool", "abort", str(tmp_path / "plan.json"), "--no-wait", "--json")
    assert (status, json.loads(out)["in_work"]) == (0, ["a", "b", "e", "f"]), err


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("build -i {} al", ["alpha"]),
        ("boot {}", []),
        ("pool plan -i {} o", ["our-hosts"]),
        ("pool render -i {} ", ["all", "ungrouped", "images", "our-hosts", "alpha", "node-1"]),
        ("pool plan ", []),
    ],
)
def test_names_of_the_inventory_before_them_are_completed(
    line: str, names: list[str], tmp_path: Path
) -> None:
    """Silently, even if Ansible would warn about a name, or no inventory can be read."""
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("images: {hosts: {alpha: }}\nour-hosts: {hosts: {node-1: }}\n")
    typed = f"image-builder {line.format(inventory)}"
    environment = {
        "_IMAGE_BUILDER_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split(" ")) - 1),
    }
    done = CliRunner().invoke(app, [], env=environment, prog_name="image-builder")
    assert (done.exit_code, done.stdout.split(), done.stderr) == (0, names, "")
