"""What tells processes of one host from those of another."""

import os
from pathlib import Path


def local_host_key() -> str:
    """The host key of this process: two that have the same can share memory, as they run under one kernel, see the
    same files, and nothing can come between them that would part their hosts: they also have the same network.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = "/".join(str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("mnt", "net"))
    return f"{boot_id}/{namespaces}/{os.geteuid()}"
