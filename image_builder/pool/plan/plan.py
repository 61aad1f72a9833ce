"""The plan of a rollout as a document: a run does only what its plan contains.

It is made only from an inventory and a policy, without a clock: the same input gives the same bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from pydantic import Field, ValidationError

from image_builder.canonical import digest
from image_builder.errors import DefinitionError, ImageBuilderError, Problem
from image_builder.node import files
from image_builder.pool.plan.model import Host, Pool, Strict, Target, at_least, at_most
from image_builder.pool.plan.policy import Policy
from image_builder.pool.plan.waves import Wave, plan_waves
from image_builder.text import json_lines, short_list

T = TypeVar("T")
_RUN_DIGITS = 12
# The prefix of every roll's name on nodes.
ROLL = "roll-"
# Separates the name of the run that a rollback undoes from the rollback's own.
BACK = "-back-"


def _is_none(value: object) -> bool:
    return value is None


class PlannedFrom(Strict):
    """The inventory that a plan was made from. ``digest`` covers its files and every planned host."""

    paths: tuple[str, ...]
    digest: str


class Plan(Strict):
    """Hosts, waves and the policy; ``digest`` covers everything else."""

    format: Literal[1] = 1
    digest: str
    inventory: PlannedFrom
    policy: Policy
    pools: tuple[Pool, ...]
    hosts: tuple[Host, ...]
    waves: tuple[Wave, ...]
    target: Target | None = Field(default=None, exclude_if=_is_none)

    @cached_property
    def host(self) -> dict[str, Host]:
        return {host.name: host for host in self.hosts}

    @property
    def run(self) -> str:
        """Return the name of a roll on nodes."""
        return (self.target.undoes if self.target else "") or f"{ROLL}{self.digest[:_RUN_DIGITS]}"

    @cached_property
    def zones(self) -> Counter[str]:
        """Return the number of hosts in each zone."""
        return Counter(host.zone for host in self.hosts)

    @property
    def holder(self) -> str:
        """Return the name of a roll on scale sets.

        A rollback's differs from that of the roll that it undoes, so that the two never drive a set at the same time.
        """
        return (
            f"{self.run}{BACK}{self.digest[:_RUN_DIGITS]}" if self.target and self.target.undoes else self.run
        )

    @property
    def max_unavailable(self) -> int:
        return at_least(self.policy.most_unavailable, len(self.hosts))

    @property
    def budget(self) -> int:
        return at_most(self.policy.budget, len(self.hosts))

    @property
    def max_fenced(self) -> int:
        """Return how many hosts of a roll's last wave may be cordoned while they still work."""
        return at_most(self.policy.rolls.max_fenced, len(self.hosts)) if self.policy.rolls else 0

    @property
    def deadline(self) -> str:
        """Return the time after which a roll evicts jobs whose owners didn't allow it; empty: never."""
        return self.policy.rolls.deadline if self.policy.rolls else ""

    @property
    def skip_budget(self) -> int:
        """Return how many hosts a roll may skip and still be a success."""
        return at_most(self.policy.rolls.skip_budget, len(self.hosts)) if self.policy.rolls else 0

    @property
    def same(self) -> int:
        return max(self.policy.same_least, at_least(self.policy.same_share, len(self.hosts)))


def make_plan(
    inventory: PlannedFrom,
    pools: Sequence[Pool],
    hosts: Sequence[Host],
    policy: Policy,
    waves: tuple[Wave, ...] | None = None,
    target: Target | None = None,
) -> Plan:
    """Return the plan for these hosts, in the policy's waves unless ``waves`` are given. A roll has a target."""
    plan = Plan(
        digest="",
        inventory=inventory,
        policy=policy,
        pools=tuple(pools),
        hosts=tuple(sorted(hosts, key=lambda h: h.name)),
        waves=plan_waves(hosts, policy, seed=inventory.digest) if waves is None else waves,
        target=target,
    )
    return plan.model_copy(update={"digest": _digest(plan)})


def _digest(plan: Plan) -> str:
    return digest(plan.model_dump(mode="json", exclude={"digest"}))


def render(plan: Plan) -> bytes:
    """Return a plan as a JSON document, with a line for each host and each slice."""
    return json_lines(plan.model_dump(mode="json")).encode()


def save(plan: Plan, path: Path) -> None:
    """Write a plan; the file contains either all of it or its previous content. Raises OSError."""
    files.write(path, render(plan))


def load(path: Path) -> Plan:
    """Read a plan; raises DefinitionError with every problem."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DefinitionError([Problem(str(path), "plan", str(error.strerror))]) from error
    return parse(data, str(path))


def parse(data: bytes, where: str) -> Plan:
    """Return the plan in a document; raises DefinitionError, also for one that was edited by hand."""
    try:
        plan = Plan.model_validate_json(data)
    except ValidationError as error:
        problems = [
            Problem(where, ".".join(str(part) for part in fault["loc"]) or "plan", fault["msg"])
            for fault in error.errors()
        ]
        raise DefinitionError(problems, hint="make a new one: image-builder pool plan") from error
    problems = [Problem(where, "plan", reason) for reason in _inconsistent(plan)]
    if problems:
        raise DefinitionError(problems, hint="make a new one: image-builder pool plan")
    return plan


def _inconsistent(plan: Plan) -> list[str]:
    faults = []
    if plan.digest != _digest(plan):
        faults.append("was changed after it was made: its digest doesn't match")
    placed = Counter(name for wave in plan.waves for name in wave.hosts)
    if twice := sorted(name for name, count in placed.items() if count > 1):
        faults.append(f"in more than one wave: {short_list(twice)}")
    if lost := sorted(plan.host.keys() ^ placed.keys()):
        faults.append(f"in the waves but not among the hosts, or vice versa: {short_list(lost)}")
    return faults


def doubles(users: Iterable[tuple[T, str]]) -> dict[T, list[str]]:
    """Return the things that more than one name has, from (thing, name) pairs: thing -> the names."""
    names: dict[T, list[str]] = defaultdict(list)
    for thing, name in users:
        names[thing].append(name)
    return {thing: alike for thing, alike in names.items() if len(alike) > 1}


class Faults:
    """Collects problems: all of them are reported at once, before the first host is touched."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def collect(self, path: str, work: Callable[[], T]) -> T | None:
        """Return what ``work`` returns, or None if it raises; the error is collected."""
        try:
            return work()
        except DefinitionError as error:
            self.problems += error.problems
        except ImageBuilderError as error:
            self.problems.append(Problem("", path, error.message))
        return None

    def add(self, path: str, reason: str) -> None:
        self.problems.append(Problem("", path, reason))

    def all(self) -> DefinitionError:
        """Return an error with all problems."""
        return DefinitionError(self.problems, hint="no host was touched")

    def report(self) -> None:
        """Raise DefinitionError if anything was wrong."""
        if self.problems:
            raise self.all()


class Difference(NamedTuple):
    """How an inventory differs from the planned hosts, as sorted names.

    ``replaced`` are different machines under a planned name, ``changed`` the same ones with another address or place.
    """

    new: tuple[str, ...]
    gone: tuple[str, ...]
    replaced: tuple[str, ...]
    changed: tuple[str, ...]

    @property
    def text(self) -> str:
        parts = ((len(names), kind) for kind, names in zip(self._fields, self, strict=True))
        return ", ".join(f"{count} {kind}" for count, kind in parts if count)


def compare(planned: Iterable[Host], current: Iterable[Host]) -> Difference:
    """Return how the ``current`` hosts differ from the ``planned`` ones.

    Without machine ids, a different address means a different machine, which is checked before it is trusted.
    """
    before, now = ({host.name: host for host in hosts} for hosts in (planned, current))
    both = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    replaced = tuple(name for name in both if _other_machine(before[name], now[name]))
    return Difference(
        new=tuple(sorted(now.keys() - before.keys())),
        gone=tuple(sorted(before.keys() - now.keys())),
        replaced=replaced,
        changed=tuple(name for name in both if name not in set(replaced)),
    )


def _other_machine(before: Host, now: Host) -> bool:
    if before.vm_id and now.vm_id:
        return before.vm_id != now.vm_id
    return (before.address, before.port) != (now.address, now.port)


def stale(plan: Plan, inventory: PlannedFrom, hosts: Iterable[Host]) -> list[Problem]:
    """Return why a plan doesn't match an inventory as it is now; an empty list if it does."""
    if plan.inventory.digest == inventory.digest:
        return []
    return [older(inventory.paths, compare(plan.hosts, hosts).text or "no host differs, a file does")]


def older(paths: Iterable[str], how: str) -> Problem:
    """Return the problem of a plan that was made from another state of these inventories."""
    return Problem(", ".join(paths), "plan", f"is older than the inventory: {how}")
