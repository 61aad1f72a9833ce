"""The node agent's errors. Each has a code that names its kind, for programs and people alike."""

from __future__ import annotations


class NodeError(Exception):
    """Something that an operator must see.

    ``code`` is stable: lower-case words with dots, such as ``disk.foreign`` or ``store.verity``; they are listed in
    docs/reference/node-agent.md.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


# The exit status of a program that isn't there, as shells have it, and the code of the error.
ABSENT_STATUS, ABSENT = 127, "program.absent"


class ProgramError(NodeError):
    """A program ended with a status that its caller did not expect. ``tail`` is the end of its output."""

    def __init__(self, message: str, status: int, tail: str) -> None:
        super().__init__(ABSENT if status == ABSENT_STATUS else "program", message)
        self.status = status
        self.tail = tail
