"""What the role node_join writes to ``/etc/node-agent/join.json``: where things are in this image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from image_builder.node.join.codes import JoinError

ENGINES = ("", "docker", "containerd")


@dataclass(frozen=True)
class Settings:
    """``imds``: the metadata service, empty for none. ``custom_data`` and ``file``: where else a configuration may be.

    ``kubernetes``: where the kubelet looks for its files. ``engine``: who must answer, empty for nobody.
    ``clock_seconds``: how far this machine's clock may be off the API server's.
    """

    imds: str = "http://169.254.169.254"
    custom_data: str = "/var/lib/cloud/instance/user-data.txt"
    file: str = "/etc/node-agent/node-config.json"
    kubernetes: str = "/etc/kubernetes"
    engine: str = ""
    healthz: str = "http://127.0.0.1:10248/healthz"
    clock_seconds: float = 60.0


def parse(found: Mapping[str, Any]) -> Settings:
    """Return the settings; raises JoinError (16) with everything that is wrong."""
    known = {field.name: field.default for field in fields(Settings)}
    problems = [f"{name}: there is no such setting" for name in found.keys() - known.keys()]
    values: dict[str, Any] = {}
    for name in found.keys() & known.keys():
        value = found[name]
        if isinstance(known[name], float) and isinstance(value, (int, float)) and not isinstance(value, bool):
            values[name] = float(value)
        elif isinstance(known[name], str) and isinstance(value, str):
            values[name] = value
        else:
            problems.append(f"{name}: {value!r} is no {type(known[name]).__name__}")
    made = Settings(**values)
    rules = {
        f"engine: {made.engine!r} is none of docker, containerd": made.engine in ENGINES,
        f"imds: {made.imds!r} is no http address": not made.imds or made.imds.startswith("http://"),
        "clock_seconds: 1 to 3600": 1 <= made.clock_seconds <= 3600,
        **{
            f"{name}: {path!r} is no absolute path": path.startswith("/")
            for name, path in (
                ("custom_data", made.custom_data),
                ("file", made.file),
                ("kubernetes", made.kubernetes),
            )
        },
    }
    problems += [words for words, is_kept in rules.items() if not is_kept]
    if problems:
        raise JoinError(16, "join.json: " + "; ".join(sorted(problems)))
    return made
