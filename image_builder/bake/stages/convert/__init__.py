"""The stage ``convert``."""
