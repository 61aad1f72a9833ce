"""The stage ``layer``."""
