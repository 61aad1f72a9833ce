"""A rollout as a sequence of recorded events: the driver, its journal, budgets and gates. No I/O except the journal."""
