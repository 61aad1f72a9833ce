"""Rolls on the command line, as far as they touch no host: a version and its proof, and the rollback of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from typer.testing import CliRunner

from image_builder import errors
from image_builder.cli.main import app
from image_builder.gallery import artefact
from image_builder.gallery.artefact import Artefact
from image_builder.gallery.statement import sign, statement
from image_builder.gallery.tags import BUILD_TAG, SHA256_TAG, UNVERIFIED_TAG
from image_builder.pool.plan.model import OK
from image_builder.pool.plan.plan import Plan, load
from image_builder.pool.run.journal import journal_of, open_journal
from image_builder.pool.run.records import Began, Intent, Opened, Result
from image_builder.verify.runner import FACTS
from tests.support.arm.fleet import BUILDS, NEW, OLD, NoDisks, actions, add_version
from tests.support.arm.limits import Limits
from tests.support.arm.model import Json
from tests.support.arm.place import MIB, write_build
from tests.support.arm.scale_sets import ScaleSets, SetState
from tests.support.arm.service import Arm
from tests.support.arm.serving import Served, found_by, served

pytestmark = pytest.mark.root


@dataclass
class Desk:
    """An operator's workplace: an inventory with a scale set, a published and signed build, and its keys."""

    folder: Path
    service: Served
    group: SetState
    built: Artefact

    @property
    def version(self) -> Json:
        return self.service.arm.resources[NEW.lower()].content

    def pool(self, *argv: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["pool", *argv, "--endpoint", self.service.url, "--json"])
        return done.exit_code, done.stdout, done.stderr

    def plan(self, *argv: str) -> tuple[int, str, str]:
        return self.pool("plan", "gpu", "-i", "hosts.yml", "--to", NEW, "--out", "roll.json", *argv)

    def run(self, plan: str, facts: str, *argv: str) -> tuple[int, list[str]]:
        """Try to run a plan, which is refused in any case without a cluster; return the objections."""
        status, answer, _ = self.pool(
            *("run", plan, "-i", "hosts.yml", "--trust-first-use", "seen", "--key", "key"),
            "--facts",
            facts,
            *argv,
        )
        return status, [problem["what"] for problem in json.loads(answer)["error"]["problems"]]

    def facts(self, build: str) -> str:
        """Write a facts.json for a build; return its name."""
        name = f"{build[:4]}.json"
        content = dict.fromkeys(FACTS, "") | {"image": "worker", "build_id": build}
        (self.folder / name).write_text(json.dumps(content))
        return name


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.chdir(tmp_path)
    build = write_build(tmp_path / "output", size=2 * MIB, data=MIB).build_id[:12]
    built = artefact.read(
        tmp_path / "output/worker" / build, tmp_path / "output/boot" / build, unverified=False
    )
    arm = Arm(NoDisks(), url="https://arm", limits=Limits.boundless(), actions=actions())
    for path in (OLD, NEW):
        add_version(arm, path)
    arm.resources[NEW.lower()].content["tags"] = {BUILD_TAG: built.build, SHA256_TAG: built.sha256}
    scale_sets = ScaleSets(arm)
    path = scale_sets.add("gpu-0", OLD, 4)
    group = scale_sets.sets[path.lower()]
    hosts = "".join(
        f"        gpu-{m.id}: {{ansible_host: 192.0.2.{m.id}, pool_vm_id: {m.vm_id}, pool_instance_id: '{m.id}'}}\n"
        for m in group.machines.values()
    )
    variables = f"{{pool_image: worker, pool_vm_size: ND96, pool_scale_set_id: {path}}}"
    (tmp_path / "hosts.yml").write_text(
        f"all:\n  children:\n    gpu:\n      vars: {variables}\n      hosts:\n{hosts}"
    )
    write_keys(tmp_path / "signer")
    write_keys(tmp_path / "stranger")
    (tmp_path / "cloud").mkdir()
    with served(arm, tmp_path / "cloud") as service:
        found_by(service.environment, monkeypatch)
        yield Desk(tmp_path, service, group, built)


def write_keys(private: Path) -> None:
    """Write a private key, and its public one next to it."""
    key = ed25519.Ed25519PrivateKey.generate()
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    private.with_suffix(".pub").write_bytes(public)


def signed(desk: Desk, content: dict[str, Any] | None = None) -> Path:
    """Write a signed statement about the build to the place where `publish run` writes it."""
    file = desk.folder / f"output/publish/nodes/worker/{desk.built.build}.intoto.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(sign(content or statement(desk.built), str(desk.folder / "signer")))
    return file


def test_a_version_without_a_proof_is_refused(desk: Desk) -> None:
    status, _, err = desk.plan()
    assert status == errors.UsageError.exit_code and "exactly one of --public-key and --unproven" in err
    status, _, err = desk.plan("--public-key", "signer.pub", "--unproven", "no time")
    assert status == errors.UsageError.exit_code
    status, answer, _ = desk.plan("--public-key", "signer.pub")
    assert status == errors.DefinitionError.exit_code and "no signed statement" in answer
    moved = signed(desk).rename(desk.folder / "statement.json")
    assert desk.plan("--public-key", "signer.pub")[0] == errors.DefinitionError.exit_code
    status, answer, err = desk.plan("--public-key", "signer.pub", "--statement", moved.name)
    assert status == 0, answer + err
    status, answer, _ = desk.plan("--public-key", "stranger.pub", "--statement", moved.name)
    assert status == errors.DefinitionError.exit_code and "not signed by stranger.pub" in answer


def test_a_proof_is_of_this_build_verified_twice(desk: Desk) -> None:
    content = deepcopy(statement(desk.built))
    content["predicate"]["buildDefinition"]["internalParameters"]["verdicts"].pop("booted")
    signed(desk, content)
    status, answer, _ = desk.plan("--public-key", "signer.pub")
    assert status == errors.DefinitionError.exit_code and "an image without both verifications" in answer
    signed(desk)
    tags = desk.version["tags"]
    for tag, value, reason in (
        (SHA256_TAG, "0" * 64, "another VHD"),
        (UNVERIFIED_TAG, "in a hurry", "was published unverified: in a hurry"),
    ):
        desk.version["tags"] = {**tags, tag: value}
        status, answer, _ = desk.plan("--public-key", "signer.pub")
        assert status == errors.DefinitionError.exit_code and reason in answer
    desk.version["tags"] = tags
    assert desk.plan("--public-key", "signer.pub")[0] == 0
    assert not (desk.folder / "roll.json.journal.jsonl").exists()


def test_a_proof_is_checked_again_before_a_run(desk: Desk) -> None:
    signed(desk)
    assert desk.plan("--public-key", "signer.pub")[0] == 0
    facts, others = desk.facts(desk.built.build + "0" * 52), desk.facts("f" * 64)
    status, problems = desk.run("roll.json", facts)
    assert status == errors.DefinitionError.exit_code
    assert any("is verified again" in problem for problem in problems)
    _, problems = desk.run("roll.json", facts, "--public-key", "signer.pub")
    assert not [problem for problem in problems if "version" in problem or "statement" in problem], problems
    _, problems = desk.run("roll.json", others, "--public-key", "stranger.pub")
    text = "\n".join(problems)
    assert "not signed by stranger.pub" in text and f"they are of build {'f' * 64}" in text
    desk.version["tags"] |= {
        SHA256_TAG: "0" * 64,
        BUILD_TAG: "e" * 12,
        "image-builder-withdrawn": "it crashes",
    }
    text = "\n".join(desk.run("roll.json", facts, "--public-key", "signer.pub")[1])
    assert "another VHD" in text and f"is of build {'e' * 12}" in text and "was withdrawn: it crashes" in text
    del desk.service.arm.resources[NEW.lower()]
    assert any("any more" in problem for problem in desk.run("roll.json", facts)[1])


def test_a_roll_without_a_proof_says_why_it_has_none(desk: Desk) -> None:
    status, answer, _ = desk.plan("--unproven", "the signing service is down")
    assert status == 0 and json.loads(answer)["unproven"] == "the signing service is down"
    _, problems = desk.run("roll.json", desk.facts(desk.built.build + "0" * 52))
    assert not [problem for problem in problems if "version" in problem or "statement" in problem], problems
    done = CliRunner().invoke(app, ["pool", "report", "roll.json"])
    assert f"{NEW} is unproven: the signing service is down" in done.stdout


def test_a_plan_has_a_deadline_and_the_name_that_confirms_it(desk: Desk) -> None:
    deadline = "2026-11-28T06:00:00Z"
    status, answer, _ = desk.plan("--unproven", "a test", "--deadline", deadline)
    planned, result = load(desk.folder / "roll.json"), json.loads(answer)
    assert status == 0 and planned.deadline == result["deadline"] == deadline
    assert result["run"] == planned.run
    status, _, err = desk.plan("--unproven", "a test", "--deadline", "soon")
    assert status == errors.UsageError.exit_code and "a time with its zone" in err
    assert load(desk.folder / "roll.json") == planned


def test_a_plan_shows_each_request_of_its_run(desk: Desk) -> None:
    status, answer, _ = desk.plan("--unproven", "a test", "--calls")
    listed = json.loads(answer)["calls"]
    assert status == 0 and len(listed) == 7 + 4 * 6
    assert {call["host"] for call in listed} == {"", *(f"gpu-{number}" for number in range(4))}
    (body,) = [call["body"] for call in listed if call["purpose"] == "name the version"]
    assert body["properties"]["virtualMachineProfile"]["storageProfile"]["imageReference"] == {"id": NEW}
    assert desk.service.arm.log == [], "nothing was sent"
    status, _, err = desk.pool("plan", "gpu", "-i", "hosts.yml", "--out", "other.json", "--calls")
    assert status == errors.UsageError.exit_code and "--calls is for a roll" in err


def ran(desk: Desk) -> Plan:
    """Pretend that the plan has been run until one host has the new version; return it."""
    rolled = load(desk.folder / "roll.json")
    name = rolled.waves[0].hosts[0]
    machine = desk.group.machines[rolled.host[name].instance]
    machine.version = machine.disk = desk.group.profile["storageProfile"]["imageReference"]["id"] = NEW
    with open_journal(journal_of(desk.folder / "roll.json")) as journal:
        for record in (
            Opened(at=1.0, plan=rolled.digest),
            Began(at=1.0, wave=0),
            Intent(at=2.0, step="reimage", hosts=(name,)),
            Result(at=3.0, host=name, step="reimage", attempt=1, outcome=OK, joined="yes"),
        ):
            journal.append(record)
    return rolled


def test_the_way_back_of_a_roll(desk: Desk) -> None:
    """It needs no proof: its hosts have run that version before."""
    assert desk.plan("--unproven", "a test")[0] == 0
    status, _, err = desk.pool("rollback", "roll.json", "--out", "back.json")
    assert status == errors.UsageError.exit_code and "no host needs a rollback" in err
    before = ran(desk)
    status, answer, err = desk.pool("rollback", "roll.json", "--out", "back.json")
    assert status == 0, err
    back = load(desk.folder / "back.json")
    assert json.loads(answer)["to"] == OLD and json.loads(answer)["omitted"] == {}
    assert [host.name for host in back.hosts] == [before.waves[0].hosts[0]] and back.target
    assert back.target.undoes == before.run
    _, problems = desk.run("back.json", desk.facts(BUILDS[OLD] + "0" * 52))
    assert not [problem for problem in problems if "version" in problem or "inventory" in problem], problems
    _, problems = desk.run("back.json", desk.facts("f" * 64))
    assert any("they are of build" in problem for problem in problems)
    with open_journal(journal_of(desk.folder / "roll.json")):
        status, _, err = desk.pool("rollback", "roll.json", "--out", "other.json")
        assert status == errors.ImageBuilderError.exit_code and "is running" in err
