"""``node-agent join``: from a booted image to a Ready node, without a controller.

A small configuration says to which cluster; everything else is baked. ``config`` reads it, ``command`` goes through
the phases one after the other and writes ``/run/node/provision.json`` (``record``), ``codes`` says with what number
each can fail. The phases: ``identity``, ``surroundings`` (network, disk, runtime, GPU), ``credentials``, ``slot``,
``kubelet`` (its files, and Ready).
"""
