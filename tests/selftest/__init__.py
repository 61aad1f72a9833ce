"""What `image-builder test` runs, and the plugin of its runs of pytest."""
