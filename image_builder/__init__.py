"""Bake Kubernetes worker images for GPU pools and bring pools up from them."""

__version__ = "0.1.0"
