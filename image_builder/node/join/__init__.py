"""``node-agent join``: from a booted image to a Ready node, without a controller.

A small configuration names the cluster; everything else is baked. ``config`` reads it by its ``schema``, ``command``
goes through the phases one after the other within ``deadline`` and writes ``/run/node/provision.json`` (``record``);
``codes`` are those of the failures. The phases: ``identity``, ``surroundings`` (network, disk, runtime, GPU),
``credentials``, the slot (``binding``), ``kubelet`` (its files, and Ready).
"""
