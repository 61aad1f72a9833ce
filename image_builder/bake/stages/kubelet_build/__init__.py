"""The stage ``kubelet_build``."""
