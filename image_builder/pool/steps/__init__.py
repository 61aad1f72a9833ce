"""The steps of a rollout that act on hosts: Ansible in slices, the suite, the control plane."""
