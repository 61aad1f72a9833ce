"""The Azure side of a rollout: a scale set's model, its instances, and bringing an instance to another version."""
