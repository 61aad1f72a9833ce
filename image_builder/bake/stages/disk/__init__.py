"""The stage ``disk``."""
