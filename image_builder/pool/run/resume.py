"""Start or resume a run: the state in its journal, reconciled with the inventory as it is now."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from image_builder.errors import ImageBuilderError
from image_builder.pool.plan.model import Host
from image_builder.pool.plan.plan import Plan, compare
from image_builder.pool.plan.waves import plan_waves
from image_builder.pool.run.journal import Journal
from image_builder.pool.run.progress import apply, replay
from image_builder.pool.run.records import Changed, Opened, Record
from image_builder.pool.run.state import HostStatus, Progress


def take_up(
    plan: Plan,
    journal: Journal,
    hosts: Collection[Host],
    *,
    at: float,
    retry: bool = False,
    builds: Mapping[str, str] | None = None,
    sent: Collection[tuple[str, str]] | None = None,
) -> Progress:
    """Return the state to continue from, after recording in the journal that it was opened.

    ``hosts`` are those of the inventory now: vanished ones are dropped, new ones get waves of their own after the
    planned ones, with canaries for cells that have none yet. With ``retry``, failed hosts are tried again.
    ``builds`` are those that they are verified against, by image. ``sent`` are the instances of scale sets that a roll
    sent something for; any other host keeps its image, whatever step was begun on it.

    Raises ImageBuilderError for another plan's journal, OSError.
    """
    progress = past(plan, journal.records, str(journal.path))
    unsent = () if sent is None else [s.host.name for s in progress.hosts.values() if _is_unsent(s, sent)]
    opened = Opened(
        at=at,
        plan=plan.digest,
        retry=retry,
        builds=builds or {},
        evicts=plan.deadline,
        unsent=tuple(unsent),
    )
    for record in [opened, reconcile(progress, hosts, at=at)]:
        if record is not None:
            journal.append(record)
            apply(progress, record)
    return progress


def _is_unsent(status: HostStatus, sent: Collection[tuple[str, str]]) -> bool:
    host = status.host
    return status.tries["reimage"] > status.unsent and (host.scale_set_id, host.instance) not in sent


def past(plan: Plan, records: Iterable[Record], where: str) -> Progress:
    """Return the state after these records; raises ImageBuilderError if they are those of another plan."""
    records = list(records)
    for record in records:
        if isinstance(record, Opened) and record.plan != plan.digest:
            raise ImageBuilderError(
                f"{where} is the journal of another plan",
                hint="give the plan that the run started with; a new plan gets its own journal",
            )
    return replay(plan, records)


def reconcile(progress: Progress, hosts: Collection[Host], *, at: float) -> Changed | None:
    """Return the record that makes a run's hosts match the inventory as it is now, None if they do already."""
    present = {s.host.name: s for s in progress.hosts.values() if s.state != "gone"}
    difference = compare((status.host for status in present.values()), hosts)
    if not any(difference):
        return None
    now = {host.name: host for host in hosts}
    new = tuple(now[name] for name in sorted((*difference.new, *difference.replaced)))
    leaving = {*difference.gone, *difference.replaced}
    covered = {
        status.host.cell
        for name, status in present.items()
        if name not in leaving and status.outcome and status.outcome.ok
    }
    policy = progress.plan.policy
    return Changed(
        at=at,
        gone=tuple(sorted(leaving)),
        updated=tuple(now[name] for name in difference.changed),
        new=new,
        waves=plan_waves(
            new, policy, seed=progress.plan.digest, covered=covered, waves_before=len(progress.waves)
        ),
    )
