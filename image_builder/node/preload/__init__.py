"""``node-agent preload``: give the engine every image that this node was baked with, before the kubelet needs them.

The list says which references must be there and which images they must refer to; the archive contains them. Images that
the engine already has, from the seed or from an earlier boot, complete and with the right names, are left alone.
Otherwise the archive is checked and loaded, and the engine is checked again. The engine is the only state.

    images.py      the list and the store's manifest; the interface to both engines
    archive.py     the archive: its checksum, the space that loading it takes, the progress of loading
    docker.py      Docker, through its client, and the containers that guard its images
    containerd.py  containerd, through ctr
    command.py     all of it, in order; what came from the seed, what from the archive, and why
"""
