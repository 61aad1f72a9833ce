"""The node agent's command line. Each command imports what it needs: on a node every tenth of a second counts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from image_builder.node.errors import NodeError


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; ``command`` is one of the commands."""
    parser = argparse.ArgumentParser(prog="node-agent", description="What a baked node does at boot.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("disk", help="find, check, format and mount the local disk")
    commands.add_parser("seed", help="give a blank data root the preloaded images")
    commands.add_parser("preload", help="ask the engine for every image, load what is missing")
    commands.add_parser("promote", help="copy seeded layers to the local disk")
    status = commands.add_parser("status", help="what happened, and why")
    status.add_argument("--json", action="store_true", help="for programs")
    compile_ = commands.add_parser("compile", help="write this agent to a file that starts faster")
    compile_.add_argument("target", type=Path)
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> int:
    """Do what was asked for; raises NodeError."""
    match options.command:
        case "disk":
            from image_builder.node.disk.command import run as disk

            return disk()
        case "seed":
            from image_builder.node.seed.command import run as seed

            return seed()
        case "preload":
            from image_builder.node.preload.command import run as preload

            return preload()
        case "promote":
            from image_builder.node.promote.command import run as promote

            return promote()
        case "compile":
            from image_builder.node.zipapp import install

            changed = install(Path(sys.argv[0]), options.target)
            sys.stdout.write("changed\n" if changed else "unchanged\n")
            return 0
        case _:
            from image_builder.node.report import run as report

            return report(as_json=options.json)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 1 after an error that was told."""
    try:
        return run(parse(sys.argv[1:] if argv is None else argv))
    except NodeError as error:
        sys.stderr.write(f"node-agent: FAILED: {error.code}: {error.message}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
