"""The stage ``verify``."""
