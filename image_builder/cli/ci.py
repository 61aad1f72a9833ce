"""A run as a CI service shows it: annotations at files and lines, and a summary of the job in Markdown.

Sources: GitHub's "Workflow commands for GitHub Actions", Azure Pipelines' "Logging commands".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from image_builder.errors import DefinitionError, ImageBuilderError, StageError, UsageError
from image_builder.text import human_seconds

if TYPE_CHECKING:
    from image_builder.bake.build import BuildResult
    from image_builder.verify.result import SuiteResult

Service = Literal["github", "azure"]
_PLACE = re.compile(r"(?P<file>.+?)(?::(?P<line>\d+))?")

Summary = Annotated[
    Path | None,
    typer.Option("--summary", metavar="FILE", help="append a Markdown summary for the CI job page"),
]


def annotate(error: ImageBuilderError, service: Service) -> list[str]:
    """Return the lines that make a CI service show an error next to the files that it is about."""
    cause = error.cause if isinstance(error, StageError) else error
    line = _github if service == "github" else _azure
    if isinstance(cause, DefinitionError):
        return [line(problem.where, f"{problem.path}: {problem.reason}") for problem in cause.problems]
    return [line("", error.message)]


def _parts(where: str) -> dict[str, str]:
    """Return the file and the line of a place, or nothing for a command-line option."""
    match = None if where.startswith("-") else _PLACE.fullmatch(where)
    return {name: value for name, value in match.groupdict().items() if value} if match else {}


def _github(where: str, message: str) -> str:
    properties = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in _parts(where).items())
    return f"::error {properties}".rstrip() + f"::{_escaped(message, '')}"


def _azure(where: str, message: str) -> str:
    names = {"file": "sourcepath", "line": "linenumber"}
    parts = (f"{names[name]}={_escaped(value, '];', 'AZP')};" for name, value in _parts(where).items())
    return f"##vso[task.logissue type=error;{''.join(parts)}]{_escaped(message, '', 'AZP')}"


def _escaped(text: str, more: str, percent: str = "") -> str:
    """Percent-encode line ends and the characters in ``more``; Azure has its own code for a percent sign."""
    codes = {char: f"%{ord(char):02X}" for char in f"\r\n{more}"} | {"%": f"%{percent}25"}
    return "".join(codes.get(char, char) for char in text)


@dataclass
class Page:
    """The summary of a run, as lines of Markdown."""

    title: str
    lines: list[str] = field(default_factory=list)
    is_green: bool = True

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table."""
        cells = [[cell.replace("|", r"\|") for cell in row] for row in (heads, ["---"] * len(heads), *rows)]
        self.lines += ["", *(f"| {' | '.join(row)} |" for row in cells)]

    def stages(self, result: BuildResult) -> None:
        """Add the stages of a build, and the path of its artifact."""
        rows = [
            (
                str(stage["name"]),
                str(stage["id"])[:12],
                "there already" if stage["cached"] else human_seconds(stage["seconds"]),
            )
            for stage in result.stages
        ]
        self.table(("stage", "id", "took"), rows)
        if result.artefact:
            self.lines += ["", f"`{result.artefact}`"]

    def checks(self, result: SuiteResult) -> None:
        """Add the result of the checks, and each check that isn't green."""
        self.lines += ["", result.summary()]
        if result.not_passed:
            self.is_green = False
            rows = [(check.name, check.outcome, _one_line(check.message)) for check in result.not_passed]
            self.table(("check", "outcome", "what"), rows)

    def console(self, problems: Sequence[str]) -> None:
        """Add the problems that were found on a machine's console."""
        if problems:
            self.is_green = False
            self.table(("on the console",), [(problem,) for problem in problems])


@contextmanager
def summary(file: Path | None, title: str) -> Iterator[Page]:
    """Append a page to ``file``, if one is given, including the error if the block ends with one."""
    if file and not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise UsageError(f"can't write the summary to {file}")
    page = Page(title)
    has_ended = False
    try:
        yield page
        has_ended = True
    except ImageBuilderError as error:
        page.lines += ["", "```", f"error: {error.message}", "```"]
        raise
    finally:
        if file:
            with file.open("a", encoding="utf-8") as stream:
                mark = "✅" if has_ended and page.is_green else "❌"
                stream.write("\n".join([f"### {mark} {page.title}", *page.lines, "", ""]))


def _one_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
