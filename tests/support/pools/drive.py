"""Drive a rollout in a separate process, which a test can kill: ``python -m tests.support.pools.drive FILE``.

It does what ``pool run``, ``pool resume`` and ``pool verify`` do, with shorter timeouts for connections, and with the
test's own suite in place of ``image_builder/suite``, which is for booted machines, unlike the hosts here.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from image_builder.cli.pool.table import LiveTable
from image_builder.errors import ImageBuilderError
from image_builder.pool import rollout
from image_builder.pool.reach.hostkeys import Pinned
from image_builder.pool.reach.reach import Access
from image_builder.pool.rollout import Options


@dataclass(frozen=True)
class Request:
    """A run to drive. All fields are paths except ``user`` and the flags."""

    plan: str
    inventory: str
    user: str
    key: str
    known_hosts: str
    facts: str
    suite: str
    reports: str
    node_configs: str
    kubeconfig: str = ""
    is_resumed: bool = False
    retry: bool = False
    verify: bool = False


def drive(request: Request) -> int:
    """Drive a run and print its report; return 0 if it finished, 1 if it was stopped."""
    access = Access(
        Pinned(Path(request.known_hosts)),
        request.user,
        Path(request.key) if request.key else None,
        # Only hosts whose fault it is take as long, however busy the machine is.
        connect_seconds=6.0,
        banner_seconds=6.0,
        auth_seconds=30.0,
        keepalive_seconds=1.0,
        sudo_seconds=8.0,
    )
    options = Options(
        plan=Path(request.plan),
        access=access,
        reports=Path(request.reports),
        inventories=(Path(request.inventory),),
        is_resumed=request.is_resumed,
        retry=request.retry,
        facts=(request.facts,),
        node_configs=Path(request.node_configs) if request.node_configs else None,
        kubeconfig=Path(request.kubeconfig) if request.kubeconfig else None,
    )
    prepared = (
        rollout.prepare_verification(options, options.plan) if request.verify else rollout.prepare(options)
    )
    assert prepared.setup.suite
    suite = dataclasses.replace(prepared.setup.suite, folder=Path(request.suite))
    prepared = dataclasses.replace(prepared, setup=dataclasses.replace(prepared.setup, suite=suite))
    result, _ = rollout.verify(prepared, LiveTable) if request.verify else rollout.drive(prepared, LiveTable)
    print(json.dumps(result))
    return 0 if result["state"] == "finished" else 1


if __name__ == "__main__":
    try:
        sys.exit(drive(Request(**json.loads(Path(sys.argv[1]).read_text()))))
    except ImageBuilderError as error:
        sys.exit(error.message)
