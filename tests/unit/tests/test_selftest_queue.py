"""The test file that a lane takes next."""

from __future__ import annotations

from pathlib import Path

from tests.selftest.file_queue import BOOT, HOSTS, Lane, Queue, State, TestFile, choose, is_exhausted

FIRST, SECOND, LIGHT = Lane(0), Lane(1), Lane(2, light=True)
NOTHING = State()


def _state(running: str = "", ended: str = "", images: str = "", *, first_is_over: bool = False) -> State:
    return State(
        frozenset(running.split()), frozenset(ended.split()), frozenset(images.split()), first_is_over
    )


def _name(files: list[TestFile], state: State, lane: Lane) -> str:
    file = choose(files, state, lane)
    return file.name if file else ""


def test_the_longest_comes_first_and_what_boots_before_all() -> None:
    files = [
        TestFile("short", 1),
        TestFile("long", 9),
        TestFile("vm", 2, BOOT),
        TestFile("waits", 99, light=True),
    ]
    assert _name(files, NOTHING, FIRST) == "vm"
    assert _name(files, _state("vm"), SECOND) == "long"
    assert _name(files, _state("vm long"), SECOND) == "short"
    assert _name(files, _state("vm long short"), SECOND) == "waits"
    assert _name(files, _state("vm", "long short waits"), SECOND) == ""


def test_a_light_lane_takes_others_files_only_where_no_light_one_is_left() -> None:
    files = [TestFile("long", 9), TestFile("waits", 1, light=True), TestFile("dozes", 2, light=True)]
    assert _name(files, NOTHING, LIGHT) == "dozes"
    assert _name(files, _state("", "waits"), LIGHT) == "dozes"
    state = _state("dozes", "waits")
    assert _name(files, state, LIGHT) == "long" and not is_exhausted(files, state)
    state = _state("dozes long", "waits")
    assert _name(files, state, LIGHT) == "" and is_exhausted(files, state)


def test_what_only_one_may_do_waits_for_its_turn() -> None:
    files = [
        TestFile("vm", 9, BOOT),
        TestFile("vm2", 8, BOOT),
        TestFile("pool", 7, HOSTS),
        TestFile("pool2", 6, HOSTS),
    ]
    assert _name(files, _state("vm"), SECOND) == "pool"
    state = _state("vm pool")
    assert _name(files, state, LIGHT) == _name(files, state, SECOND) == ""
    assert not is_exhausted(files, state)
    assert _name(files, _state("pool", "vm"), SECOND) == "vm2"


def test_what_looks_at_the_whole_machine_is_the_first_lanes_and_comes_first() -> None:
    files = [
        TestFile("long", 9),
        TestFile("looks", 1, alone=True),
        TestFile("vm", 5, BOOT),
        TestFile("waits", light=True),
    ]
    assert _name(files, NOTHING, FIRST) == "looks"
    for state in (NOTHING, _state("looks")):
        assert _name(files, state, SECOND) == "vm"
        assert _name(files, state, LIGHT) == ""
    assert _name(files, _state("vm", "looks"), SECOND) == "long"
    # A first lane that has finished keeps no other lane waiting.
    assert _name(files, _state("vm", first_is_over=True), SECOND) == "long"


def test_an_image_that_is_being_baked_is_waited_for_only_when_nothing_else_is_left() -> None:
    worker = frozenset({"worker"})
    files = [
        TestFile("vm", 9, BOOT, images=worker),
        TestFile("mutants", 8, images=worker),
        TestFile("kills", 2, images=frozenset({"minimal"})),
        TestFile("waits", 1, light=True),
    ]
    assert _name(files, _state("vm"), SECOND) == "kills"
    assert _name(files, _state("vm", "kills"), SECOND) == "waits"
    assert _name(files, _state("vm", "kills waits"), SECOND) == "mutants"
    assert _name(files, _state("vm", images="worker"), SECOND) == "mutants"
    # A lane that has run a file that needs the image has it as well.
    files += [TestFile("programs", 7, images=worker)]
    assert _name(files, _state("vm", "mutants"), SECOND) == "programs"


def test_a_queue_is_shared_and_a_dead_lane_holds_nothing(tmp_path: Path) -> None:
    files = [TestFile("one", 2, BOOT), TestFile("two", 1, BOOT)]
    queue, other = Queue(tmp_path), Queue(tmp_path)
    assert queue.take(files, FIRST) == (files[0], False)
    assert other.take(files, SECOND) == (None, False)
    queue.end("one")
    assert queue.take(files, FIRST) == (files[1], False)
    assert other.take(files, SECOND) == (None, True)
    path = tmp_path / "queue.json"
    path.write_text(path.read_text().replace('"two": ', '"two": 99999999'))
    assert other.take([*files, TestFile("three", 1, BOOT)], SECOND)[0] == TestFile("three", 1, BOOT)
