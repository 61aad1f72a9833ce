"""The token broker: gives a machine that proves its managed identity a bootstrap token of its own, for minutes.

An operator runs it in the cluster (``image-builder pool broker``). What a node asks and expects is in
``image_builder.node.join.credentials``.
"""
