"""The smoke test of a node's GPUs: what the driver says of them, and what they compute.

``model`` is what both halves share. ``machine``, ``nvml`` and ``xids`` look; ``checks`` and ``verdict`` judge, and
are pure; ``fleet`` and ``worker`` make the GPUs compute; ``command`` is ``node-agent gpu-smoke``.
"""
