"""A collector of problems: all of them are reported at once, before the first host is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from image_builder.errors import DefinitionError, ImageBuilderError, Problem

T = TypeVar("T")


class Faults:
    """Collects problems."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def collect(self, path: str, work: Callable[[], T]) -> T | None:
        """Return what ``work`` does, or None where it raises, which is kept."""
        try:
            return work()
        except DefinitionError as error:
            self.problems += error.problems
        except ImageBuilderError as error:
            self.problems.append(Problem("", path, error.message))
        return None

    def add(self, path: str, reason: str) -> None:
        self.problems.append(Problem("", path, reason))

    def all(self) -> DefinitionError:
        """Return the error with all of them."""
        return DefinitionError(self.problems, hint="no host was touched")

    def report(self) -> None:
        """Raise DefinitionError, if anything was wrong."""
        if self.problems:
            raise self.all()
