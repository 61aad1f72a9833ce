"""Options of the unit tests, and what makes Ansible's evaluations cheap in them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from ansible._internal._templating._jinja_bits import AnsibleEnvironment, _TemplateCompileContext

from image_builder.definition import inventory, problems

# What else than a template's text decides how Jinja compiles it.
_SYNTAX = (
    *("block_start_string", "block_end_string", "variable_start_string", "variable_end_string"),
    *("comment_start_string", "comment_end_string", "line_statement_prefix", "line_comment_prefix"),
    *("trim_blocks", "lstrip_blocks", "newline_sequence", "keep_trailing_newline", "autoescape", "optimized"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    with suppress(ValueError):  # a conftest above may have it already
        parser.addoption("--update-golden", action="store_true", help="write the golden files anew")


@pytest.fixture(scope="session", autouse=True)
def _each_template_is_compiled_once() -> Iterator[None]:
    """Keep the code of each template: compiling the same few hundred again is half of what an evaluation takes."""
    compiled: dict[Hashable, Any] = {}
    compile_anew = AnsibleEnvironment.compile

    def compile_once(environment: Any, source: Any, *names: Any, **options: Any) -> Any:
        if not isinstance(source, str):
            return compile_anew(environment, source, *names, **options)
        context = _TemplateCompileContext.current(optional=True)
        syntax = (getattr(environment, name) for name in _SYNTAX)
        key = (source, names, *options.items(), context and context.escape_backslashes, *syntax)
        if key not in compiled:
            compiled[key] = compile_anew(environment, source, *names, **options)
        return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnsibleEnvironment, "compile", compile_once)
        yield


@pytest.fixture
def unread_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the checks of what layers' tasks read: they take most of the time of tests that are about values."""
    monkeypatch.setattr(problems, "reading_problems", lambda *_: [])
    monkeypatch.setattr(inventory, "unpredictable_layers", lambda *_: [])
