"""The stage ``lab_images``."""
