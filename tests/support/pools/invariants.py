"""The eighteen invariants of a roll, each a function over its merged log that yields the violations.

They judge by the state of Azure and the API server at each moment, not by the driver's view of it; the journal counts
only for what was written before a request was sent, and for how hosts ended. Those about endings apply once a roll has
ended, by itself or after it was resumed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from image_builder.drain.pods import Class, classify, pod_from
from image_builder.pool.run.progress import replay
from image_builder.pool.run.records import Began, Finished, Gated, Opened, Passed, Result, Stopped, Turned
from image_builder.pool.run.state import HostStatus, Progress
from image_builder.pool.scale_set.records import Replacement, Settled
from image_builder.system.identity import name_of
from tests.support.arm.fleet import BUILDS
from tests.support.arm.limits import Limits
from tests.support.arm.serving import SECRET, TOKEN
from tests.support.pools.recorder import Log, NodeState, PodState, Sent, moment

Invariant = Callable[[Log], Iterator[str]]
_LOOK_SECONDS, _MACHINE_SECONDS = 2.0, 60.0
# How far a watch may lag behind.
_WATCH_SECONDS = 2.0
_SECRETS = (TOKEN, SECRET, "PRIVATE KEY", "client-key-data")


def progress(log: Log) -> Progress:
    return replay(log.plan, log.run)


def statuses(log: Log) -> dict[str, HostStatus]:
    return progress(log).hosts


def replacements(log: Log) -> Iterator[tuple[Sent, str, str]]:
    """Yield each request that may replace a disk, with each instance that it names and the name of its host."""
    for sent in log.sent:
        for number in sent.numbers if sent.replaces else ():
            host = log.host(sent.scale_set, number)
            if host:
                yield sent, number, host.name


def not_too_many_away(log: Log) -> Iterator[str]:
    """I1: the number of hosts that can't take a job never exceeds the limit, judged by the API server's own objects.

    A host with our cordon that is still busy counts as working. Hosts that others have cordoned don't count as away;
    those that were NotReady before the roll, or had no Node, do.
    """
    began = log.run[0].at if log.run else 0.0
    states = {host.name: state for host in log.plan.hosts if (state := log.before(host.name))}
    tenants: dict[str, set[str]] = defaultdict(set)
    away = {name for name, state in states.items() if state.is_gone or _is_away(state, is_idle=True)}
    changes: list[NodeState | PodState] = [*log.nodes, *log.pods]
    for change in sorted(changes, key=lambda change: change.at):
        if isinstance(change, PodState):
            name = change.node
            (tenants[name].add if change.holds else tenants[name].discard)(change.uid)
        else:
            name = change.name
            if change.at > began and name in states:
                states[name] = change
        if name not in states:
            continue
        is_away = _is_away(states[name], is_idle=not tenants[name])
        (away.add if is_away else away.discard)(name)
        if change.at > began and len(away) > log.plan.max_unavailable:
            yield f"{len(away)} hosts are away at once: {', '.join(sorted(away))}"
            return


def _is_away(state: NodeState, *, is_idle: bool) -> bool:
    if state.is_gone:
        return False
    return not state.is_ready or state.is_barred or (bool(state.run) and is_idle)


def only_empty_hosts(log: Log) -> Iterator[str]:
    """I2: requests that replace a disk are sent only for empty hosts, after a look at most two seconds before."""
    looks = defaultdict(list)
    for event in log.audit:
        if query := re.search(r"/pods\?.*spec\.nodeName%3D([^%&]+)", event["requestURI"]):
            looks[query[1]].append(moment(event))
    for sent, _, name in replacements(log):
        for pod in log.tenants(name, sent.at - _LOOK_SECONDS):
            yield f"{sent.verb} of {name}, on which {pod.document['metadata']['name']} runs"
        if not any(sent.at - _LOOK_SECONDS <= at <= sent.at for at in looks[name]):
            yield f"{sent.verb} of {name} without a look at its pods in the two seconds before"


def lost_jobs(log: Log) -> list[str]:
    """Return the pods that ran on a host when its disk was replaced, even if started in the last two seconds (R15)."""
    lost = []
    for disk in log.disks:
        host = log.host(disk.scale_set, disk.number)
        for pod in log.tenants(host.name, disk.at) if host else ():
            if pod.runs:
                lost.append(f"{pod.document['metadata']['name']} on {pod.node}")
    return lost


def intents_come_first(log: Log) -> Iterator[str]:
    """I3: each request that replaces a disk has its own intent before it, and no instance has two open intents."""
    intents: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    open_since: dict[tuple[str, str], float] = {}
    for record in log.requests:
        if not isinstance(record, Replacement | Settled):
            continue
        key = (record.scale_set.lower(), record.instance)
        if isinstance(record, Settled):
            open_since.pop(key, None)
            continue
        if key in open_since:
            yield f"a second intent for {key[1]} of {key[0]} before the first one was settled"
        open_since[key] = record.at
        intents[(*key, record.verb)].append(record.at)
    posts: Counter[tuple[str, str, str]] = Counter()
    for sent, number, name in replacements(log):
        key3 = (sent.scale_set, number, sent.verb)
        posts[key3] += 1
        if posts[key3] > sum(at <= sent.at for at in intents[key3]):
            yield f"{sent.verb} number {posts[key3]} of {name} without an intent before it"


def instances_by_name(log: Log) -> Iterator[str]:
    """I4: every request names its instances one by one, each the plan's machine, read at most a minute before."""
    reads: dict[str, list[float]] = defaultdict(list)
    for sent in log.sent:
        if sent.verb == "read":
            reads[sent.scale_set].append(sent.at)
            continue
        if sent.verb in ("tags", "model", "service"):
            continue
        if not sent.replaces:
            yield f"{sent.method} {sent.path}"
        elif not sent.numbers or not all(re.fullmatch("[0-9]+", number) for number in sent.numbers):
            yield f"{sent.path} names {list(sent.numbers)}"
        for number in sent.numbers:
            host = log.host(sent.scale_set, number)
            if host is None:
                yield f"{sent.verb} of {number}, which is no host of the plan"
            elif sent.vm_ids.get(number) != host.vm_id.lower() and sent.status < 300:
                yield f"{sent.verb} of {host.name}, which is another machine by now"
        if not any(sent.at - _MACHINE_SECONDS <= at <= sent.at for at in reads[sent.scale_set]):
            yield f"{sent.verb} of {sent.scale_set} whose instances were read more than a minute ago"


def models_under_a_condition(log: Log) -> Iterator[str]:
    """I5: a model is changed only with If-Match, only its version, and only where Azure replaces nothing by itself."""
    for sent in log.sent:
        if sent.method != "PATCH":
            continue
        if not sent.if_match:
            yield f"PATCH of {sent.scale_set} without If-Match"
        if sent.verb == "tags":
            continue
        image = (
            (sent.body or {}).get("properties", {}).get("virtualMachineProfile", {}).get("storageProfile", {})
        )
        version = image.get("imageReference", {}).get("id")
        only = {"imageReference": {"id": version}}
        if sent.body != {"properties": {"virtualMachineProfile": {"storageProfile": only}}} or not version:
            yield f"PATCH of {sent.scale_set} with {sent.body}"
        if sent.status < 300 and (sent.mode != "Manual" or sent.is_upgraded_by_azure):
            yield f"PATCH of {sent.scale_set}, whose instances Azure replaces by itself"


def one_operation_a_set(log: Log) -> Iterator[str]:
    """I6: a scale set has at most one set-wide operation of ours at a time."""
    busy: dict[str, float] = {}
    for sent in log.sent:
        if sent.verb == "upgrade" and 200 <= sent.status < 300:
            if busy.get(sent.scale_set, 0.0) > sent.at:
                yield f"an upgrade of {sent.scale_set} during another one"
            busy[sent.scale_set] = sent.until


def no_pod_is_deleted(log: Log) -> Iterator[str]:
    """I7: only pods that may be evicted are, gangs as a whole, and none is deleted.

    The API server itself ensures that no budget is exceeded, since it decides on evictions.
    """
    rolls = log.plan.policy.rolls
    assert rolls
    yield from _torn_gangs(log)
    for event in log.audit:
        target = event.get("objectRef") or {}
        if target.get("resource") != "pods":
            continue
        if event["verb"] in ("delete", "deletecollection"):
            yield f"DELETE of {target.get('namespace')}/{target.get('name')}"
        if target.get("subresource") != "eviction":
            continue
        for pod in log.pods:
            meta = pod.document["metadata"]
            if (meta["namespace"], meta["name"]) == (target["namespace"], target["name"]) and not pod.is_gone:
                is_over = moment(event) >= rolls.deadline_at
                kind = classify(pod_from(pod.document), rolls.drain, pod.at, overruled=is_over).kind
                if pod.at <= moment(event) and kind is Class.WAIT:
                    yield f"eviction of {meta['namespace']}/{meta['name']}, which is waited for"
                    break


def _torn_gangs(log: Log) -> Iterator[str]:
    """Yield each eviction of a Job's pod at a time when the roll hadn't cordoned all hosts of that Job."""
    for event in log.audit:
        target = event.get("objectRef") or {}
        if target.get("subresource") != "eviction" or event["responseStatus"]["code"] >= 300:
            continue
        at = moment(event)
        present = log.present(at)
        for evicted in [pod for pod in present if pod.name == target["name"] and pod.job]:
            hosts = {pod.node for pod in present if pod.job == evicted.job}
            if free := [name for name in hosts if log.run_on(name, at + _WATCH_SECONDS) != log.run_id]:
                yield f"eviction of {evicted.name}, whose Job also runs on {', '.join(sorted(free))}"


def cordons_are_as_before(log: Log) -> Iterator[str]:
    """I8: in the end others' cordons are still there, and ours is only on hosts that failed with the new image."""
    ends = statuses(log)
    for name in log.plan.host:
        before, now, status = log.before(name), log.last(name), ends[name]
        if before is None or now is None or now.is_gone:
            continue
        if before.is_cordoned and not before.is_ours and not now.is_cordoned:
            yield f"the cordon of {name} was somebody else's"
        outcome = status.outcome
        is_quarantined = bool(outcome and outcome.is_failure and status.touched and not status.restored)
        if now.is_ours and not is_quarantined:
            yield f"{name} is still ours, and ended {outcome}"


def versions_are_known(log: Log) -> Iterator[str]:
    """I9: each host runs what its outcome says, unless that is `unknown`.

    The command ensures that a run with such a host doesn't end with 0, see tests/unit/cli.
    """
    target = log.plan.target
    assert target
    for name, status in statuses(log).items():
        machine = log.machines.get((status.host.scale_set_id.lower(), status.host.instance))
        outcome = status.outcome
        if machine is None or outcome is None or machine.vm_id.lower() != status.host.vm_id.lower():
            continue
        before = target.before[status.host.scale_set_id]
        if outcome.ok:
            expected = target.version
        elif not outcome.is_failure or status.restored or not status.touched:
            expected = before
        else:
            continue
        if machine.disk != expected:
            yield f"{name} ended {outcome.signature}, and runs {machine.disk}"


def ok_is_proven(log: Log) -> Iterator[str]:
    """I10: `ok` requires the new build, a new boot, and a passing suite after that."""
    target = log.plan.target
    assert target
    verified = {r.host: r for r in log.run if isinstance(r, Result) and r.step == "verify" and r.outcome.ok}
    boots: dict[tuple[str, str], set[str]] = defaultdict(set)
    for record in log.requests:
        if isinstance(record, Replacement) and record.boot_id:
            boots[record.scale_set.lower(), record.instance].add(record.boot_id)
    for name, status in statuses(log).items():
        if not (status.outcome and status.outcome.ok):
            continue
        key = (status.host.scale_set_id.lower(), status.host.instance)
        machine = log.machines.get(key)
        if name not in verified:
            yield f"{name} is ok, and was never verified"
        if machine is None or BUILDS.get(machine.disk) != target.build or machine.boot_id in boots[key]:
            yield f"{name} is ok, and has no new boot of the build"
        replaced = [d.at for d in log.disks if (d.scale_set, d.number) == key and d.version == target.version]
        if name in verified and replaced and verified[name].at < replaced[-1]:
            yield f"{name} was verified before it had its image"


def one_way_and_back(log: Log) -> Iterator[str]:
    """I11: a host gets each image at most once."""
    times = Counter((disk.scale_set, disk.number, disk.version) for disk in log.disks)
    for (scale_set, number, version), count in times.items():
        if (host := log.host(scale_set, number)) and count > 1:
            yield f"{host.name} got {version} {count} times"


def waves_wait(log: Log) -> Iterator[str]:
    """I12: a wave begins once the previous one has passed and soaked, its canaries are fine and the gate says go."""
    passed: dict[int, float] = {}
    verdict, red_at, stopped = "hold", 0.0, False
    waves = progress(log).waves
    for record in log.run:
        match record:
            case Opened():
                stopped = False
            case Passed():
                passed[record.wave] = record.at
            case Gated():
                verdict = record.verdict
                red_at = record.at if verdict != "go" else red_at
            case Stopped():
                stopped = True
            case Began(wave=number):
                if stopped or verdict != "go":
                    yield f"wave {number} began: {'stopped' if stopped else verdict}"
                if not number:
                    continue
                soak = waves[number - 1].wave.soak_seconds
                if number - 1 not in passed or record.at < max(passed[number - 1], red_at) + soak:
                    yield f"wave {number} began before the one before it had soaked"
            case _:
                pass


def models_go_back_first(log: Log) -> Iterator[str]:
    """I13: after a stop no host gets the new image, and all models name the old one before a host gets that."""
    target = log.plan.target
    assert target
    turned = next((record.at for record in log.run if isinstance(record, Turned)), None)
    before = {path.lower(): version.lower() for path, version in target.before.items()}
    intents: dict[tuple[str, str], list[Replacement]] = defaultdict(list)
    for record in log.requests:
        if isinstance(record, Replacement):
            intents[record.scale_set.lower(), record.instance].append(record)
    for sent, number, name in replacements(log):
        earlier = [record for record in intents[sent.scale_set, number] if record.at <= sent.at]
        if not earlier:
            continue  # I3
        is_back = earlier[-1].version.lower() != target.version.lower()
        if is_back and any(sent.models[path].lower() != version for path, version in before.items()):
            yield f"{name} went back before all models did"
        if not is_back and turned is not None and sent.at > turned and not _reopened(log, turned, sent.at):
            yield f"{name} got the new image after the models went back"


def _reopened(log: Log, since: float, until: float) -> bool:
    return any(isinstance(record, Opened) and since < record.at < until for record in log.run)


def services_run(log: Log) -> Iterator[str]:
    """I14: Azure's own services are running again for each set."""
    for path, services in log.services.items():
        for service, state in services.items():
            if state != "Running":
                yield f"{service} of {path} is {state}"


def there_is_a_way_back(log: Log) -> Iterator[str]:
    """I15: the version that a set leaves still exists in a region as long as a journal names it.

    The roll itself doesn't protect it from deletion; the code that publishes and prunes does (gallery/prune).
    """
    target = log.plan.target
    assert target
    for version in {*target.before.values()}:
        content = log.versions.get(version.lower())
        summary = ((content or {}).get("properties", {}).get("replicationStatus") or {}).get("summary") or ()
        if not any(region["state"] == "Completed" for region in summary):
            yield f"{version} is gone, or nowhere"


def one_driver(log: Log) -> Iterator[str]:
    """I16: changes to a scale set come only from the run that has marked it, while the mark is valid.

    The mark is the set's tag. The additional Lease in the cluster has a test of its own (R23).
    """
    for sent in log.sent:
        holder, _, until = sent.tag.rpartition(" until ")
        if (sent.replaces or sent.verb in ("model", "service")) and name_of(holder) != log.run_id:
            yield f"{sent.verb} of {sent.scale_set}, which is held by {holder or 'nobody'}"
        elif sent.replaces and moment({"stageTimestamp": until}) < sent.at:
            yield f"{sent.verb} of {sent.scale_set}, held until {until}"


def no_secret_is_written(log: Log) -> Iterator[str]:
    """I17: no token or key is in a journal, a plan, or the driver's output."""
    for path in log.files:
        text = path.read_text(errors="replace")
        for secret in _SECRETS:
            if secret in text:
                yield f"{path.name} has {secret[:4]}…"


def half_of_the_limits(log: Log, speed: float) -> Iterator[str]:
    """I18: in any minute, at most half of the refill of each of Azure's rate-limit buckets is used.

    ``speed`` is how many times faster a test is than a data center: unless all delays are shortened alike, this can't
    be judged.
    """
    for name, share in shares(log, speed).items():
        if share > 0.5:
            yield f"{share:.0%} of what {name} is refilled with"


def shares(log: Log, speed: float) -> dict[str, float]:
    """Return the usage of each kind of bucket in its busiest minute, as a fraction of its refill."""
    limits = Limits()
    taken: dict[tuple[str, str], list[float]] = defaultdict(list)
    for sent in log.sent:
        for key in limits.keys_of(sent.method, sent.path):
            taken[key].append(sent.at)
    most: dict[str, float] = {}
    for (policy, _), moments in taken.items():
        busiest, first = 0, 0
        for last, at in enumerate(moments):
            while moments[first] < at - 60.0 / speed:
                first += 1
            busiest = max(busiest, last - first + 1)
        most[policy] = max(most.get(policy, 0.0), busiest / limits.policies[policy].refill)
    return most


AT_EVERY_MOMENT: dict[str, Invariant] = {
    "I1": not_too_many_away,
    "I2": only_empty_hosts,
    "I3": intents_come_first,
    "I4": instances_by_name,
    "I5": models_under_a_condition,
    "I6": one_operation_a_set,
    "I7": no_pod_is_deleted,
    "I11": one_way_and_back,
    "I12": waves_wait,
    "I13": models_go_back_first,
    "I15": there_is_a_way_back,
    "I16": one_driver,
    "I17": no_secret_is_written,
}
AT_THE_END: dict[str, Invariant] = {
    "I8": cordons_are_as_before,
    "I9": versions_are_known,
    "I10": ok_is_proven,
    "I14": services_run,
}


def violations(log: Log, *, speed: float | None = None, was_killed: bool = False) -> list[str]:
    """Return all violations of invariants; those about endings count only once a roll has ended. ``speed``: see I18.

    A driver that was killed may have stopped the roll without releasing what it held.
    """
    is_stopped = bool(log.run) and bool(progress(log).stopped) and not was_killed
    is_over = is_stopped or (bool(log.run) and isinstance(log.run[-1], Finished))
    chosen = {**AT_EVERY_MOMENT, **(AT_THE_END if is_over else {})}
    broken = [f"{name}: {reason}" for name, holds in chosen.items() for reason in holds(log)]
    if speed:
        broken += [f"I18: {reason}" for reason in half_of_the_limits(log, speed)]
    return broken


def require(log: Log, *, but: str = "none") -> None:
    """Require that all invariants except ``but`` hold, and that no job was lost."""
    broken, lost = [text for text in violations(log) if not text.startswith(f"{but}:")], lost_jobs(log)
    assert not broken and not lost, (broken, lost)
