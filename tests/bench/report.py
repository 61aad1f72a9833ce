"""The options, printed table or JSON object, and exit status that all benches share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Goals = Mapping[str, tuple[str, float]]


class Row(NamedTuple):
    """A line of the table: ours beside the reference, and the figure that compares them."""

    name: str
    ours: str
    reference: str
    figure: str


def parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser for the options of all benches; ``doc`` is the bench's module docstring."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument(
        "--smallest",
        action="store_true",
        help="measure as little as possible, to see that it runs: no goal is judged",
    )
    return made


def parse(made: argparse.ArgumentParser, **smallest: Any) -> argparse.Namespace:
    """Parse the command line; ``smallest`` are the defaults of other options with ``--smallest``."""
    if "--smallest" in sys.argv:
        made.set_defaults(**smallest)
    return made.parse_args()


def conclude(
    options: argparse.Namespace, figures: Mapping[str, Any], goals: Goals, rows: Iterable[Row] = ()
) -> int:
    """Print the figures, as ``rows`` if there are any; return 1 if one misses its goal."""
    if options.json:
        print(json.dumps(figures))
    elif rows := list(rows):
        print(f"{'name':<36}{'ours':>14}{'reference':>14}{'ratio':>9}  goal")
        for row in rows:
            print(
                f"{row.name:<36}{row.ours:>14}{row.reference or '-':>14}{figures[row.figure]:>9g}  "
                f"{_goal(goals, row.figure)}".rstrip()
            )
    else:
        for name, value in figures.items():
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            print(f"{name:<46}{shown:>12}  {_goal(goals, name)}".rstrip())
    met = [is_met(goal, figures[name]) for name, goal in goals.items() if name in figures]
    return 0 if options.smallest or all(met) else 1


def is_met(goal: tuple[str, float], value: float) -> bool:
    sign, limit = goal
    return value <= limit if sign == "<=" else value >= limit


def _goal(goals: Goals, name: str) -> str:
    return f"{goals[name][0]} {goals[name][1]:g}" if name in goals else ""
