"""The kinds ``tools`` and ``base``: roots from packages only."""
