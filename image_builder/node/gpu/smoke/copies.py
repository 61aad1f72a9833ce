"""Copies between host and GPU, measured so that a sound link shows its speed.

GPUs share PCIe switches (two of them behind one port of an ND A100 v4), and what a copy reaches depends on which NUMA
node its host memory is of, which virtual machines state wrongly or not at all. So the timed copies of a node's GPUs
take turns, and are made from each NUMA node; the best counts, as the floors come from tools that choose the right one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from image_builder.node import files, status
from image_builder.node.errors import NodeError
from image_builder.node.gpu.model import DETAIL_CHARACTERS, Measurement

LOCK = status.DIRECTORY / "gpu-copies.lock"
# A turn takes a tenth of a second to a second. Longer means waiting for a worker that hangs.
TURN_SECONDS = 20.0
_NODES = Path("/sys/devices/system/node")


@contextmanager
def turn() -> Iterator[None]:
    """Wait until no other GPU of this machine copies. Raises NodeError (``gpu.turn``): timed out."""
    with ExitStack() as stack:
        try:
            stack.enter_context(files.lock(LOCK, TURN_SECONDS))
        except TimeoutError as error:
            message = f"timed out: another GPU's copies took more than {TURN_SECONDS:g} s"
            raise NodeError("gpu.turn", message) from error
        except OSError as error:
            raise NodeError("gpu.turn", f"{LOCK}: {error.strerror}") from error
        yield


def from_each_node(measure: Callable[[], Measurement], nodes: Mapping[int, set[int]]) -> Measurement:
    """Measure from the processors of each NUMA node; return the best, or the first that isn't done.

    Pinned memory is of the node that it is allocated on. ``nodes`` are processors by the node's number.
    """
    if len(nodes) < 2:
        return measure()
    everywhere = os.sched_getaffinity(0)
    results: dict[int, Measurement] = {}
    try:
        for number, processors in nodes.items():
            os.sched_setaffinity(0, processors)
            results[number] = measure()
            if results[number].status != "done":
                break
    finally:
        os.sched_setaffinity(0, everywhere)
    chosen = max(results, key=lambda n: (results[n].status != "done", results[n].measured or 0.0))
    speeds = ", ".join(
        f"{result.measured:g} from {n}" for n, result in results.items() if result.measured is not None
    )
    detail = f"from NUMA node {chosen} ({speeds or 'nothing measured'}): {results[chosen].detail}"
    spent = round(sum(result.seconds for result in results.values()), 3)
    return replace(results[chosen], detail=detail[:DETAIL_CHARACTERS], seconds=spent)


def numa_nodes(directory: Path = _NODES) -> dict[int, set[int]]:
    """Return the processors of each NUMA node that this process may use; empty where the kernel reports none."""
    usable = os.sched_getaffinity(0)
    near_by_node = {}
    for path in sorted(directory.glob("node[0-9]*/cpulist")):
        near = processors(path.read_text()) & usable
        if near:
            near_by_node[int(path.parent.name.removeprefix("node"))] = near
    return near_by_node


def processors(text: str) -> set[int]:
    """Return the processors of a list as /sys writes it: ``0-3,8``."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers |= set(range(int(first), int(last or first) + 1))
    return numbers
