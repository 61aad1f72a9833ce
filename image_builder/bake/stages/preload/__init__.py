"""The stage ``preload``."""
