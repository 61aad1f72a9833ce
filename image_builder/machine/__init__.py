"""Machines to connect to: one started here in QEMU, or any that SSH can reach."""
