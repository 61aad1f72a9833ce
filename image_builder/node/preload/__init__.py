"""``node-agent preload``: the engine has every image that this node was baked with, before the kubelet asks for them.

The list says which references must be there and what they must mean; the archive holds them. What the engine
has already, from the seed or from an earlier boot, whole and under the right names, is left alone. Otherwise the
archive is checked and loaded, and what the engine then has is looked at again. The engine is the only state.

    images.py      the list and the store's description; what both engines are asked
    archive.py     the archive: its checksum, the room that loading it takes, how far the loading is
    docker.py      Docker, by its client, and the containers that keep its images
    containerd.py  containerd, by ctr
    command.py     all of it, in order; what the seed gave, what the archive had to, and why
"""
