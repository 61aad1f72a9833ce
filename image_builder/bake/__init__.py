"""From a definition to published files: the lock, the plan, the stages, the store and the executor."""
