"""Drive a rollout on real hosts: all problems are reported before the first host is touched."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

from image_builder.drain.jobs import Job
from image_builder.errors import DefinitionError, ImageBuilderError, Problem, UsageError
from image_builder.node.errors import NodeError
from image_builder.node.net import kubeconfig
from image_builder.node.net.kube import Client
from image_builder.pool.evictions import jobs, require_confirmation
from image_builder.pool.plan import plan as plans
from image_builder.pool.plan.inventory import Fleet as InventoryFleet
from image_builder.pool.plan.inventory import read_fleet
from image_builder.pool.plan.model import Host, Target
from image_builder.pool.plan.plan import Faults, Plan, make_plan
from image_builder.pool.plan.policy import Policy
from image_builder.pool.plan.waves import plan_waves
from image_builder.pool.reach.hostkeys import CertificateAuthority, Verifier, known_as
from image_builder.pool.reach.reach import KEY_HINT, Access, read_key
from image_builder.pool.rights import missing_in_azure, missing_in_cluster, of_target
from image_builder.pool.run import driver
from image_builder.pool.run.journal import (
    in_use,
    journal_of,
    open_journal,
    read_journal,
    real_plan,
    requests_of,
)
from image_builder.pool.run.progress import apply, begin
from image_builder.pool.run.records import Intent, Opened, Record
from image_builder.pool.run.resume import past, take_up
from image_builder.pool.run.state import Progress
from image_builder.pool.scale_set.client import open_client
from image_builder.pool.scale_set.records import Replacement
from image_builder.pool.scale_set.records import read_journal as read_requests
from image_builder.pool.scale_set.target import changes, require_planned_sets, spelled_as_planned
from image_builder.pool.show.report import report
from image_builder.pool.steps.ansible import read_configurations
from image_builder.pool.steps.control_plane import ControlPlane, Kubernetes, Unwatched
from image_builder.pool.steps.fleet import Change, Fleet, Setup
from image_builder.pool.steps.roll import RollFleet
from image_builder.pool.steps.slice import parse_workers
from image_builder.pool.steps.suite import Suite
from image_builder.settings import Settings, VaultId
from image_builder.system.identity import identity
from image_builder.system.signals import waking
from image_builder.text import short_list
from image_builder.verify.runner import read_facts

UNWATCHED = "no --kubeconfig: the control plane is not watched, and its gate passes everything"
_AGENT = "image-builder-roll"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Options(NamedTuple):
    """The command line's options. ``facts`` are ``IMAGE=FILE``, or FILE for the image that the file itself names.

    ``azure`` is the address of Resource Manager if it isn't the cloud's own, ``public_key`` verifies the signed
    statements about versions, ``evict`` names the roll that may evict jobs after its deadline. ``takes_over``: a
    process that still renews its Leases is dismissed.
    """

    plan: Path
    access: Access
    reports: Path
    inventories: tuple[Path, ...] = ()
    pools: tuple[str, ...] = ()
    is_resumed: bool = False
    retry: bool = False
    facts: tuple[str, ...] = ()
    node_configs: Path | None = None
    kubeconfig: Path | None = None
    vault: tuple[VaultId, ...] = ()
    azure: str | None = None
    public_key: Path | None = None
    evict: str = ""
    takes_over: bool = False


@dataclass(frozen=True)
class Rollout:
    """A rollout that passed all checks. ``hosts`` are those in the current inventory."""

    options: Options
    plan: Plan
    hosts: tuple[Host, ...]
    setup: Setup
    warnings: tuple[str, ...] = ()

    @property
    def builds(self) -> dict[str, str]:
        """Return the builds that hosts are verified against, by image."""
        return self.setup.suite.builds if self.setup.suite else {}


def prepare(options: Options) -> Rollout:
    """Return a rollout to drive; raises DefinitionError with every problem, and touches no host."""
    faults = Faults()
    control_plane = faults.collect("--kubeconfig", lambda: _control_plane(options.kubeconfig))
    plan = faults.collect("plan", lambda: plans.load(options.plan))
    if plan is None:
        # Without a plan, the hosts aren't known.
        _check_access(faults, options.access, ())
        if control_plane:
            control_plane.close()
        raise faults.all()
    fleet = faults.collect("inventory", lambda: _inventory(options, plan))
    if fleet and not options.is_resumed:
        faults.problems += plans.stale(plan, fleet.inventory, fleet.hosts)
    faults.collect("journal", lambda: _check_journal(options, plan))
    if plan.policy.rolls:
        _check_roll(faults, options, plan)
    hosts = fleet.hosts if fleet else plan.hosts
    keys = _check_access(faults, options.access, hosts)
    if plan.policy.workers and len(keys) > 1:
        faults.add("workers", f"a slice takes only one private key to its worker: {', '.join(keys)}")
    sample = {name for wave in plan.waves for name in wave.verify}
    suite = _suite(faults, options, [host for host in hosts if host.name in sample or options.is_resumed])
    if suite and plan.target:
        _check_facts(faults, suite, plan.target)
    configurations = faults.collect("--node-configs", lambda: _configurations(options, hosts)) or {}
    policy = plan.policy
    workers = faults.collect(
        "workers",
        lambda: parse_workers(policy.workers, policy.worker_runner, policy.worker_silent_seconds),
    )
    if faults.problems and control_plane:
        control_plane.close()
    faults.report()
    assert control_plane is not None
    warnings = tuple(fleet.warnings) if fleet else ()
    setup = _setup(options, plan, control_plane, suite)
    setup = replace(setup, configurations=configurations, workers=workers or ())
    return Rollout(options, plan, hosts, setup, warnings)


def prepare_verification(options: Options, plan_file: Path | None) -> Rollout:
    """Return a verification of all hosts of a plan, or of pools; raises DefinitionError with every problem."""
    faults = Faults()
    verified = faults.collect("plan" if plan_file else "inventory", lambda: _verified(options, plan_file))
    if verified is None:
        _check_access(faults, options.access, ())
        raise faults.all()
    plan, warnings = verified
    deadlines = plan.policy.deadlines
    policy = Policy(
        mode="check",
        waves=("100%",),
        max_unavailable="100%",
        wave_budget="100%",
        budget="100%",
        same_least=max(1, len(plan.hosts)) + 1,
        same_share="100%",
        soak_seconds=(0.0,),
        cadence_seconds=0.0,
        deadlines=deadlines,
    )
    # A verification changes nothing, so it needs no canaries.
    waves = plan_waves(plan.hosts, policy, covered={host.cell for host in plan.hosts}, waves_before=1)
    plan = make_plan(plan.inventory, plan.pools, plan.hosts, policy, waves)
    _check_access(faults, options.access, plan.hosts)
    suite = _suite(faults, options, plan.hosts)
    faults.report()
    return Rollout(options, plan, plan.hosts, _setup(options, plan, Unwatched(), suite), warnings)


def _setup(options: Options, plan: Plan, control_plane: ControlPlane, suite: Suite | None) -> Setup:
    return Setup(options.access, plan.policy.deadlines, Settings().python, control_plane, suite)


def _check_roll(faults: Faults, options: Options, plan: Plan) -> None:
    """Check what only a roll needs: a cluster to drain in, an authority for new host keys, a version to roll to."""
    if plan.target is None:
        faults.add("plan", "it has no version to roll to: image-builder pool plan --to")
    if options.kubeconfig is None:
        faults.add("--kubeconfig", "is needed: hosts are drained before they get another image")
    elif roll := plan.policy.rolls:
        ask = partial(missing_in_cluster, options.kubeconfig, roll)
        faults.problems += faults.collect("--kubeconfig", ask) or ()
    if not isinstance(options.access.host_keys, CertificateAuthority):
        faults.add("--host-ca", "is needed: a host has another key after its reimage")
    if plan.target:
        faults.collect("--to", partial(_check_target, faults, options, plan, plan.target))


def _check_target(faults: Faults, options: Options, plan: Plan, target: Target) -> None:
    """Check the version and its proof again; raises FetchError, HostError."""
    is_proven = not (target.undoes or target.unproven)
    if is_proven and options.public_key is None:
        faults.add("--public-key", "is needed: the version's signed statement is verified again")
    with open_client(plan.hosts, options.azure) as client:
        faults.problems += missing_in_azure(client, of_target(target))
        for reason in changes(client, target, options.public_key if is_proven else None):
            faults.add("plan", reason)


def _check_facts(faults: Faults, suite: Suite, target: Target) -> None:
    """Check that hosts are verified against the build that they get."""
    for image, build in suite.builds.items():
        if not build.startswith(target.build):
            faults.add("--facts", f"{image}: they are of build {build}, the version is {target.build}")


def _verified(options: Options, plan_file: Path | None) -> tuple[Plan, tuple[str, ...]]:
    """Return a plan of the hosts to verify, and the inventory's warnings."""
    if plan_file:
        return plans.load(plan_file), ()
    fleet = read_fleet(options.inventories, options.pools, options.vault)
    return make_plan(fleet.inventory, fleet.pools, fleet.hosts, Policy()), tuple(fleet.warnings)


def _inventory(options: Options, plan: Plan) -> InventoryFleet:
    paths = options.inventories or tuple(Path(path) for path in plan.inventory.paths)
    try:
        fleet = read_fleet(paths, [pool.name for pool in plan.pools], options.vault)
    except DefinitionError as error:
        # No plan is made from an inventory with faults, so this one has changed since; a resumed run reports it as is.
        if options.is_resumed:
            raise
        faulty = plans.older(map(str, paths), "it had none of these faults")
        raise DefinitionError([*error.problems, faulty]) from error
    if plan.target and plan.target.undoes:
        # A rollback doesn't add hosts by itself: others keep their image.
        fleet = replace(fleet, hosts=tuple(host for host in fleet.hosts if host.name in plan.host))
    if plan.target:
        fleet = replace(fleet, hosts=spelled_as_planned(fleet.hosts, plan.target))
        if options.is_resumed:
            require_planned_sets(fleet.hosts, plan.target)
    return fleet


def _check_journal(options: Options, plan: Plan) -> None:
    """Raise UsageError or ImageBuilderError if the command can't start or resume from the journal."""
    path = journal_of(options.plan)
    records = read_journal(path) if path.exists() else []
    past(plan, records, str(path))
    if records and in_use(path):
        raise ImageBuilderError(f"another process writes {path}")
    if records and not options.is_resumed:
        raise UsageError(
            f"the run of this plan has started: {path} is its journal; continue it with `pool resume`"
        )
    if not records and options.is_resumed:
        raise UsageError(f"no run of this plan has started: {path} has no record; start one with `pool run`")
    requests = requests_of(options.plan)
    # It is created before the first record of a run.
    if any(isinstance(r, Intent) and r.step == "reimage" for r in records) and not requests.exists():
        raise UsageError(
            f"{requests} is missing: without it a host may be reimaged twice; copy it from the machine that drove the"
            f" roll, or if it is lost, clean up with `pool abort --run {plan.run}`"
        )


def _check_access(faults: Faults, access: Access, hosts: Iterable[Host]) -> list[str]:
    """Check private keys, host keys and the names of hosts; return the files of all private keys."""
    faults.collect("host keys", lambda: Verifier(access.host_keys))
    keys = _keys(faults, access, hosts)
    for key in keys:
        faults.collect("--key", partial(read_key, Path(key)))
        with contextlib.suppress(OSError):  # reported by read_key
            if stat.S_IMODE(Path(key).stat().st_mode) & 0o077:
                reason = f"{key}: others can read it, and OpenSSH refuses such a key: chmod 600"
                faults.add("--key", reason)
    unnamed = []
    for host in hosts:
        try:
            known_as(host)
        except UsageError:
            unnamed.append(host.name)
    if unnamed:
        faults.add("pool_vm_id", f"can't be names in known_hosts: {short_list(unnamed)}")
    return keys


def _keys(faults: Faults, access: Access, hosts: Iterable[Host]) -> list[str]:
    """Return the files of all private keys in use."""
    keys, without = {os.fspath(access.key)} if access.key else set(), []
    for host in hosts:
        try:
            login = access.login(host)
            keys |= {login.key, *(hop.key for hop in login.hops)}
        except UsageError:
            without.append(host.name)
    if without:
        faults.add("--key", f"no private key for {short_list(without)}: {KEY_HINT}")
    return sorted(keys)


def _control_plane(kubeconfig: Path | None) -> ControlPlane:
    """Return the control plane to read; raises DefinitionError for faults that waiting won't fix, UsageError."""
    if kubeconfig is None:
        return Unwatched()
    plane = Kubernetes(kubeconfig)
    if wrong := plane.faults():
        raise DefinitionError([Problem(str(kubeconfig), "--kubeconfig", fault) for fault in wrong])
    return plane


def _suite(faults: Faults, options: Options, hosts: Sequence[Host]) -> Suite | None:
    """Return the suite for these hosts, None if nothing is to be verified."""
    images = sorted({host.image for host in hosts})
    facts: dict[str, Path] = {}
    of_others: dict[str, Path] = {}
    unread = False
    for text in options.facts:
        image, _, file = text.rpartition("=")
        path = Path(file).absolute()
        built = faults.collect("--facts", partial(_built_image, path))
        if built is None:
            unread = True
        elif image:
            facts[image] = path
        elif built in images:
            facts.setdefault(built, path)
        else:
            of_others[built] = path
    if (missing := [image for image in images if image not in facts]) and not unread:
        others = "".join(f"; {path} is that of {built}" for built, path in sorted(of_others.items()))
        faults.add(
            "--facts",
            f"no facts for hosts of {short_list(missing)}: give IMAGE=facts.json of a build{others}",
        )
    settings = Settings()
    return Suite(facts, options.reports, settings.python, checks=settings.checks) if images else None


def _built_image(path: Path) -> str:
    """Return the image that a facts.json describes.

    Raises UsageError if the file isn't one: by the time the suite would report that, hosts would have joined.
    """
    return str(read_facts(path)["image"])


def _configurations(options: Options, hosts: Iterable[Host]) -> dict[str, Path]:
    folder = options.node_configs
    return read_configurations(folder, [host.name for host in hosts]) if folder else {}


class Display(Protocol):
    """The display of a running rollout."""

    def changed(self, progress: Progress) -> None:
        """Show the current state."""

    def note(self, text: str) -> None:
        """Show one sentence next to the state."""


class Stop:
    """Signals as stop requests: the first one lets the run stop in order, a second one ends it at once."""

    def __init__(self) -> None:
        self.number = 0
        self.wake: Callable[[], None] = lambda: None

    def is_requested(self) -> bool:
        return self.number != 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._take) for number in _ENDING}
        try:
            with waking(lambda: self.wake()):  # noqa: PLW0108 (it is another one later)
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.number:
            signal.signal(number, signal.SIG_IGN)
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self.number = number


def jobs_to_evict(rollout: Rollout) -> list[Job]:
    """Return the currently running jobs that a roll evicts after its deadline; raises NodeError."""
    plan, path = rollout.plan, rollout.options.kubeconfig
    if not plan.deadline:
        return []
    assert path  # prepare checked it
    with Client(kubeconfig.load(path), agent=_AGENT) as client:
        return jobs(client, plan, time.time())


def drive(
    rollout: Rollout, show: Callable[[], AbstractContextManager[Display]]
) -> tuple[dict[str, Any], int]:
    """Drive a rollout to its end; return its report, and the signal that stopped it or 0.

    Raises UsageError for an unconfirmed deadline, ImageBuilderError if another process drives it, OSError if the
    journal can't be written.
    """
    options = rollout.options
    with ExitStack() as stack:
        stack.callback(rollout.setup.control_plane.close)
        require_confirmation(rollout.plan, options.evict)
        journal = stack.enter_context(open_journal(journal_of(options.plan)))
        if journal.records and not options.is_resumed:
            raise UsageError("another process has just started this plan's run")
        records = list(journal.records)

        def write(record: Record) -> None:
            journal.append(record)
            records.append(record)

        def start(at: float) -> Progress:
            progress = take_up(
                rollout.plan,
                journal,
                rollout.hosts,
                at=at,
                retry=options.retry,
                builds=rollout.builds,
                sent=_sent(options) if rollout.plan.policy.rolls else None,
            )
            records[:] = read_journal(journal.path)
            return progress

        # Next to the plan, so that the process that resumes the run finds what a killed one left.
        real = real_plan(options.plan.absolute())
        work = real.with_name(f".{real.name}.work")
        return _drive(rollout, show, work, start, write, records)


def _sent(options: Options) -> set[tuple[str, str]]:
    """Return the instances, by scale set and id, that a roll has sent something for."""
    path = requests_of(options.plan)
    records = read_requests(path) if path.exists() else []
    return {(r.scale_set, r.instance) for r in records if isinstance(r, Replacement)}


def verify(
    rollout: Rollout, show: Callable[[], AbstractContextManager[Display]]
) -> tuple[dict[str, Any], int]:
    """Verify hosts; return the report, and the signal that stopped it or 0. Only reports are written."""
    records: list[Record] = []

    def start(at: float) -> Progress:
        progress = begin(rollout.plan)
        records.append(Opened(at=at, plan=rollout.plan.digest, builds=rollout.builds))
        apply(progress, records[0])
        return progress

    with tempfile.TemporaryDirectory(prefix="image-builder-") as folder:
        return _drive(rollout, show, Path(folder) / "work", start, records.append, records)


def _fleet(
    rollout: Rollout,
    work: Path,
    stack: ExitStack,
    on_wait: Callable[[], None],
    on_note: Callable[[str], None],
) -> Fleet:
    """Return the fleet that a rollout acts on; that of a roll also reaches the cluster and Azure."""
    plan, options = rollout.plan, rollout.options
    if plan.policy.rolls is None:
        return Fleet(rollout.setup, work, on_wait)
    assert plan.target and options.kubeconfig  # prepare checked both
    access = kubeconfig.load(options.kubeconfig)
    change = Change(
        target=plan.target,
        run=plan.run,
        holder=identity(plan.holder),
        kube=lambda: Client(access, agent=_AGENT),
        azure=stack.enter_context(open_client(plan.hosts, options.azure)),
        journal=requests_of(options.plan),
        policy=plan.policy.rolls.drain,
        max_fenced=plan.max_fenced,
        deadline=plan.policy.rolls.deadline_at,
        asks_nodes=plan.policy.rolls.ask_nodes,
        force_ephemeral=plan.policy.rolls.force_ephemeral,
        takes_over=options.takes_over,
    )
    return RollFleet(rollout.setup, change, work, on_wait, on_note)


def _drive(
    rollout: Rollout,
    show: Callable[[], AbstractContextManager[Display]],
    work: Path,
    start: Callable[[float], Progress],
    write: Callable[[Record], None],
    records: list[Record],
) -> tuple[dict[str, Any], int]:
    """Drive what ``start`` returns to its end, shown by ``show``; ``records`` includes those of earlier runs."""
    stop, control_plane = Stop(), rollout.setup.control_plane
    shown, left, is_over = list[Progress](), "", False
    try:
        with ExitStack() as stack:
            stack.enter_context(stop.listening())
            display = stack.enter_context(show())
            fleet = stack.enter_context(
                _fleet(rollout, work, stack, lambda: display.changed(shown[0]), display.note)
            )
            stop.wake = fleet.wake
            if not control_plane.is_read and rollout.plan.policy.mode != "check":
                display.note(UNWATCHED)
            shown.append(start(fleet.now()))
            driver.run(shown[0], fleet, write, stop.is_requested)
            is_over = True
    except (ImageBuilderError, NodeError) as error:
        if not is_over:
            raise
        # Everything that can be said of the hosts is, though Azure doesn't answer any more.
        left = str(error.message)
    result = {**report(shown[0], records), "control_plane_read": control_plane.is_read}
    if left:
        result["left"] = left
    return result, stop.number if shown[0].stopped else 0
