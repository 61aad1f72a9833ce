"""Connections to hosts: host keys, sessions, reachability and provisioning."""
