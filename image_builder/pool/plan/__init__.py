"""The plan of a rollout, as data: hosts, waves, limits and the policy."""
