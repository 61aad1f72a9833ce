"""The verdict on a sealed image, which the verifying stage writes and publishing reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from image_builder.errors import PublishError
from image_builder.strict_yaml import Strict

FILE: Final = "verdict.json"
_HINT = "image-builder build verifies first"
Count = Annotated[int, Field(ge=0)]


class Verification(Strict):
    """The suite's run on the sealed tree; verify.json and junit.xml hold all of it."""

    marker: str
    verdict: Literal["passed"]
    passed: Count
    not_applicable: Count
    seconds: float = Field(ge=0)


class Verdict(Strict):
    """The results of the checks. Nothing in it says that an image passed: the numbers decide."""

    marker: str
    checks: Count
    passed: Count
    not_applicable: Count
    seconds: float = Field(ge=0)

    def write(self, product: Path) -> None:
        """Write the verdict into the product of the stage."""
        (product / FILE).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


def passed_verification(product: Path) -> Verification:
    """Return the verification whose verdict is in a stage's product; raises PublishError unless all checks passed."""
    try:
        verdict = Verdict.model_validate_json((product / FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise PublishError(f"not published: the image is not verified: {error}", hint=_HINT) from error
    if not verdict.checks:
        raise PublishError("not published: the image is not verified: no check was made", hint=_HINT)
    if verdict.passed != verdict.checks:
        failed = f"{verdict.checks - verdict.passed} of {verdict.checks} checks failed"
        raise PublishError(f"not published: the image is not verified: {failed}", hint=_HINT)
    return Verification(verdict="passed", **verdict.model_dump(exclude={"checks"}))
