"""What the lab inventory and the tests need and no real pool does."""
