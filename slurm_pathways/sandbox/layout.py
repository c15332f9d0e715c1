"""Where everything of a sandbox lies: below one folder, which ``down`` removes."""

from dataclasses import dataclass
from pathlib import Path

#: Only root can make it, so nobody else can have made it first.
DEFAULT_DIR = Path("/var/lib/slurm-pathways-sandbox")

#: Unix sockets allow 107 bytes; the longest of ours is slurmstepd's, <spool>/<node>/<node>_<job>.<step>.
MAX_DIR_BYTES = 60


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below the folder of a sandbox.

    Attributes:
        root: the folder, absolute.
        mark: a name that nothing else on the machine has. Every process of the sandbox shows it in its
            ``/proc/<pid>/mountinfo``, as the name of the file that is bound over ``/etc/hosts``; this is how they are
            found whatever became of whoever started them.
    """

    root: Path
    mark: str

    @property
    def record(self) -> Path:
        """What runs; see ``record.Record``."""
        return self.root / "sandbox.json"

    @property
    def etc(self) -> Path:
        """slurm.conf and its kin."""
        return self.root / "etc"

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF names."""
        return self.etc / "slurm.conf"

    @property
    def my_cnf(self) -> Path:
        """MariaDB's only option file."""
        return self.database / "my.cnf"

    @property
    def plugstack_dir(self) -> Path:
        """Drop-in files for SPANK plugins, ``*.conf``."""
        return self.etc / "plugstack.conf.d"

    @property
    def munge_key(self) -> Path:
        """The key that makes a credential of this sandbox."""
        return self.root / "munge" / "munge.key"

    @property
    def munge_socket(self) -> Path:
        """Where clients of any user reach munged."""
        return self.root / "run" / "munge.socket"

    @property
    def database(self) -> Path:
        """Everything of MariaDB's; root's alone."""
        return self.root / "db"

    @property
    def data(self) -> Path:
        """MariaDB's tables."""
        return self.database / "data"

    @property
    def database_socket(self) -> Path:
        """The only way into the database; root's alone."""
        return self.database / "mysql.socket"

    @property
    def state(self) -> Path:
        """slurmctld's state."""
        return self.root / "state"

    @property
    def spool(self) -> Path:
        """One folder for each slurmd."""
        return self.root / "spool"

    @property
    def run(self) -> Path:
        """Pid files and munge's socket."""
        return self.root / "run"

    @property
    def log(self) -> Path:
        """Logs of all daemons."""
        return self.root / "log"

    @property
    def local(self) -> Path:
        """A disk that no two machines share: the login's, and on every node a file system of its own."""
        return self.root / "local"

    def hosts(self, place: str) -> Path:
        """The ``/etc/hosts`` of one place, and its mark."""
        return self.root / "places" / f"{self.mark}-{place}"

    def out(self, name: str) -> Path:
        """What a daemon or place wrote to stdout and stderr."""
        return self.log / f"{name}.out"

    def daemon_log(self, name: str) -> Path:
        """The log that a daemon writes by itself."""
        return self.log / f"{name}.log"

    def folders(self, nodes: tuple[str, ...]) -> dict[Path, int]:
        """All folders, parents first, with their modes. Users enter those that hold what they need."""
        return {
            self.etc: 0o755,
            self.plugstack_dir: 0o755,
            self.root / "munge": 0o700,
            self.run: 0o755,
            self.database: 0o700,
            self.data: 0o700,
            self.state: 0o700,
            self.spool: 0o755,
            **{self.spool / node: 0o755 for node in nodes},
            self.log: 0o755,
            self.local: 0o1777,
            self.root / "places": 0o755,
        }
