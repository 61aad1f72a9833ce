"""The stage ``rehearsal``."""
