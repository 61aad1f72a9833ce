"""From a definition and a lock to stages with ids: pure, so that it can be printed, compared and tested."""
