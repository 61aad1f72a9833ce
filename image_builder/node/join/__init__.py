"""``node-agent join``: from a booted image to a Ready node, without a controller.

A small configuration names the cluster; everything else is baked. ``config`` parses it against its ``schema``;
``command`` runs the phases one after the other, each with its deadline, and writes ``/run/node/provision.json``
(``record``); ``codes`` defines the failure codes. The phases: ``identity``, ``surroundings`` (network, disk, runtime,
GPU), ``credentials``, the slot (``binding``), ``kubelet`` (its files, and Ready).
"""
