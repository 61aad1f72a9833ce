"""The command line of a first contact, and of the processes that it starts."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from image_builder.node.errors import NodeError
from image_builder.node.gpu.smoke.worker import end_with_the_parent
from tests.bench.first_contact.context import (
    TOTAL_SECONDS,
    Context,
    from_options,
    read_json,
    write_result,
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(prog="first-contact", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("first-contact", help="learn all that this machine can teach")
    first.add_argument("out", type=Path, help="a new directory")
    first.add_argument(
        "--seconds", type=float, default=TOTAL_SECONDS, help="less than the usual 540: each step has less"
    )
    first.add_argument(
        "--pace", type=float, help="less than 1 measures less in each step; by default as --seconds has it"
    )
    first.add_argument(
        "--vm-size", default="", help="what the platform would say, as Standard_ND96isr_H100_v5"
    )
    first.add_argument(
        "--root", type=Path, default=Path("/"), help="where /proc, /sys and /dev of the machine are"
    )
    first.add_argument(
        "--only", action="append", default=[], metavar="STEP", help="this step; may be repeated"
    )
    step = commands.add_parser("step")
    step.add_argument("name")
    step.add_argument("--out", type=Path, required=True)
    step.add_argument("--seconds", type=float, required=True)
    step.add_argument("--pace", type=float, required=True)
    step.add_argument("--root", type=Path, required=True)
    step.add_argument("--vm-size", default="")
    from tests.bench.first_contact import worker

    worker.parser(commands)
    answers = commands.add_parser("nvml")
    answers.add_argument("--out", type=Path, required=True)
    propose = commands.add_parser("propose", help="make recordings, floors and a table of what was learnt")
    propose.add_argument("out", type=Path, help="a first contact's directory")
    propose.add_argument("--into", type=Path, help="where to write; by default OUT/proposal")
    pack = commands.add_parser("pack", help="make this program one file")
    pack.add_argument("file", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if all steps were done, 1 if not, 2 for wrong usage."""
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        return _COMMANDS[options.command](options)
    except (NodeError, OSError) as error:
        sys.stderr.write(f"first-contact: {options.command}: {error}\n")
        return 1


def _first_contact(options: argparse.Namespace) -> int:
    from tests.bench.first_contact import runner
    from tests.bench.first_contact.steps import BY_NAME, STEPS

    unknown = sorted(set(options.only) - set(BY_NAME))
    if unknown or not 1 <= options.seconds <= TOTAL_SECONDS:
        wrong = f"no step {', '.join(unknown)}" if unknown else f"--seconds: not 1 to {TOTAL_SECONDS:g}"
        sys.stderr.write(f"first-contact: {wrong}\n")
        return runner.USAGE
    out = options.out.resolve()
    if out.exists() and any(out.iterdir()):
        sys.stderr.write(f"first-contact: {out} is not empty; what it holds stays as it is\n")
        return runner.USAGE
    end = time.monotonic() + options.seconds
    share = options.seconds / TOTAL_SECONDS
    context = Context(out, "", end, options.pace or share, options.root.resolve(), options.vm_size)
    say = runner.teller(sys.stderr)
    steps = [step for step in STEPS if not options.only or step.name in options.only]
    status = runner.run(context, steps, share, say)
    say(runner.shown(read_json(out / runner.SUMMARY)))
    return status


def _step(options: argparse.Namespace) -> int:
    from tests.bench.first_contact.steps import BY_NAME

    end_with_the_parent()
    context = from_options(options)
    write_result(context, BY_NAME[options.name].work(context))
    return 0


def _worker(options: argparse.Namespace) -> int:
    from tests.bench.first_contact import worker

    return worker.run(options)


def _nvml(options: argparse.Namespace) -> int:
    from tests.bench.first_contact import nvml_answers

    end_with_the_parent()
    return nvml_answers.ask(options.out)


def _propose(options: argparse.Namespace) -> int:
    from tests.bench.first_contact import propose

    return propose.run(options.out, options.into or options.out / "proposal")


def _pack(options: argparse.Namespace) -> int:
    from tests.bench.first_contact import archive

    return archive.run(options.file)


_COMMANDS = {
    "first-contact": _first_contact,
    "step": _step,
    "worker": _worker,
    "nvml": _nvml,
    "propose": _propose,
    "pack": _pack,
}

if __name__ == "__main__":
    sys.exit(main())
