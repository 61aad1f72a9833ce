"""Seed: make a blank data root usable from the preload store, in a time that grows with layers, not bytes.

An engine's own records are copied, a layer's files are a link into the store. It is made beside the data root,
synced, renamed into place, and the marker is written last; so a crash leaves nothing that counts.
"""
