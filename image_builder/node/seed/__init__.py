"""Seed: make a blank data root usable from the preload store, in time proportional to the layers, not the bytes.

The engine's own records are copied; a layer's files become a link into the store. The new data root is built outside
its final place, synced and renamed into place, and the marker is written last; so a crash leaves nothing that counts.
"""
