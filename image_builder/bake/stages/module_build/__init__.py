"""The stage ``module_build``."""
