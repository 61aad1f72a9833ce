"""The stage ``tools``."""
