"""``pool drain``, ``pool free`` and ``pool why``: empty hosts without losing a job, release them, show what they wait
for."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from image_builder.cli.command import AsJson, Kubeconfig, connect, register, show
from image_builder.errors import EXIT_INTERRUPTED, ImageBuilderError, PoolError, UsageError
from image_builder.node.errors import NodeError
from image_builder.system.signals import waking
from image_builder.text import columns

if TYPE_CHECKING:
    from image_builder.drain.policy import Policy
    from image_builder.drain.run import Drain, Outcome
    from image_builder.node.net.kube import Client

app = typer.Typer()
_AGENT = "image-builder-drain"
# The run that has cordoned a host: a person's, through this command, unless --run names another.
_RUN = "manual"
# The longest pause while the API server is in trouble, and how long it may refuse what it allowed before.
_TROUBLE_SECONDS, _REFUSAL_SECONDS = 60.0, 120.0

Hosts = Annotated[list[str], typer.Argument(metavar="HOST…", help="names of nodes")]
Run = Annotated[
    str, typer.Option("--run", metavar="ID", help="act on the cordons of this run, such as a rollout")
]
PolicyFile = Annotated[
    Path | None,
    typer.Option("--policy", metavar="FILE", help="how far to go, how long to wait, rules for pods; as YAML"),
]


@register(app)
def drain(
    hosts: Hosts,
    policy: PolicyFile = None,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="MODE", help="idle-only, fence, ask or evict  [default: the policy's, or fence]"
        ),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="skip hosts still busy after this  [default: the policy's, or 3600]",
        ),
    ] = None,
    whole_gangs: Annotated[
        bool, typer.Option("--whole-gangs", help="drain the other hosts of their gangs too")
    ] = False,
    take_cordoned: Annotated[
        bool, typer.Option("--take-cordoned", help="drain hosts that somebody else has cordoned")
    ] = False,
    insist: Annotated[
        bool, typer.Option("--insist", help="cordon a host again if somebody uncordons it meanwhile")
    ] = False,
    run: Run = _RUN,
    kubeconfig: Kubeconfig = None,
    as_json: AsJson = False,
) -> int:
    """Drain hosts: cordon them, wait for their jobs, and evict what may be evicted if the policy says so.

    Pods with GPUs are waited for, and never evicted without their owner's consent; gangs are drained as a unit. Hosts
    still busy at the timeout are uncordoned and skipped, and the exit status is 16. An interrupted drain uncordons the
    hosts that aren't empty yet; rerun the same command to resume a killed one.

    Example:

        image-builder pool drain gpu-17 gpu-18 --mode evict --wait 7200 --kubeconfig drain.conf
    """
    from image_builder.drain.run import Drain

    settings = _policy(
        policy,
        mode=mode,
        max_wait_seconds=wait,
        whole_gangs=whole_gangs or None,
        take_cordoned=take_cordoned or None,
        insist=insist or None,
    )
    over = threading.Event()
    with _answered(kubeconfig) as client, waking(over.set, signal.SIGTERM, signal.SIGINT):
        _check(client, evicts=settings.mode == "evict")
        work = Drain(client, run, settings, _tell)
        work.add(dict.fromkeys(hosts))
        _work(work, run, over)
    _show(run, list(work.outcomes.values()), as_json=as_json)
    if over.is_set():
        return EXIT_INTERRUPTED
    return PoolError.exit_code if any(o.state == "skipped" for o in work.outcomes.values()) else 0


def _policy(file: Path | None, **options: Any) -> Policy:
    """Return the policy of a file, overridden by the options that were given.

    Raises DefinitionError if the file is invalid, UsageError if an option is.
    """
    from pydantic import ValidationError

    from image_builder.drain.policy import Policy
    from image_builder.strict_yaml import load

    settings = load(file, Policy, "policy") if file else Policy()
    changes = {name: value for name, value in options.items() if value is not None}
    try:
        return Policy.model_validate({**settings.model_dump(), **changes, "rules": settings.rules})
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in error.errors())
        raise UsageError(faults) from error


def _check(client: Client, *, evicts: bool) -> None:
    """Check what the API server supports. If it can't be reached now, it isn't waited for, unlike later."""
    if not client.serves_evictions() and evicts:
        raise PoolError(
            "the API server has no eviction API of policy/v1", hint="Kubernetes 1.22 or later has"
        )


def _work(work: Drain, run: str, over: threading.Event) -> None:
    """Take turns until all hosts are done, or until ``over``; in either case release hosts that aren't empty.

    Raises PoolError with the hosts that can't be released, KubeError if the API server refuses.
    """
    from image_builder.node.net.kube import KubeError
    from image_builder.node.net.retry import backoff

    failures, allowed = 0, float("-inf")
    try:
        while work.open_hosts and not over.is_set():
            try:
                work.turn()
                failures, pause, allowed = 0, work.pause, time.monotonic()
            except KubeError as error:
                # An API server that has just started refuses everything until it has read the roles; all other errors
                # are waited out, and nothing is decided in the meantime.
                is_refusal = error.status in (401, 403)
                if error.is_hopeless or (is_refusal and time.monotonic() - allowed > _REFUSAL_SECONDS):
                    raise
                if not is_refusal:
                    allowed = time.monotonic()
                failures += 1
                pause = backoff(failures, retry_after=error.retry_after, cap=_TROUBLE_SECONDS)
                _tell(f"{error.message}; again in {pause:.0f} s")
            if work.open_hosts:
                over.wait(pause)
    finally:
        _release(work, run)


def _release(work: Drain, run: str) -> None:
    try:
        work.release()
    except NodeError as error:
        names = " ".join(work.open_hosts)
        raise PoolError(
            f"hosts may still be cordoned: {names}: {error.message}",
            hint=f"image-builder pool free {names} --run {run}",
        ) from error


def _show(run: str, outcomes: list[Outcome], *, as_json: bool) -> None:
    from image_builder.drain import why as view

    hosts = [
        {"host": o.host, "state": o.state, "reason": o.reason, "pods": [view.entry(t) for t in o.tenants]}
        for o in outcomes
    ]
    text = columns([("host", "state", "reason"), *((o.host, o.state, o.reason) for o in outcomes)])
    if busy := [row for host in hosts for row in view.rows(str(host["host"]), host["pods"])]:  # type: ignore[arg-type]
        text += f"\n\n{columns([view.HEAD, *busy])}"
    show({"run": run, "hosts": hosts}, text, as_json=as_json)


@register(app)
def free(hosts: Hosts, run: Run = _RUN, kubeconfig: Kubeconfig = None, as_json: AsJson = False) -> int:
    """Remove our cordons, and restore hosts to their state before the drain. Leaves others' cordons alone.

    Example:

        image-builder pool free gpu-17 gpu-18 --kubeconfig drain.conf
    """
    from image_builder.drain.run import free as give_back

    with _answered(kubeconfig) as client:
        results = {name: give_back(client, name, run) for name in dict.fromkeys(hosts)}
    states = {name: "freed" if is_freed else "not ours" for name, is_freed in results.items()}
    text = columns([("host", "state"), *states.items()])
    show({"run": run, "hosts": [{"host": n, "state": s} for n, s in states.items()]}, text, as_json=as_json)
    return 0


@register(app)
def why(
    hosts: Hosts, policy: PolicyFile = None, kubeconfig: Kubeconfig = None, as_json: AsJson = False
) -> int:
    """Show what hosts are waiting for: pods, their owners, budgets, and when their jobs end. Changes nothing.

    Example:

        image-builder pool why gpu-17 --kubeconfig drain.conf
    """
    from image_builder.drain import why as view
    from image_builder.drain.observe import Looker

    settings = _policy(policy)
    with _answered(kubeconfig) as client:
        looker, bad = Looker(client, settings), view.bad_hosts(client)
        answers = [view.explain(client, looker, name, time.time(), bad) for name in dict.fromkeys(hosts)]
    text = columns([("host", "state"), *((a["host"], a["state"]) for a in answers)])
    if busy := [row for answer in answers for row in view.rows(answer["host"], answer["pods"])]:
        text += f"\n\n{columns([view.HEAD, *busy])}"
    show({"hosts": answers}, text, as_json=as_json)
    return 0


@contextmanager
def _answered(kubeconfig: Path | None) -> Iterator[Client]:
    """Yield a connection. Raises ImageBuilderError if the API server can't be reached, or refuses."""
    try:
        with connect(kubeconfig, _AGENT) as client:
            yield client
    except NodeError as error:
        raise ImageBuilderError(
            error.message, hint="the rights that it needs are in deploy/drain.yml; --kubeconfig FILE"
        ) from error


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
