"""The report of an answer or error from Azure, in one line and without its secrets."""

from __future__ import annotations

import pytest

from image_builder.system.resource_manager import error_text, readable


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("GET https://host/disk?a=1&sig=s3cr%2Ft&b=2\n failed", "GET https://host/disk?a=1&sig=…&b=2 failed"),
        ("Authorization: Bearer eyJ0eXAi.x.y refused", "Authorization: Bearer … refused"),
        ("x" * 400, "x" * 300),
    ],
)
def test_an_error_is_a_line_without_secrets(message: str, line: str) -> None:
    assert readable(ValueError(message)) == line


def test_the_services_form_of_an_error_is_read() -> None:
    assert error_text({"error": {"code": "Conflict", "message": "busy"}}) == "Conflict: busy"
    assert error_text({"error": "busy"}) == error_text([]) == ""
