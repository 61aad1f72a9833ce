"""The side of a rollout that is Azure's: a scale set's model, its instances, and what brings one to another version."""
