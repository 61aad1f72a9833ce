"""A node's GPUs: what the driver reports, what it means, and a smoke test that makes them compute.

model               the types that everything here shares
settings            the settings that the role wrote, with the pool's calibrations
machine             the node's state apart from NVML: PCI, files, the platform
nvml, readings      the driver's library, and the GPUs' readings through it
sizes, xids         the tables: VM sizes with their floors, NVIDIA's catalogue of Xids
evidence            everything that a rule may judge                        (pure)
rules/              every check                                             (pure)
document            the verdict on the checks, and the result's JSON        (pure)
smoke/              the test itself: ``gpu-smoke``, and ``gpu-worker`` for each GPU
"""
