"""The jobs that would be evicted from hosts: pods by owner or gang, their GPUs, and how long they have run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from image_builder.drain.ladder import Tenant
from image_builder.text import columns, human_seconds, short_list

HEAD = ("job", "pods", "GPUs", "runs for", "why", "hosts")


@dataclass(frozen=True)
class Job:
    """Pods of one gang or controller. ``started``: when the first of them did (seconds since the epoch)."""

    name: str
    pods: int
    gpus: int
    started: float | None
    reason: str
    hosts: tuple[str, ...]


def evicted_jobs(tenants: Mapping[str, Iterable[Tenant]]) -> list[Job]:
    """Return the jobs that would be evicted from hosts, those with the most GPUs first."""
    of_jobs: dict[str, list[tuple[str, Tenant]]] = {}
    for host, on_host in tenants.items():
        for tenant in on_host:
            if tenant.is_evictable:
                of_jobs.setdefault(_name(tenant), []).append((host, tenant))
    jobs = [_job(name, parts) for name, parts in of_jobs.items()]
    return sorted(jobs, key=lambda job: (-job.gpus, job.name))


def _name(tenant: Tenant) -> str:
    pod = tenant.pod
    return tenant.gang or (f"{pod.namespace}/{pod.owner}" if pod.owner else str(pod))


def _job(name: str, parts: list[tuple[str, Tenant]]) -> Job:
    starts = [tenant.pod.started for _, tenant in parts if tenant.pod.started is not None]
    return Job(
        name=name,
        pods=len(parts),
        gpus=sum(tenant.pod.gpus for _, tenant in parts),
        started=min(starts, default=None),
        reason=parts[0][1].verdict.reason,
        hosts=tuple(sorted({host for host, _ in parts})),
    )


def table(jobs: Iterable[Job], now: float) -> str:
    """Return a table of jobs; ``now`` is in seconds since the epoch."""
    rows = [
        (
            job.name,
            str(job.pods),
            str(job.gpus),
            "unknown" if job.started is None else human_seconds(max(0.0, now - job.started)),
            job.reason,
            short_list(job.hosts),
        )
        for job in jobs
    ]
    return columns([HEAD, *rows])
