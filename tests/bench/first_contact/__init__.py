"""First contact: one command that learns in ten minutes all that a machine with GPUs can teach this project.

It needs Python and the driver. Each step is a process of its own with a deadline of its own, and writes its findings to
the output directory as soon as they are known. ``tests/bench/gpu.py`` is the entry point; ``pack`` makes one file of it
all.
"""
