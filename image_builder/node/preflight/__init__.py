"""The preflight: on every boot, before the kubelet, whether this node is good enough to work.

``node-agent preflight`` tests and writes a verdict, ``node-agent preflight --report`` reports it once.
Whether the node may work is decided elsewhere: by ``image_builder.cluster.gate``, from the condition and the boot
id. A node can't take its own taint away (NodeRestriction).
"""
