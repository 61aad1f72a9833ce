"""The time that planning a rollout of 7,500 hosts takes, and the figures of such a rollout.

    .venv/bin/python tests/bench/pools.py [--hosts 7500] [--real 200] [--verified 60] [--resumed 24]
        [--bootstrapped 8] [--rejoined 5] [--only probe|verify|resume|bootstrap|rejoin] [--smallest] [--json]

The inventory is generated here (75 scale sets of 100 hosts), and each measurement has a process of its own. As root it
also reaches real hosts (tests/support/pools/fleet.py: each an sshd in a network namespace) with our program and Ansible
in turn, and lets a node join; it needs the small image and `worker_join_current`, which it builds if they don't exist.
The hosts' sshds run on the same processors, which slows down both.

    plan_seconds     `pool plan` of all hosts, the whole command, goal <= 10
    plan_gib         its largest resident size, goal <= 1
    plan_ratio       CPU seconds of `pool plan` / of reading the same inventory and each host's variables through
                     Ansible's own API
    probe_ratio      wall time to connect to each real host, log in and run one command / of `ansible -m raw -f 50`
                     on the same hosts (both check pinned host keys; Ansible without ControlPersist, which costs
                     time and is useless for a single command), goal <= 0.15
    verify_ratio     `pool verify`, the whole command with the real suite of the small image: wall time on 60 hosts /
                     on one of them, goal <= 12; the median of some rounds, in each of which one host is verified before
                     and after all of them. The hosts' share, most of the work, runs on the same processors;
                     `verify_runs` has the CPU seconds of both sides, for 1, 8 and 60 hosts. Checks that need a booted
                     machine fail, the same ones on each host
    resume_overhead  how much longer a rollout takes if its driver is killed halfway and resumed, as a share of one
                     that isn't killed; joining takes 20 s on each host; goal <= 0.1
    bootstrap_ratio  wall time until 8 hosts with the small image have joined / until the playbooks of the same image
                     were pushed by Ansible to 8 hosts that have only its base, goal <= 0.3. Ours is a whole run of
                     one slice, with its probe and one check on each host; the agent is a stand-in that takes 2 s to
                     join. The push is one ansible-playbook with a fork for each host, pipelined, connections kept
                     open. Excluded from its time, all in its favor: downloads (each host has the packages, with
                     their index read), a disk (memory, without fsync), sshd and sudo (already installed), starting
                     services and a reboot into the kernel (the hosts haven't booted), the join. Afterwards all hosts
                     have the same packages, files of the roles, kernel and enabled units
    rejoin_seconds   `node-agent join` on a node that has joined, the slowest of five runs of the agent of
                     `worker_join_current` in that image's own tree with its own engine (tests/bench/rejoin.py),
                     compared with the first one, which waits for a certificate; nothing is emulated, and nothing else
                     of a booted machine runs at the same time; goal <= 10
    rejoin_changed   files written by the node that these runs changed (bytes, mode, inode, times), compared with
                     those that the first one changed, goal 0

After that: the arithmetic of such a rollout, by hand and by driving it in simulated time
(tests/support/pools/simulated/rollouts.py; no real host or control plane is part of these figures).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from image_builder.pool.plan.model import at_most  # noqa: E402
from image_builder.pool.plan.policy import Policy  # noqa: E402
from image_builder.pool.run.records import Record  # noqa: E402
from image_builder.pool.run.state import Progress  # noqa: E402
from image_builder.settings import DEFAULT_STORE  # noqa: E402
from tests.bench import measures, rejoin, report  # noqa: E402
from tests.bench.report import Row  # noqa: E402
from tests.support.images.builds import Workplace  # noqa: E402
from tests.support.pools.fleet import USER, fleet  # noqa: E402
from tests.support.pools.simulated.rollouts import START, Faults, World, make, make_hosts, simulate  # noqa: E402

GOALS = {
    "plan_seconds": ("<=", 10.0),
    "plan_gib": ("<=", 1.0),
    "probe_ratio": ("<=", 0.15),
    "verify_ratio": ("<=", 12.0),
    "resume_overhead": ("<=", 0.1),
    "bootstrap_ratio": ("<=", 0.3),
    "rejoin_seconds": ("<=", 10.0),
    "rejoin_changed": ("<=", 0.0),
}
_PROBES = 3  # runs of each; the fastest counts
_IMAGE_BYTES, _REGISTRY_BITS = 17e9, 100e9
_LEASE_SECONDS, _STATUS_SECONDS = 10, 300
_READ = """
import sys
from pathlib import Path
from image_builder.definition import engine
source = engine.read_inventory([Path(sys.argv[1])], (), Path(sys.argv[2]))
for name in source.group("pools"):
    source.variables.get_vars(host=source.manager.get_host(name), include_hostvars=False)
"""
_PROBE = """
import json, sys
from pathlib import Path
from image_builder.pool.reach.hostkeys import Pinned
from image_builder.pool.plan.model import Host
from image_builder.pool.reach.reach import Access, Reach
user, key, pinned, hosts = json.loads(Path(sys.argv[1]).read_text())
with Reach(Access(Pinned(Path(pinned)), user, Path(key), auth_seconds=120)) as reach:
    asked = [reach.submit(Host(**host), ["true"], seconds=120) for host in hosts]
sys.exit(any(a.result().status != 0 for a in asked))
"""


class Took(NamedTuple):
    wall: float
    cpu: float
    peak_bytes: int


def write_inventory(folder: Path, count: int) -> Path:
    """Write an inventory of ``count`` hosts; return its path."""
    lines, current = ["all: {children: {pools: {children: {"], ""
    for host in make_hosts(count):
        if host.scale_set != current:
            lines += ["}}," if current else ""]
            current = host.scale_set
            facts = {"pool_image": host.image, "pool_vm_size": host.vm_size, "pool_zone": host.zone}
            lines += [f"{current.replace('-', '_')}: {{vars: {json.dumps(facts)}, hosts: {{"]
        lines.append(f"  {host.name}: {{ansible_host: {host.address}}},")
    lines.append("}}}}}}")
    file = folder / "hosts.yml"
    file.write_text("\n".join(lines) + "\n")
    return file


def child(argv: list[str], **extra: str) -> Took:
    """Run this Python in a process of its own; the resources that its children use count too."""
    started = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(REPO)} | extra
    process = subprocess.Popen([sys.executable, *argv], stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, argv
    return Took(time.monotonic() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def measure(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = write_inventory(Path(folder), count)
        out = Path(folder) / "plan.json"
        read = child(["-c", _READ, str(file), str(REPO / "playbooks/layers")])
        plan = child(["-m", "image_builder.cli", "pool", "plan", "-i", str(file), "pools", "--out", str(out)])
        size = out.stat().st_size
    return {
        "hosts": count,
        "plan_seconds": round(plan.wall, 2),
        "plan_cpu_seconds": round(plan.cpu, 2),
        "read_seconds": round(read.wall, 2),
        "read_cpu_seconds": round(read.cpu, 2),
        "plan_gib": round(plan.peak_bytes / 2**30, 3),
        "read_gib": round(read.peak_bytes / 2**30, 3),
        "plan_ratio": round(plan.cpu / read.cpu, 2),
        "plan_mb": round(size / 1e6, 2),
    }


def probe(count: int) -> dict[str, Any]:
    """Reach ``count`` real hosts, alternately with our program and with Ansible."""
    with tempfile.TemporaryDirectory() as folder:
        place = Workplace(DEFAULT_STORE, Path(folder) / "images", "minimal")
        assert place.build().status == 0
        with fleet(place, Path(folder), count) as pool:
            told, inventory, config = (
                Path(folder) / n for n in ("probe.json", "inventory.json", "ansible.cfg")
            )
            config.touch()
            hosts = [host.model_dump() for host in pool.hosts]
            told.write_text(json.dumps([USER, str(pool.key), str(pool.pinned.path), hosts]))
            inventory.write_text(
                json.dumps({"all": {"hosts": {h.name: pool.variables(h) for h in pool.hosts}}})
            )
            raw = [
                "-m",
                "ansible.cli.adhoc",
                "all",
                "-i",
                str(inventory),
                *["-m", "raw", "-a", "true", "-f", "50"],
            ]
            plain = {"ANSIBLE_CONFIG": str(config), "ANSIBLE_SSH_ARGS": "-C -o ControlMaster=no"}
            turns = [(child(["-c", _PROBE, str(told)]), child(raw, **plain)) for _ in range(_PROBES)]
    ours, ansible = (min(runs, key=lambda took: took.wall) for runs in zip(*turns, strict=True))
    return {
        "probe_hosts": count,
        "probe_seconds": round(ours.wall, 2),
        "probe_cpu_seconds": round(ours.cpu, 2),
        "probe_mb": round(ours.peak_bytes / 1e6),
        "raw_seconds": round(ansible.wall, 2),
        "raw_cpu_seconds": round(ansible.cpu, 2),
        "raw_mb": round(ansible.peak_bytes / 1e6),
        "probe_ratio": round(ours.wall / ansible.wall, 2),
    }


def real(options: argparse.Namespace) -> dict[str, Any]:
    """Run the requested measurements on real hosts."""
    found: dict[str, Any] = {}
    if options.only in (None, "probe"):
        found |= probe(options.real)
    for name, work, count in (
        ("verify", measures.verify, options.verified),
        ("resume", measures.resume, options.resumed),
        ("bootstrap", measures.bootstrap, options.bootstrapped),
    ):
        if options.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                place = Workplace(DEFAULT_STORE, Path(folder) / "images", "minimal")
                assert place.build().status == 0
                found |= work(place, Path(folder), count)
    if options.only in (None, "rejoin"):
        with tempfile.TemporaryDirectory() as folder:
            found |= rejoin.measure(DEFAULT_STORE, Path(folder), options.rejoined)
    return found


def by_hand(count: int, policy: Policy) -> list[tuple[str, str]]:
    """Return the figures of a rollout, by arithmetic from its plan only."""
    plan = make(count, policy)
    waves = plan.waves
    early, late = waves[:3], waves[3:]
    # A wave lasts until its last join slot, plus the time that the slowest twentieth takes.
    lasts = [len(wave.hosts) / policy.join_rate + 60 for wave in waves]
    clock = sum(max(s + w.soak_seconds, w.cadence_seconds) for s, w in zip(lasts[:-1], waves, strict=False))
    largest = max(len(wave.hosts) for wave in waves)
    return [
        ("scale sets of 100", str(-(-count // 100))),
        ("waves", f"{len(waves)}: {', '.join(str(len(w.hosts)) for w in early)}, {len(late)} x <= {largest}"),
        ("image replicas (one for 50 VMs at once)", str(-(-largest // 50))),
        (
            "joins: cap, mean of a full wave",
            f"{policy.join_rate:g}/s, {largest / policy.cadence_seconds:.1f}/s",
        ),
        ("jitter window of the largest wave", f"{largest / policy.join_rate:.0f} s"),
        ("clock, lower bound by the join rate", f"{count / policy.join_rate / 60:.0f} min"),
        ("clock, with soaks and cadence", f"{(clock + lasts[-1]) / 60:.0f} min"),
        ("  and 10 min of active preflight", f"{(clock + lasts[-1]) / 60 + 10:.0f} min"),
        ("leases once joined", f"{count / _LEASE_SECONDS:.0f} PUT/s"),
        ("node status once joined", f"{count / _STATUS_SECONDS:.0f}/s"),
        ("image bytes, were they pulled", f"{count * _IMAGE_BYTES / 1e12:.1f} TB"),
        ("  at 100 Gbit/s", f"{count * _IMAGE_BYTES * 8 / _REGISTRY_BITS / 3600:.1f} h"),
        ("budget of the run, of a full wave", f"{plan.budget}, {at_most(policy.wave_budget, largest)}"),
        ("unavailable at once", str(plan.max_unavailable)),
    ]


def simulated(count: int, policy: Policy, faults: Faults) -> list[tuple[str, str]]:
    """Return the figures of the same rollout driven in simulated time."""
    started = time.process_time()
    most = 0
    plan = make(count, policy)
    world = World(plan, faults)

    def check() -> None:
        nonlocal most
        most = max(most, len(world.touched) - len(world.fine))

    world.check = check
    done: tuple[Progress, World, list[Record]] = simulate(plan, faults, world=world)
    progress, _, records = done
    seconds = time.process_time() - started
    return [
        ("clock", f"{(world.time - START) / 60:.0f} min"),
        ("ended", "all waves" if progress.finished else progress.stopped),
        ("hosts failed, budget", f"{progress.failed}, {plan.budget}"),
        ("unavailable at once, allowed", f"{most}, {plan.max_unavailable}"),
        ("joins, of one host at most", f"{sum(world.joins.values())}, {max(world.joins.values())}"),
        ("Ansible processes, of hosts at most", f"{len(world.slices)}, {max(world.slices)}"),
        ("records", str(len(records))),
        ("CPU of the driver and the simulation", f"{seconds:.1f} s"),
    ]


def main() -> int:
    options = _options()
    found: dict[str, Any] = {} if options.only else measure(options.hosts)
    if os.geteuid() == 0:
        found |= real(options)
    tables = {} if options.only else _tables(options.hosts)
    if options.json and tables:
        found["tables"] = {name: dict(rows) for name, rows in tables.items()}
    status = report.conclude(options, found, GOALS, _rows(found, options))
    for name, lines in {} if options.json else tables.items():
        print(f"\n{options.hosts} hosts, {name}")
        for what, value in lines:
            print(f"  {what:<42}{value}")
    return status


def _tables(hosts: int) -> dict[str, list[tuple[str, str]]]:
    wide = Policy(wave_budget="7%", budget="5%")
    bad = Faults(failures=0.02, hangs=0.005, token_gap=15.0, throttled=[(3000, 3200)])
    faults = "2 % fail, 0.5 % hang, tokens expire, 200 s of 429"
    return {
        "by arithmetic": by_hand(hosts, Policy()),
        "simulated, nothing goes wrong": simulated(hosts, Policy(), Faults()),
        f"simulated, {faults}; budgets 5 % and 7 %": simulated(hosts, wide, bad),
        "simulated, the same with the budgets of 2 %": simulated(hosts, Policy(), bad),
    }


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--hosts", type=int, default=7500)
    for name, count, what in (
        ("real", 200, "real hosts"),
        ("verified", 60, "real hosts to verify"),
        ("resumed", 24, "real hosts of a run that is killed"),
        ("bootstrapped", 8, "real hosts with an image, and without"),
        ("rejoined", 5, "runs of a node that has joined"),
    ):
        parser.add_argument(f"--{name}", type=int, default=count, help=f"{what} (as root)")
    parts = ["probe", "verify", "resume", "bootstrap", "rejoin"]
    parser.add_argument("--only", choices=parts, help="nothing but that")
    return report.parse(parser, hosts=200, real=2, verified=2, resumed=8, bootstrapped=1, rejoined=1)


def _rows(found: dict[str, Any], options: argparse.Namespace) -> list[Row]:
    """Return the measurements that were made, ours and the reference side by side."""
    pairs = [
        (f"plan {options.hosts} hosts, CPU", "plan_cpu_seconds", "read_cpu_seconds", "plan_ratio"),
        (f"probe {options.real} real hosts", "probe_seconds", "raw_seconds", "probe_ratio"),
        (
            f"verify {options.verified} hosts, or one",
            "verify_many_seconds",
            "verify_one_seconds",
            "verify_ratio",
        ),
        (
            f"{options.resumed} hosts, killed, or not",
            "resume_killed_seconds",
            "resume_whole_seconds",
            "resume_overhead",
        ),
        (
            f"{options.bootstrapped} hosts, baked, or pushed",
            "bootstrap_baked_seconds",
            "bootstrap_pushed_seconds",
            "bootstrap_ratio",
        ),
        ("join again, or at first", "rejoin_seconds", "join_seconds", "rejoin_seconds"),
        ("  files changed", "rejoin_changed", "join_changed", "rejoin_changed"),
    ]
    alone = [(f"plan {options.hosts} hosts, wall", "plan_seconds"), ("  peak memory, GiB", "plan_gib")]
    return [
        *(Row(name, f"{found[key]}", "", key) for name, key in alone if key in found),
        *(
            Row(name, f"{found[ours]}", f"{found[other]}", key)
            for name, ours, other, key in pairs
            if ours in found
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
