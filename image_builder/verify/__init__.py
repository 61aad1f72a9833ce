"""The verification of images: one suite for an unpacked tree, a booted machine and a host reached over SSH."""
