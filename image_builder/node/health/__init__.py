"""Passive health while the node runs: ``node-agent health``, one cheap look each minute, started by a timer.

settings         the role's settings
model            findings and metrics, and what a check is given and returns
storage          filesystems, arrays of md, NVMe drives
network          default route, names, registries, the API server, links, InfiniBand
kernel_log       the kernel's log since the last look: I/O errors, filesystems that gave up, Xids
clock            the kernel's clock
maintenance      the platform's plans for this machine
gpu              GPUs, by NVML
alarms           when a finding counts, and when it is over              (pure)
report           the condition in Kubernetes, and the metrics            (pure)
memory           what a look leaves for the next
command          one look
application      the node's state for Azure's Application Health extension

Each check reads facts and gives them to a rule, a function without I/O. Nothing is written to a disk but the
metrics.
"""
