"""The token broker: gives a machine that proves its managed identity its own bootstrap token, valid for minutes.

An operator runs it in the cluster (``image-builder pool broker``). What a node requests and expects is in
``image_builder.node.join.credentials``.
"""
