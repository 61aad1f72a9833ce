"""The node agent's command line. Each command imports only what it needs: at boot, every tenth of a second counts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from image_builder.node.errors import NodeError


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed options; ``command`` is the command's name."""
    parser = argparse.ArgumentParser(prog="node-agent", description="What a baked node does at boot.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("disk", help="find, check, format and mount the local disk")
    commands.add_parser("seed", help="give a blank data root the preloaded images")
    commands.add_parser("preload", help="ask the engine for every image, load what is missing")
    commands.add_parser("promote", help="copy seeded layers to the local disk")
    preflight = commands.add_parser("preflight", help="test this boot before the kubelet starts")
    preflight.add_argument(
        "--again", action="store_true", help="repeat the tests that this boot has not settled"
    )
    preflight.add_argument("--report", action="store_true", help="report the verdict to the API server")
    preflight.add_argument(
        "--retest", action="store_true", help="test the GPUs again, where the gate grants it"
    )
    join = commands.add_parser("join", help="become a node of a cluster, as the node configuration says")
    join.add_argument("--status", action="store_true", help="print the outcome; 1 if the node has not joined")
    health = commands.add_parser("health", help="check the running node and report what changed")
    health.add_argument("--json", action="store_true", help="for programs")
    commands.add_parser("health-endpoint", help="report the node's health to Azure's extension, on loopback")
    status = commands.add_parser("status", help="what happened, and why")
    status.add_argument("--json", action="store_true", help="for programs")
    smoke = commands.add_parser("gpu-smoke", help="test the GPUs; the exit status is the verdict")
    smoke.add_argument("--tier", default="boot-quick", help="boot-quick, boot-full or periodic")
    smoke.add_argument("--seed", type=int, help="of a run that is to be repeated")
    smoke.add_argument("--json", action="store_true", help="for programs")
    worker = commands.add_parser("gpu-worker", help="the active tests of one GPU; started by gpu-smoke")
    worker.add_argument("--gpu", required=True, help="its UUID")
    worker.add_argument("--tier", required=True)
    worker.add_argument("--seed", type=int, required=True)
    worker.add_argument("--peer", action="append", default=[], help="test only the links to this GPU")
    worker.add_argument("--drill", default="", help="go wrong on purpose")
    check = commands.add_parser("check", help="read the settings as the other commands do")
    check.add_argument("name", nargs="?", help="of one document, such as disk")
    check.add_argument("file", nargs="?", type=Path, help="where it is")
    compile_ = commands.add_parser("compile", help="write this agent to a file that starts faster")
    compile_.add_argument("target", type=Path)
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> int:
    """Run the requested command and return its exit status. Raises NodeError."""
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
        case "preflight":
            return _preflight(options)
        case "join":
            from image_builder.node.join import command as join

            return join.tell_status() if options.status else join.run()
        case "health":
            from image_builder.node.health.command import run as health

            return health(as_json=options.json)
        case "health-endpoint":
            from image_builder.node.health.application import run as health_endpoint

            return health_endpoint()
        case "gpu-smoke":
            from image_builder.node.gpu.smoke.command import run as gpu_smoke

            return gpu_smoke(options.tier, as_json=options.json, seed=options.seed)
        case "gpu-worker":
            from image_builder.node.gpu.smoke.worker import run as gpu_worker

            return gpu_worker(
                options.gpu, options.tier, options.seed, peers=options.peer, drill=options.drill
            )
        case "check":
            from image_builder.node.check import run as check

            return check(options.name, options.file)
        case "compile":
            from image_builder.node.zipapp import install

            changed = install(Path(sys.argv[0]), options.target)
            sys.stdout.write("changed\n" if changed else "unchanged\n")
            return 0
        case _:
            from image_builder.node.report import run as report

            return report(as_json=options.json)


def _preflight(options: argparse.Namespace) -> int:
    if options.report:
        from image_builder.node.preflight.report import run as report

        return report()
    if options.retest:
        from image_builder.node.preflight.retest import run as retest

        return retest()
    from image_builder.node.preflight import command

    return command.again() if options.again else command.run()


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 1 after a reported error."""
    try:
        return run(parse(sys.argv[1:] if argv is None else argv))
    except NodeError as error:
        sys.stderr.write(f"node-agent: FAILED: {error.code}: {error.message}\n")
        return 1
    except TimeoutError as error:  # another agent process still holds the lock
        sys.stderr.write(f"node-agent: FAILED: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
