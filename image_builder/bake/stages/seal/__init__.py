"""The stage ``seal``."""
