"""The lab's registry as a node of ``pending_pods`` sees it: its own images and three small ones, behind a slow link.

node  ->  10.0.2.2:443 (QEMU: this host's 127.0.0.1)  ->  Link: one rate for all, can stall
      ->  RegistryProxy: a rate for each connection, answers according to the plan  ->  Debian's docker-registry
"""

from __future__ import annotations

import random
import shutil
import ssl
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from image_builder.lab import certificate, images, pause, registry
from image_builder.lab.registry import HOST, PORT
from image_builder.system import process
from tests.e2e.link import Link
from tests.e2e.pods import QUOTA, SMALL, STALLED
from tests.support.registries.plan import Upstream
from tests.support.registries.proxy import RegistryProxy

MB = 1_000_000
LINK_RATE = 8.0 * MB
CONNECTION_RATE = 4.0 * MB
# Incompressible bytes, in addition to the program that all of them run.
CONTENT = {QUOTA: 64_000, SMALL: 4 * MB, STALLED: 64 * MB}
_LISTEN = ("127.0.0.1", PORT)


class Registry:
    """A context manager: all servers run inside the block.

    Callers must be in namespaces of their own (``namespace.run_isolated``), including the network: it listens on port
    443 of 127.0.0.1. ``tools`` is a tools tree, ``storage`` the product of the stage lab_images, ``work`` an empty
    directory with room for some 500 MB.
    """

    def __init__(self, tools: Path, storage: Path, work: Path) -> None:
        self.tools, self.work = tools, work
        # Leave the store's own copy unchanged: images are added here.
        self.storage = work / "storage"
        shutil.copytree(storage, self.storage)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            behind = stack.enter_context(registry.serve(self.tools, self.storage, self.work, writable=True))
            for pod, size in CONTENT.items():
                self._push(behind, pod.repository, pod.tag, size)
            made = certificate.make(HOST, self._folder("certificate"))
            self.ca = made.ca.read_bytes()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(made.server, made.key)
            trusted = ssl.create_default_context(cafile=str(behind.ca))
            self.proxy = stack.enter_context(
                RegistryProxy(
                    ("127.0.0.1", 0),
                    context,
                    Upstream(behind.address, behind.port, HOST, trusted),
                    rate=CONNECTION_RATE,
                )
            )
            self.link = stack.enter_context(Link(_LISTEN, self.proxy.address, LINK_RATE))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def _folder(self, name: str) -> Path:
        path = self.work / name
        path.mkdir()
        return path

    def _push(self, behind: registry.Registry, repository: str, tag: str, size: int) -> None:
        """Make an image of the pause program and ``size`` random bytes; push it."""
        tree = self._folder(f"tree-{repository}")
        (tree / "run").write_bytes(pause.program())
        (tree / "run").chmod(0o755)
        (tree / "content").write_bytes(random.Random(repository).randbytes(size))
        layer = images.layer_from_tree(tree, self.work / f"{repository}.tar.gz", process.run)
        image = images.make_image([layer], {"Entrypoint": ["/run"]}, [f"pending_pods {repository}"])
        images.push(behind, repository, tag, image)

    def asked(self, repository: str) -> list[float]:
        """Return the times of all requests for a repository, in seconds of ``time.monotonic``."""
        return [r.started for r in self.proxy.requests if r.path.startswith(f"/v2/{repository}/")]

    def sent(self, repository: str) -> int:
        """Return how many bytes of a repository's blobs were sent."""
        return self.proxy.bytes_sent(f"/v2/{repository}/blobs/")
