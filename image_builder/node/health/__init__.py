"""Passive health while the node runs: ``node-agent health``, one cheap look each minute, started by a timer.

settings         what the role wrote
model            what is found, what is measured, what a check is given and gives back
filesystems      full, out of inodes, read-only
arrays           md arrays that lost a member
nvme             what a drive says of itself
kernel_log       the kernel's log since the last look: I/O errors, filesystems that gave up, Xids
network, dns     default route, names, registries, the API server, links that flap
clock            what the kernel knows of its clock
maintenance      what the platform has in store for this machine
gpu              what NVML says
infiniband       ports and their counters
alarms           when a finding counts, and when it is over              (pure)
condition        what Kubernetes is told, and when                       (pure)
metrics          the text that node-exporter collects                    (pure)
memory           what a look leaves for the next
command          one look

Each check reads facts and gives them to a rule, a function without I/O. Nothing is written to a disk but the
metrics.
"""
