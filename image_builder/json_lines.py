"""JSON for programs that people look into, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def render(content: Mapping[str, Any]) -> str:
    """Return an object as JSON text: a line for each key, and for each item of a list right below it."""
    lines = []
    for key, value in content.items():
        items = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        lines.append(f'"{key}": ' + (f"[\n  {items}\n ]" if items else json.dumps(value)))
    return "{\n " + ",\n ".join(lines) + "\n}\n"
