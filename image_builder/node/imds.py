"""Azure's instance metadata service.

https://learn.microsoft.com/azure/virtual-machines/instance-metadata-service. It answers 429 to a machine that asks more
than some five times a second; how often to ask again is the caller's business.
"""

from __future__ import annotations

from image_builder.node.asking import Said
from image_builder.node.asking import ask as ask_http

ADDRESS = "http://169.254.169.254"


def ask(path: str, *, address: str = ADDRESS, seconds: float = 5.0) -> Said:
    """Ask for ``path``, with its query, and wait at most ``seconds`` for each byte. Raises OSError."""
    return ask_http(f"{address}{path}", headers={"Metadata": "true"}, seconds=seconds)
