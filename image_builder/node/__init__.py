"""The node agent: local disk, preloaded images, joining a cluster, boot and GPU tests, health, and status.

Standard library only, Python 3.11 and later.

Shipped as a single file (``zipapp.py``, role ``node_agent``) and run by systemd units, most of which are ordered before
the container engine or the kubelet:

    node-agent disk             find, check, format and mount the local disk            (disk/)
    node-agent seed             make a blank data root usable from the preload store    (seed/)
    node-agent preload          check the engine for every image, load missing ones     (preload/)
    node-agent promote          copy seeded layers to the local disk                    (promote/)
    node-agent preflight        test this boot, before the kubelet starts               (preflight/)
    node-agent join             become a node of a cluster                              (join/)
    node-agent gpu-smoke        test the GPUs                                           (gpu/)
    node-agent gpu-worker       run the active tests of one GPU; started by gpu-smoke   (gpu/)
    node-agent health           check the running node and report changes               (health/)
    node-agent health-endpoint  report the node's health to Azure's extension           (health/)
    node-agent status           show what happened, and why                             (report.py)
    node-agent check            read the settings as the other commands do              (check.py)
    node-agent compile          write this agent to a file that starts faster           (zipapp.py)

Shared modules are next to these packages: ``decode`` (settings), ``files`` (files that survive a power cut), ``child``
(programs), ``mounts``, ``store`` (the preload store), ``data_root`` (an engine's data root), ``status``, and ``net``
(HTTP, retries, metadata service, API server).

Nothing here imports from the rest of ``image_builder``; the bake imports from here whatever both must agree on.
"""
