"""Pulls of container images by an image's own runtime, under progress deadlines."""
