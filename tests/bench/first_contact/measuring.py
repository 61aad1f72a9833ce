"""Speeds, their spread from run to run, and references: the figures from which floors and ratios are computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median, stdev
from typing import Any

from image_builder.node.gpu.model import Worker
from image_builder.node.gpu.smoke import cuda, fleet, program
from tests.bench import gpu as bench
from tests.bench.first_contact.context import Context, peers, worker_argv
from tests.bench.first_contact.smoke import SEED, gpus

_CACHE_MODES = ("without a cache", "cold", "warm")


def together(
    context: Context,
    commands: Mapping[str, Sequence[str]],
    seconds: float,
    others: Mapping[str, Sequence[str]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Worker]:
    """Run one worker for each of these GPUs in parallel; return each worker's result."""
    end = time.monotonic() + context.left(seconds)
    with fleet.Fleet() as running:
        for gpu, argv in commands.items():
            variables = program.environment(gpu, (others or {}).get(gpu, ()))
            running.start(gpu, argv, {**variables, **(environment or {})}, end)
        return {worker.gpu: worker for worker in running.wait()}


def as_documents(workers: Mapping[str, Worker]) -> list[dict[str, Any]]:
    """Return workers as JSON objects."""
    return [asdict(worker) for worker in workers.values()]


def spread(context: Context) -> dict[str, Any]:
    """Run every measurement ten times on all GPUs in parallel, then every link."""
    names = gpus(context)
    links = len(names) > 1
    alone = together(
        context,
        {gpu: worker_argv(context, gpu, SEED + 100, "--mode", "repeat") for gpu in names},
        context.left() * (0.8 if links else 0.97),
    )
    result = {"workers": as_documents(alone), "spread": spreads(alone.values())}
    if links:
        others = {gpu: [*names[at + 1 :], *names[:at]] for at, gpu in enumerate(names)}
        linked = together(
            context,
            {
                gpu: worker_argv(context, gpu, SEED + 200, "--mode", "repeat", *peers(others[gpu]))
                for gpu in names
            },
            context.left() * 0.9,
            others,
        )
        result |= {"links": as_documents(linked), "spread": [*result["spread"], *spreads(linked.values())]}
    return result


def spreads(workers: Any) -> list[dict[str, Any]]:
    """Return for each GPU and measurement: number of runs, lowest, median, highest, standard deviation, failures."""
    runs_by_key: dict[tuple[str, str], list[Any]] = {}
    for worker in workers:
        for measurement in worker.measurements:
            runs_by_key.setdefault((measurement.gpu, measurement.id), []).append(measurement)
    rows = []
    for (gpu, name), runs in runs_by_key.items():
        values = [run.measured for run in runs if run.status == "done" and run.measured is not None]
        row: dict[str, Any] = {
            "gpu": gpu,
            "id": name,
            "unit": runs[0].unit,
            "runs": len(runs),
            "done": len(values),
        }
        row["not_done"] = sorted({f"{run.status}: {run.detail}" for run in runs if run.status != "done"})[:3]
        if values:
            row |= {"low": min(values), "median": median(values), "high": max(values)}
            row["deviation"] = round(stdev(values), 4) if len(values) > 1 else None
            row["seconds"] = round(median(run.seconds for run in runs), 3)
        rows.append(row)
    return rows


def copies(context: Context) -> dict[str, Any]:
    """Copy to and from each GPU alone, from each NUMA node, then with all GPUs in parallel."""
    names = gpus(context)
    result: dict[str, Any] = {"alone": [], "together": []}
    for number, gpu in enumerate(names):
        argv = worker_argv(context, gpu, SEED + number, "--mode", "copies")
        share = context.left() / (len(names) - number + 2)
        result["alone"] += as_documents(together(context, {gpu: argv}, share))
    count = ("--count", str(len(names)))
    if len(names) > 1:
        commands = {gpu: worker_argv(context, gpu, SEED + 50, "--mode", "copies", *count) for gpu in names}
        result["together"] = as_documents(together(context, commands, context.left() * 0.95))
    return result


def coverage(context: Context) -> dict[str, Any]:
    """Count the SMs that run blocks."""
    commands = {gpu: worker_argv(context, gpu, SEED, "--mode", "cover") for gpu in gpus(context)}
    return {"workers": as_documents(together(context, commands, context.left() * 0.95))}


def compiling(context: Context) -> dict[str, Any]:
    """Time the driver's compiler: without its cache as at boot, with an empty cache, with a full one."""
    gpu = gpus(context)[0]
    cache = context.directory / "cache"
    argv = worker_argv(context, gpu, SEED, "--mode", "jit")
    workers = {}
    for name in _CACHE_MODES:
        more = {} if name == _CACHE_MODES[0] else {"CUDA_CACHE_DISABLE": "0", "CUDA_CACHE_PATH": str(cache)}
        workers[name] = as_documents(together(context, {gpu: argv}, context.left() / 2, environment=more))
    return {"gpu": gpu, "workers": workers, "cache_bytes": sum(p.stat().st_size for p in cache.rglob("*"))}


def devices(context: Context) -> dict[str, Any]:
    """Return CUDA's data on all GPUs, each pair's links, and the time until the driver is initialized."""
    del context
    began = time.monotonic()
    driver = cuda.Driver()
    first = round(time.monotonic() - began, 3)
    version = driver.number("cuDriverGetVersion")
    shown_devices = cuda.devices(driver)
    facts = [
        {
            "uuid": device.uuid,
            "name": device.name,
            "pci": device.pci(),
            "sms": device.sms,
            "capability": list(device.capability),
            "memory": dict(zip(("free", "total"), device.memory(), strict=True)),
            "linked": [device.is_linked(other) for other in shown_devices if other is not device],
        }
        for device in shown_devices
    ]
    return {
        "cuda": version,
        "init_seconds": first,
        "seconds": round(time.monotonic() - began, 3),
        "gpus": facts,
    }


def references(context: Context) -> dict[str, Any]:
    """Compare ours with the driver's own copies and cuBLAS, on the first GPU."""
    _, candidates = bench.find()
    device = next(
        (candidate for candidate in candidates if candidate.uuid == gpus(context)[0]), candidates[0]
    )
    large = max(16 << 20, int(bench.LARGE * context.pace) >> 20 << 20)
    result: dict[str, Any] = {"gpu": device.uuid, "large_bytes": large}
    measures: dict[str, Callable[[], bench.Report]] = {
        "copies": partial(bench.speeds, device, large),
        "tensors": partial(bench.tensors, device, bench.SECONDS * context.pace),
    }
    for name, measure in measures.items():
        try:
            result |= measure()
        except Exception as error:  # whatever it is: still run the other one, and report this
            result[f"{name}_error"] = f"{type(error).__name__}: {error}"
    return result
