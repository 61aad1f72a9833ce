"""The report of ``node-agent preload``, as far as it needs no engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from image_builder.definition.values import words
from image_builder.node import child
from image_builder.node.errors import ProgramError
from image_builder.node.preload import command
from image_builder.node.preload.command import Done, Places
from image_builder.node.preload.images import Archive, EngineState, Preload, Store, attempt_each
from image_builder.node.status import kubelet_environment
from image_builder.node.store import Image
from image_builder.settings import REPO_ROOT
from tests.unit.node.preload_answers import CONFIG, IMAGE, INDEX, LAYERS, MANIFEST, PAUSE, TWO, document

OTHER = Image(PAUSE, INDEX, MANIFEST, CONFIG, False, LAYERS)
PRELOAD = Preload("docker", Archive(Path("/opt/images.tar"), 7, ""), (IMAGE, OTHER))
BARE = Preload("docker", None, (IMAGE, OTHER))
BOTH = Store({TWO: True, PAUSE: True})
DAMAGED = {"state": "degraded", "code": "store.verity", "reason": "block 7"}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "etc").mkdir()
    found = Places(
        run=tmp_path / "run",
        etc=tmp_path / "etc",
        list=tmp_path / "list.json",
        store=tmp_path / "store.json",
    )
    settings = {
        "engine": "docker",
        "data_root": "/mnt/local/docker",
        "mount_point": "/mnt/local",
        "pause": PAUSE,
    }
    (found.etc / "preload.json").write_text(json.dumps(settings))
    archive = tmp_path / "images.tar"
    archive.write_bytes(b"archive")
    found.list.write_text(json.dumps(document(archive)))
    return found


def status(places: Places) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((places.run / "status.json").read_text())
    return found


def test_status_tells_of_a_failure(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    places.list.unlink()
    (places.etc / "kubelet.json").write_text('{"taints": ["pool=gpu:NoSchedule"]}')
    assert command.run(places) == 1
    told = status(places)["preload"]
    reason = f"{places.list}: No such file or directory"
    assert (told["state"], told["code"], told["reason"]) == ("failed", "preload.list", reason)
    assert (told["loaded"], told["bytes"], told["problems"]) == ({}, 0, [reason])
    assert status(places)["ready"] is False
    assert capsys.readouterr().out == f"node-agent: FAILED: {reason}\n"
    taints = "pool=gpu:NoSchedule,image-builder/preload=preload.list:NoSchedule"
    assert f"--register-with-taints={taints}" in (places.run / "kubelet.env").read_text()


def test_list_of_the_other_engine_is_refused(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    settings = json.loads((places.etc / "preload.json").read_text())
    (places.etc / "preload.json").write_text(json.dumps({**settings, "engine": "containerd"}))
    assert command.run(places) == 1
    assert f"{places.list} is for docker, this node has containerd" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("{", "can't be read", id="no JSON"),
        pytest.param("{}", "engine is missing", id="no engine"),
    ],
)
def test_settings_that_can_not_be_used(places: Places, text: str, said: str) -> None:
    (places.etc / "preload.json").write_text(text)
    assert command.run(places) == 1
    told = status(places)["preload"]
    assert told["code"] == "settings" and said in told["reason"]


def test_nothing_to_load_is_told_in_one_line() -> None:
    section = command.section_of(PRELOAD, Store(), {}, Done())
    assert command.summary(section, 0.04) == ["all 2 images are there already, nothing was loaded (0.0 s)"]


def test_image_that_was_there_from_the_seed() -> None:
    section = command.section_of(PRELOAD, Store({TWO: True}), {"state": "ok"}, Done())
    assert (section["state"], section["seeded"], section["there"]) == ("ok", 1, 1)
    assert "code" not in section


def test_archive_alone_is_no_fallback() -> None:
    section = command.section_of(PRELOAD, Store(), {}, Done({TWO: "is missing"}))
    assert (section["state"], section["loaded"], section["bytes"]) == ("ok", {TWO: "is missing"}, 7)


@pytest.mark.parametrize(
    ("seed", "cause"),
    [
        pytest.param({}, "the seed did not run", id="no seed"),
        pytest.param({"state": "ok"}, "the seed reported nothing", id="a seed that saw nothing"),
        pytest.param(DAMAGED, "the seed reported store.verity: block 7", id="a seed that gave up"),
    ],
)
def test_archive_in_place_of_the_seed_is_reported(seed: dict[str, str], cause: str) -> None:
    section = command.section_of(PRELOAD, BOTH, seed, Done({TWO: "is missing"}))
    assert (section["state"], section["code"]) == ("degraded", "preload.fallback")
    assert section["reason"] == (
        f"1 required images came from the archive, not from the preload store: {cause}; {TWO} is missing"
    )
    assert section["reasons"] == [f"{TWO} is missing"]
    assert (section["seeded"], section["there"]) == ((1, 0) if seed.get("state") == "ok" else (0, 1))


def test_image_that_is_not_required_may_come_from_the_archive() -> None:
    store = Store({TWO: False, PAUSE: True})
    section = command.section_of(PRELOAD, store, {"state": "ok"}, Done({TWO: "is missing"}))
    assert (section["state"], section["loaded"]) == ("ok", {TWO: "is missing"})


def test_digest_is_asked_of_the_seed_alone() -> None:
    bare = {TWO: "has no digest", PAUSE: "has no digest"}
    assert command.section_of(PRELOAD, Store(), {}, Done(digestless=bare))["state"] == "ok"
    section = command.section_of(PRELOAD, BOTH, {"state": "ok"}, Done(digestless=bare))
    assert (section["state"], section["code"]) == ("degraded", "preload.digest")
    loaded = command.section_of(PRELOAD, BOTH, {"state": "ok"}, Done({TWO: "is missing"}, digestless=bare))
    assert loaded["reasons"] == [f"{TWO} is missing", f"{PAUSE} has no digest"]


def test_what_is_still_wrong_is_named() -> None:
    done = Done({TWO: "is missing"}, {TWO: "has lost layers: /a"})
    section = command.section_of(PRELOAD, BOTH, {}, done)
    assert (section["state"], section["code"]) == ("failed", "preload.missing")
    assert section["problems"] == [f"{TWO} has lost layers: /a"]
    assert section["loaded"] == {}
    assert command.summary(section, 1) == [f"FAILED: {TWO} has lost layers: /a"]


@pytest.mark.parametrize(
    ("seed", "cause"),
    [
        pytest.param(DAMAGED, "the seed reported store.verity: block 7", id="an unusable store"),
        pytest.param({}, "the seed did not run", id="no seed"),
    ],
)
def test_store_that_is_all_there_is_and_gives_nothing(seed: dict[str, str], cause: str) -> None:
    """Without an archive, every missing image is named, and the node gets a taint."""
    lacking = {TWO: "is missing", PAUSE: "has lost layers: /a"}

    class Gone:
        """An engine that has none of the images; only ``look`` is called."""

        def look(self, _images: object) -> EngineState:
            return EngineState(lacking)

    done = command.bring(BARE, BOTH, Gone(), Path("/"), lambda _line: None, 0)  # type: ignore[arg-type]
    section = command.section_of(BARE, BOTH, seed, done)
    assert (section["state"], section["code"]) == ("failed", "preload.missing")
    assert section["problems"] == [f"{TWO} is missing", f"{PAUSE} has lost layers: /a"]
    assert section["reason"] == (
        f"2 images are not usable, and this node was baked without an archive of them: {cause}; {TWO} is missing"
    )
    assert (section["loaded"], section["bytes"]) == ({}, 0)
    arguments = kubelet_environment({"preload": section})
    assert "--register-with-taints=image-builder/preload=preload.missing:NoSchedule" in arguments


def test_role_writes_what_is_read_here() -> None:
    """The role's vars have the keys that are read here, under the same names."""
    text = (REPO_ROOT / "roles/image_preload/vars/main.yml").read_text()
    for key in ("engine", "namespace", "pause", "data_root"):
        assert re.search(rf"^  {key}: ", text, re.MULTILINE), key


def test_role_does_not_read_the_list_of_the_inventory() -> None:
    """The list of preloaded images must not affect a layer's id: nodes get it in a file."""
    role = REPO_ROOT / "roles/image_preload"
    named = {
        path.relative_to(role).as_posix()
        for path in role.rglob("*")
        if path.is_file() and path.suffix in (".yml", ".j2") and "molecule" not in path.parts
        if "image_preload" in words(path.read_text(encoding="utf-8"))
    }
    assert named <= {"meta/main.yml"}  # the role's name


def test_a_guard_that_can_not_be_made_keeps_no_kubelet_waiting() -> None:
    """The image is named with what the engine answered; the other got its guard."""

    class Refusing:
        """An engine that has both images, and makes only the second one's guard."""

        def __init__(self) -> None:
            self.unpinned = {TWO: "has no guard", PAUSE: "has no guard"}

        def look(self, _images: object) -> EngineState:
            return EngineState(unpinned=self.unpinned)

        def name(self, _images: object, lacks: dict[str, str]) -> dict[str, str]:
            assert list(lacks) == [TWO, PAUSE]
            self.unpinned = {TWO: "has no guard"}
            return {TWO: "destination can't be '/'"}

    done = command.bring(BARE, BOTH, Refusing(), Path("/"), lambda _line: None, 0)  # type: ignore[arg-type]
    section = command.section_of(BARE, BOTH, {"state": "ok"}, done)
    assert (section["state"], section["code"], section["problems"]) == ("degraded", "preload.pin", [])
    assert section["reasons"] == [f"{TWO} has no guard: destination can't be '/'"]
    assert section["named"] == [PAUSE]
    assert "--register-with-taints" not in kubelet_environment({"preload": section})


def test_each_command_is_tried_unless_the_engine_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"bad": 1, "good": 0, "late": child.LATE}
    ran = []

    def run(argv: list[str], **_: object) -> None:
        ran.append(argv[0])
        if answers[argv[0]]:
            raise ProgramError("it failed", answers[argv[0]], "refused")

    monkeypatch.setattr(child, "run", run)
    assert attempt_each([("a", ["bad"]), ("b", ["good"])]) == {"a": "refused"}
    with pytest.raises(ProgramError):
        attempt_each([("a", ["late"]), ("b", ["good"])])
    assert ran == ["bad", "good", "late"]
