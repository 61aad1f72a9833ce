"""Expected errors: a class hierarchy; each class has its own exit code and the meaning shown in the help.

Ctrl-C exits 130. A bug shows its traceback and exits 70 (``EX_SOFTWARE``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class ImageBuilderError(Exception):
    """An expected error: what failed and where, with the next step in ``hint``."""

    exit_code: ClassVar[int] = 1
    meaning: ClassVar[str] = "an expected failure that no other code describes"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(ImageBuilderError):
    exit_code = 2  # the same as click's
    meaning = "the command line is wrong"


@dataclass(frozen=True, order=True)
class Problem:
    """One problem in a definition.

    ``where`` is ``file:line`` or empty; ``path`` is the variable's path (``image_disk.root_size_mib``).
    """

    where: str
    path: str
    reason: str

    def __str__(self) -> str:
        return "  ".join(part for part in (self.where, f"{self.path}: {self.reason}") if part)


class DefinitionError(ImageBuilderError):
    exit_code = 3
    meaning = "the inventory or a variable is wrong; lists every problem"

    def __init__(self, problems: Sequence[Problem], *, hint: str | None = None) -> None:
        self.problems = tuple(sorted(problems))
        count = len(self.problems)
        title = f"{count} problem{'s' if count != 1 else ''} in the definition"
        super().__init__("\n".join([title, *(f"  {p}" for p in self.problems)]), hint=hint)


class VaultError(ImageBuilderError):
    exit_code = 4
    meaning = "a vaulted value could not be decrypted"


class HostError(ImageBuilderError):
    exit_code = 5
    meaning = "this host is unsuitable: operating system, root, packages, kernel"


class SpaceError(ImageBuilderError):
    exit_code = 6
    meaning = "not enough disk space"


class LockError(ImageBuilderError):
    exit_code = 7
    meaning = "the lock is missing, malformed or doesn't fit the definition"


class FetchError(ImageBuilderError):
    exit_code = 8
    meaning = "a download failed, or its bytes are not the expected ones"


class CommandError(ImageBuilderError):
    """A program ended with an unexpected status or timed out."""

    exit_code = 9
    meaning = "a program failed"

    def __init__(
        self, message: str, *, argv: Sequence[str] = (), tail: str = "", hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.argv = tuple(argv)
        self.tail = tail


class StageError(ImageBuilderError):
    """A stage failed. ``log`` is the file that holds its whole output.

    ``enterable`` is set if the stage works in the image's own root, which ``--shell-on-failure`` opens. A cause
    with its own class (space, store, verification, download) keeps its exit code; a failed program or a
    generic error exits with 10.
    """

    exit_code = 10
    meaning = "a stage failed; a cause with its own code exits with that code"

    def __init__(
        self, stage: str, cause: ImageBuilderError, *, log: str | None = None, enterable: bool = False
    ) -> None:
        super().__init__(f"stage {stage}: {cause.message}", hint=cause.hint)
        self.stage = stage
        self.cause = cause
        self.log = log
        self.enterable = enterable
        if type(cause) is not ImageBuilderError and not isinstance(cause, CommandError):
            self.exit_code = cause.exit_code  # type: ignore[misc]


class StoreError(ImageBuilderError):
    exit_code = 11
    meaning = "the store, or an export of one, is damaged or unsuitable"


class VerifyError(ImageBuilderError):
    exit_code = 12
    meaning = "a check failed, or none ran"


class BootError(ImageBuilderError):
    exit_code = 13
    meaning = "the VM did not come up"


class PublishError(ImageBuilderError):
    exit_code = 14
    meaning = "an artifact could not be published"


class PullError(ImageBuilderError):
    """A container image could not be pulled. ``records`` has one for each pull of a set, as in pulls.json."""

    exit_code = 15
    meaning = "a container image could not be pulled, or is not the expected one"

    def __init__(
        self, message: str, *, hint: str | None = None, records: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.records = tuple(records)


class PoolError(ImageBuilderError):
    exit_code = 16
    meaning = "a rollout stopped early, or left hosts that are not up"
