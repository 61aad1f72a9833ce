"""The node agent: local disk, preloaded images, joining, tests of each boot and of the GPUs, health, status.

Standard library only, Python 3.11 and later.

Shipped as one file (``zipapp.py``, role ``node_agent``) and run by systemd units that come before the container
engine and the kubelet:

    node-agent disk             find, check, format and mount the local disk            (disk/)
    node-agent seed             make a blank data root usable from the preload store    (seed/)
    node-agent preload          ask the engine for every image, load what is missing    (preload/)
    node-agent promote          copy seeded layers to the local disk                    (promote/)
    node-agent preflight        test this boot, before the kubelet starts               (preflight/)
    node-agent join             become a node of a cluster                              (join/)
    node-agent gpu-smoke        test the GPUs                                           (gpu/)
    node-agent gpu-worker       the active tests of one GPU; started by gpu-smoke       (gpu/)
    node-agent health           check the running node and report what changed          (health/)
    node-agent health-endpoint  report the node's health to Azure's extension           (health/)
    node-agent status           what happened, and why                                  (report.py)
    node-agent compile          write this agent to a file that starts faster           (zipapp.py)

What several of these need is beside them: ``decode`` (settings), ``files`` (whatever survives a power cut), ``child``
(programs), ``mounts``, ``store`` (the preload store), ``data_root`` (an engine's), ``status``, and ``net`` (HTTP,
retry, metadata service, API server).

Nothing here imports from the rest of ``image_builder``; the bake imports from here what both must agree on.
"""
