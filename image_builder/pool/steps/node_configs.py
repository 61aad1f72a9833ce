"""Node configurations that hosts get on the way: a file for each, HOST.json in one directory."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from image_builder.errors import DefinitionError, Problem
from image_builder.node.errors import NodeError
from image_builder.node.join import config
from image_builder.node.net.fetch import proven_by
from image_builder.pool.plan.plan import named
from image_builder.pool.plan.render import one_nodes_of_several
from image_builder.pool.steps.control_plane import server_fault


def read(folder: Path, hosts: Sequence[str]) -> dict[str, Path]:
    """Return the file of each host. What its node would refuse is refused here, by the same rules: DefinitionError."""
    paths = {name: folder.absolute() / f"{name}.json" for name in hosts}
    files = {name: file for name, file in paths.items() if file.is_file()}
    missing = [name for name in paths if name not in files]
    problems = [f"{folder} has no file for {named(missing)}"] if missing else []
    problems += [f"{named(sorted(names))}: {fault}" for fault, names in sorted(_wrong(files).items())]
    if problems:
        raise DefinitionError(
            [Problem("", "--node-configs", fault) for fault in problems], hint="no host was touched"
        )
    return files


def _wrong(files: Mapping[str, Path]) -> dict[str, list[str]]:
    """Return what is wrong, and the hosts that it is so of."""
    wrong: dict[str, list[str]] = defaultdict(list)
    nodes: dict[str, Mapping[str, object]] = {}
    clusters: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, file in files.items():
        try:
            settings = config.parse(file.read_bytes())
            nodes[name] = vars(settings)
            clusters[settings.server, settings.ca].append(name)
        except NodeError as error:
            wrong[error.message].append(name)
        except OSError as error:
            wrong[error.strerror or str(error)].append(name)
    for (key, value), names in one_nodes_of_several(nodes).items():
        wrong[f"node.{key}: {value} can belong to only one node"] += names
    for (server, ca), names in clusters.items():
        if fault := server_fault(server, proven_by(ca), time.time()):
            wrong[f"cluster: {fault}"] += names
    return wrong
