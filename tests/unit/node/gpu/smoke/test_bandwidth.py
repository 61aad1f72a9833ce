"""Copies take turns and are made from each NUMA node; the times here are simulated, and no GPU copies anything."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from image_builder.node.errors import NodeError
from image_builder.node.gpu.model import Measurement
from image_builder.node.gpu.smoke import bandwidth
from tests.support.gpu_stand_in import libcuda
from tests.support.gpu_stand_in.libcuda import KIB, Gpu

UUID = "GPU-12345678-9abc-def0-1234-56789abcdef0"


@pytest.fixture(autouse=True)
def _lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bandwidth, "LOCK", tmp_path / "run/copies.lock")
    monkeypatch.setattr(bandwidth, "_BLOCKS_PER_SM", 1)


def test_two_that_copy_take_turns() -> None:
    inside: list[int] = []
    most: list[int] = []

    def copy(number: int) -> None:
        for _ in range(5):
            with bandwidth.turn():
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.002)
                inside.remove(number)

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 20


def test_a_worker_that_hangs_in_its_turn_keeps_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "TURN_SECONDS", 0.05)
    with bandwidth.turn():
        with pytest.raises(NodeError, match="timed out: another GPU") as caught, bandwidth.turn():
            raise AssertionError("two copy at once")
        assert caught.value.code == "gpu.turn"
    with bandwidth.turn():
        pass


def test_no_place_for_the_lock_is_no_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(bandwidth, "LOCK", tmp_path / "file/lock")
    with pytest.raises(NodeError, match="lock: "), bandwidth.turn():
        pass


@pytest.mark.parametrize("copy", [bandwidth.to_device, bandwidth.to_host])
def test_each_timed_copy_is_in_its_turn(copy: object, monkeypatch: pytest.MonkeyPatch) -> None:
    device, _ = libcuda.device(Gpu(UUID, sms=1, bytes=64 * KIB))
    has_turn = [False]
    timed: list[bool] = []

    @contextmanager
    def turn() -> Iterator[None]:
        has_turn[0] = True
        yield
        has_turn[0] = False

    real = type(device).timed

    def watched(self: object, work: object) -> float:
        timed.append(has_turn[0])
        return real(self, work)  # type: ignore[arg-type]

    monkeypatch.setattr(type(device), "timed", watched)
    measurement = copy(device, 4, 3, size=4 * KIB, tile=128, turn=turn)  # type: ignore[operator]
    assert measurement.status == "done" and timed == [True] * 3
    assert has_turn == [False]


# -- NUMA nodes ------------------------------------------------------------------------------------------------


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Simulate a machine with eight processors; return this process's affinities in order, at first all processors."""
    affinities: list[set[int]] = [set(range(8))]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: affinities[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, processors: affinities.append(set(processors)))
    return affinities


NODES = {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}


def measured(speed: float | None, status: str = "done") -> Measurement:
    return Measurement("bw.h2d", UUID, status, speed, "GB/s", "all compared", 4, 0.5)  # type: ignore[arg-type]


def test_the_best_of_all_nodes_counts_and_is_named(affinity: list[set[int]]) -> None:
    speeds = {frozenset(NODES[0]): 31.5, frozenset(NODES[1]): 55.1}
    best = bandwidth.from_each_node(lambda: measured(speeds[frozenset(affinity[-1])]), NODES)
    assert (best.measured, best.seconds) == (55.1, 1.0)
    assert best.detail == "from NUMA node 1 (31.5 from 0, 55.1 from 1): all compared"
    assert affinity[-1] == set(range(8))


def test_bytes_that_are_wrong_from_one_node_are_wrong(affinity: list[set[int]]) -> None:
    best = bandwidth.from_each_node(
        lambda: measured(None, "failed") if affinity[-1] == NODES[1] else measured(55.0), NODES
    )
    assert (best.status, best.measured) == ("failed", None)
    assert best.detail.startswith("from NUMA node 1 (55 from 0): ")


def test_a_machine_of_one_node_is_left_alone(affinity: list[set[int]]) -> None:
    assert bandwidth.from_each_node(lambda: measured(5.0), {0: {0}}) == measured(5.0)
    assert len(affinity) == 1


def test_an_error_leaves_the_process_where_it_was(affinity: list[set[int]]) -> None:
    def refused() -> Measurement:
        raise NodeError("gpu.cuda", "out of memory")

    with pytest.raises(NodeError):
        bandwidth.from_each_node(refused, NODES)
    assert affinity[-1] == set(range(8))


def test_nodes_are_read_from_the_kernel(affinity: list[set[int]], tmp_path: Path) -> None:
    for name, text in (("node0", "0-3\n"), ("node1", "4-5,7-9\n"), ("node2", "\n"), ("node10", "6\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(text)
    (tmp_path / "possible").touch()
    assert bandwidth.numa_nodes(tmp_path) == {0: {0, 1, 2, 3}, 1: {4, 5, 7}, 10: {6}}
    assert bandwidth.numa_nodes(tmp_path / "absent") == {}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("7\n", {7}), ("\n", set()), ("0-1,4-5", {0, 1, 4, 5})],
)
def test_a_list_of_processors(text: str, numbers: set[int]) -> None:
    assert bandwidth.processors(text) == numbers
