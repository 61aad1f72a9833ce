"""Promote: replace each link that ``seed`` made into the preload store by a copy on the local disk.

A layer is copied beside the data root, synced, and exchanged with its link in one step. So at any moment a name leads
to all of a layer's files, in the store or on the disk, and what is left to do is what is still a link: there is no
other record. A container that runs keeps the files it began with, since overlay holds them open.
"""
