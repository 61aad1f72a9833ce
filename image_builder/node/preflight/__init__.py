"""Is this boot of the node good enough to work? Asked on every boot, before the kubelet.

``node-agent preflight`` tests and writes a verdict, ``node-agent preflight --report`` tells the API server once.
Whether the node may work is decided elsewhere: by ``image_builder.cluster.gate``, from the condition and the boot
id. A node can't take its own taint away (NodeRestriction).
"""
