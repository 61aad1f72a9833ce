"""The physical machine under this virtual one, as Hyper-V names it to its guests.

hv_kvp_daemon (Debian: hyperv-daemons) keeps what the host reports in a file of fixed-size records, as the kernel's
tools/hv/hv_kvp_daemon.c writes them. The name changes when the machine is redeployed, which includes a reboot.
"""

from __future__ import annotations

import re
from pathlib import Path

# include/uapi/linux/hyperv.h: HV_KVP_EXCHANGE_MAX_KEY_SIZE, HV_KVP_EXCHANGE_MAX_VALUE_SIZE.
KEY_BYTES, VALUE_BYTES = 512, 2048
KEY = "PhysicalHostName"
# What Guest Health Reporting accepts as a name, and no longer than an annotation may be.
_NAME = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,62}")
_MOST_BYTES = 1 << 20


def name(pool: Path) -> str:
    """Return the host's name, empty if there is none: outside Hyper-V, without the daemon, or before it has one."""
    try:
        with pool.open("rb") as stream:
            data = stream.read(_MOST_BYTES)
    except OSError:
        return ""
    size = KEY_BYTES + VALUE_BYTES
    records = (data[start : start + size] for start in range(0, len(data) - size + 1, size))
    values = {_text(record[:KEY_BYTES]): _text(record[KEY_BYTES:]) for record in records}
    value = values.get(KEY, "")
    return value if _NAME.fullmatch(value) else ""


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="replace")
