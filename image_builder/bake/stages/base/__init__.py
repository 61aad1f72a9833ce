"""The stage ``base``."""
