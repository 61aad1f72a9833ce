"""Machines to reach: one in QEMU, started here, or any by SSH."""
