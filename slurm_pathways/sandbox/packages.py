"""What a sandbox needs from the distribution, and what of it is missing."""

import shlex
from collections.abc import Callable, Iterable

#: Debian's packages, each with the programs that a sandbox runs from it.
DEBIAN_PACKAGES: dict[str, tuple[str, ...]] = {
    "slurm-wlm": (),
    "slurmctld": ("slurmctld",),
    "slurmd": ("slurmd", "slurmstepd"),
    "slurmdbd": ("slurmdbd",),
    "slurm-client": ("srun", "sbatch", "scontrol", "sinfo", "sacct"),
    "slurm-wlm-basic-plugins": (),
    "munge": ("munged",),
    "mariadb-server": ("mariadbd", "mariadb-install-db"),
    "iproute2": ("ip",),
    "util-linux": ("unshare", "nsenter", "setsid"),
    "mount": ("mount",),
    "hostname": ("hostname",),
}

#: Where daemons lie, also for users whose PATH lacks these folders.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def missing(find: Callable[[str], str | None]) -> list[str]:
    """The packages of which a program is not found.

    Args:
        find: the path of a program, or None; ``shutil.which`` with ``SYSTEM_PATH``.
    """
    return [
        package for package, programs in DEBIAN_PACKAGES.items() if any(find(program) is None for program in programs)
    ]


def install_command(packages: Iterable[str]) -> str:
    """The command line that installs them on Debian and its children."""
    return "apt-get install -y --no-install-recommends " + shlex.join(packages)
