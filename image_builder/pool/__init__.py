"""Pools: bring sets of scale sets up from an image in waves, verified and resumable."""
