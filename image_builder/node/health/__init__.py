"""Passive health checks while the node runs: ``node-agent health``, one cheap look per minute, started by a timer.

settings         the role's settings
model            findings and metrics, and the input and output of a check
storage          filesystems, md arrays, NVMe drives
network          default route, names, registries, the API server, links, InfiniBand
kernel_log       the kernel's log since the last look: I/O errors, filesystem failures, Xids
clock            the kernel's clock
maintenance      the platform's plans for this machine
gpu              GPUs, through NVML
alarms           when a finding counts, and when it is over              (pure)
report           the condition in Kubernetes, and the metrics            (pure)
memory           the state that a look leaves for the next
command          one look
application      the node's state for Azure's Application Health extension

Each check reads facts and passes them to a rule, a function without I/O. Only the metrics are written to a disk.
"""
