"""Promote: replace each link that ``seed`` made into the preload store with a copy on the local disk.

A layer is copied to a staging directory, synced, and atomically exchanged with its link. So at any moment a name leads
to all of a layer's files, in the store or on the disk, and the remaining links are the remaining work: there is no
other record. A running container keeps the files that it started with, since overlay holds them open.
"""
