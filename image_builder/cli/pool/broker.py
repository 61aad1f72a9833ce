"""``pool broker``: give nodes that prove their identity a bootstrap token."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from image_builder.cli.command import AsJson, Kubeconfig, connect, register, show
from image_builder.system.signals import listening

if TYPE_CHECKING:
    from image_builder.cluster.broker.config import Config
    from image_builder.node.net.kube import Client

# A node waits ten seconds for an answer; a request to the API server must be over before that.
_CLUSTER_SECONDS = 8.0
_AGENT = "image-builder-broker"


app = typer.Typer()


@register(app, name="broker")
def broker(
    config: Annotated[
        Path, typer.Option("--config", metavar="FILE", help="the broker's configuration, as YAML")
    ],
    kubeconfig: Kubeconfig = None,
    check: Annotated[bool, typer.Option("--check", help="check the configuration and exit")] = False,
    as_json: AsJson = False,
) -> int:
    """Give nodes bootstrap tokens, each for its managed identity, until SIGTERM.

    Standard output has one line for each request, as JSON, whatever its result; no line holds a secret.

    Example:

        image-builder pool broker --config broker.yml
    """
    from image_builder.cluster.broker.config import load

    settings = load(config)
    if check:
        pools = [pool.name for pool in settings.pools]
        show(
            {"pools": pools, "audience": settings.identity.audience},
            f"{config}: {', '.join(pools)}",
            as_json=as_json,
        )
        return 0
    _serve(settings, lambda: connect(kubeconfig, _AGENT, _CLUSTER_SECONDS))
    return 0


def _serve(config: Config, connect: Callable[[], Client]) -> None:
    from image_builder.cluster.broker.keys import Keys, source
    from image_builder.cluster.broker.server import Broker, Clients, line, open_server, say
    from image_builder.node.net.serving import TICK

    lock = threading.Lock()

    def tell(value: dict[str, Any]) -> None:
        with lock:
            sys.stdout.write(line(value))
            sys.stdout.flush()

    identity = config.identity
    keys = Keys(source(identity.jwks, identity.authority), identity.refresh_seconds, tell=partial(say, tell))
    clients = Clients(connect)
    with (
        listening(signal.SIGTERM, signal.SIGINT) as wait,
        open_server(config, Broker(config, keys, clients), tell) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": TICK})
        thread.start()
        say(tell, f"port {server.port}, pools {', '.join(pool.name for pool in config.pools)}")
        wait()
        server.shutdown()
        thread.join()
    clients.close()
