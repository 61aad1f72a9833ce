"""The stage ``preload_store``."""
