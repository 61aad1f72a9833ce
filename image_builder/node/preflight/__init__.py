"""The preflight: tests on every boot, before the kubelet starts, whether this node is fit for work.

``node-agent preflight`` tests and writes a verdict; ``node-agent preflight --report`` reports it.
Whether the node is admitted is decided elsewhere: by ``image_builder.cluster.gate``, from the condition and the boot
id. A node can't remove its own taint (NodeRestriction).
"""
