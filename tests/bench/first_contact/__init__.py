"""First contact: all that a machine with GPUs can teach this project in ten minutes, by one command.

It needs Python and the driver. Each step is a process of its own with a deadline of its own, and what it learnt lies in
the output directory as soon as it is known. ``tests/bench/gpu.py`` is the way in; ``pack`` makes one file of it all.
"""
