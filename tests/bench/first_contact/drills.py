"""Deliberate faults, and whether they are detected."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from image_builder.node.gpu.smoke import fleet, program
from tests.bench import gpu as bench
from tests.bench.first_contact import facts, smoke
from tests.bench.first_contact.context import Context, worker_argv
from tests.bench.first_contact.measuring import together
from tests.bench.first_contact.smoke import SEED, gpus

_HOLD_SECONDS = 15.0
_HUNG_SECONDS = 6.0  # until a hanging worker is given up on, however short the run
_LOG_SECONDS = 2.0  # until the kernel's log contains what one of our GPU kernels provoked


def step(kind: str) -> Callable[[Context], dict[str, Any]]:
    """Return the step that causes one kind of fault in a worker of the first GPU."""

    def work(context: Context) -> dict[str, Any]:
        hung = max(_HUNG_SECONDS, bench.HUNG_DEADLINE * context.pace)
        seconds = context.left(hung if kind == "hang" else bench.DEADLINE) - 2
        began = time.monotonic()
        worker = bench.drill(
            gpus(context)[0],
            kind,
            SEED,
            seconds,
            command=lambda gpu, tier, seed, _: worker_argv(context, gpu, seed, tier=tier),
            kill_after=bench.KILL_AFTER_SECONDS * context.pace,
        )
        return {
            "kind": kind,
            "caught": bench.CAUGHT[kind](worker),
            "seconds": round(time.monotonic() - began, 3),
            "worker": asdict(worker),
        }

    return work


@contextmanager
def _held(context: Context, percent: float) -> Iterator[dict[str, Any]]:
    """Hold some of the first GPU's free memory in a separate process until the block ends."""
    gpu, seed = gpus(context)[0], SEED + int(percent)
    argv = worker_argv(context, gpu, seed, "--mode", "hold", "--percent", str(percent))
    mark = context.out / "scratch" / f"held-{seed}"
    mark.unlink(missing_ok=True)
    end = time.monotonic() + context.left(_HOLD_SECONDS)
    with fleet.Fleet() as running:
        running.start(gpu, argv, program.environment(gpu, ()), time.monotonic() + context.left())
        while not mark.exists() and time.monotonic() < end:
            time.sleep(0.02)
        yield {"gpu": gpu, "percent": percent, "held": mark.exists()}


def nearly_full(context: Context) -> dict[str, Any]:
    """Test a GPU whose memory another process holds nearly all of: there must be no crash and no wrong answer."""
    with _held(context, 97) as memory:
        gpu = memory["gpu"]
        worker = together(context, {gpu: worker_argv(context, gpu, SEED)}, context.left() * 0.9)[gpu]
    wrong = [measurement.id for measurement in worker.measurements if measurement.status == "failed"]
    return {
        **memory,
        "worker": asdict(worker),
        "caught": memory["held"] and worker.ended == "done" and not wrong,
    }


def in_use(context: Context) -> dict[str, Any]:
    """Run the smoke test while a process uses a GPU: it must notice that, and test nothing."""
    with _held(context, 1) as memory:
        tested = smoke.tested(context, "boot-quick", "enforce")
    procs = [check for check in tested["document"].get("checks", ()) if check["id"] == "procs"]
    caught = tested["exit_status"] == 3 and any(check["status"] == "skip" for check in procs)
    return {**memory, **tested, "procs": procs, "caught": memory["held"] and caught}


def provoked(number: int, mode: str) -> Callable[[Context], dict[str, Any]]:
    """Return the step in which one of our GPU kernels provokes an Xid."""

    def work(context: Context) -> dict[str, Any]:
        gpu = gpus(context)[0]
        before = facts.kernel(context)
        worker = together(
            context, {gpu: worker_argv(context, gpu, SEED, "--mode", mode)}, context.left() - 4
        )[gpu]
        time.sleep(context.left(_LOG_SECONDS * context.pace))
        after = facts.kernel(context)
        new = (after["xids"] or [])[len(before["xids"] or []) :]
        response = next(
            (measurement.detail for measurement in worker.measurements if measurement.id == mode),
            worker.ended,
        )
        return {
            "wanted": number,
            "cuda": response,
            "xids": new,
            "kernel_log": after.get("kernel_log", ""),
            # One fault may be several records: driver 580 writes four of Xid 13.
            "caught": {xid["number"] for xid in new} == {number},
        }

    return work
