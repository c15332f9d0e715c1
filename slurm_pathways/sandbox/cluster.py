"""``Sandbox``: bring a private Slurm up and down, run commands in it, and break and mend its nodes."""

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_pathways.sandbox import configuration, packages, places, plan, render, system
from slurm_pathways.sandbox.errors import SandboxError
from slurm_pathways.sandbox.layout import MAX_DIR_BYTES, Layout
from slurm_pathways.sandbox.perform import Performer, running_init
from slurm_pathways.sandbox.record import Record, decode, encode
from slurm_pathways.sandbox.spec import (
    LOGIN,
    SandboxSpec,
    isolated_addressing,
    num_shared_ports,
    shared_addressing,
)

#: For jobs that were cancelled to be gone from their nodes.
IDLE_TIMEOUT_S = 60.0
#: slurmctld takes a node for rebooted when it started later than its last answer. Both are whole seconds, and the start
#: is reckoned from an uptime in whole seconds: it can come out a second early.
_REBOOT_S = 2.1


class NodeStatus(msgspec.Struct, frozen=True):
    """A node as this machine sees it and as slurmctld does.

    Attributes:
        is_running: whether the node's processes live.
        is_cut: whether it is partitioned off.
        slurm_state: such as ``idle``, ``allocated``, ``down*``; None when slurmctld does not answer.
    """

    name: str
    is_running: bool
    is_cut: bool
    slurm_state: str | None


class Status(msgspec.Struct, frozen=True):
    """What ``status`` reports. ``is_up``: it was brought up, and slurmctld answers."""

    directory: str
    is_up: bool
    has_netns: bool
    nodes: tuple[NodeStatus, ...]


class Sandbox:
    """The sandbox in a folder, which may have been brought up by another process.

    All methods raise ``SandboxError`` for what cannot be done. Those that change something exclude each other, among
    processes too. A node is given by its index.
    """

    def __init__(self, directory: Path) -> None:
        self._root = Path(os.path.abspath(directory))  # noqa: PTH100 (not resolve: links in it may be the user's choice)

    @property
    def directory(self) -> Path:
        """Its folder, absolute."""
        return self._root

    @property
    def local_dir(self) -> Path:
        """A folder that every node has one of its own of, and the login too."""
        return self._layout_of(self._record().mark).local

    @property
    def plugstack_dir(self) -> Path:
        """Where ``*.conf`` files with lines of plugstack.conf may be dropped in; the next job sees them."""
        return self._layout_of(self._record().mark).plugstack_dir

    @property
    def spec(self) -> SandboxSpec:
        """What it was brought up as."""
        return self._record().spec

    def up(self, spec: SandboxSpec) -> None:
        """Bring it up: returns when all nodes are idle. What fails leaves nothing behind."""
        self._check_machine()
        self._make_root()
        with system.locked(self._root):
            if self._layout_of("").record.exists():
                raise SandboxError(f"there is a sandbox in {self._root}: take it down first, or choose another --dir")
            try:
                layout, record = self._prepare(spec)
                performer = Performer(layout, record)
                performer.perform(plan.start_all(spec, layout, record.addressing))
                performer.save(is_up=True)
            except BaseException:
                self._remove()
                raise

    def down(self) -> bool:
        """End all its processes and remove its folder.

        Returns:
            Whether there was something.
        """
        if not self._root.is_dir():
            return False
        with system.locked(self._root):
            self._remove()
        return True

    def command(self, argv: Sequence[str]) -> list[str]:
        """A command that becomes ``argv`` on the login; run it with ``environ``."""
        record = self._record()
        login = running_init(record, LOGIN)
        return list(places.user_argv(login.pid, record.spec, self._layout_of(record.mark), argv))

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """An environment for commands in the sandbox, made of that of whoever runs them."""
        return plan.user_environ(self._layout_of(self._record().mark), dict(environ))

    def run(self, argv: Sequence[str], timeout_s: float) -> system.Completed:
        """Run ``argv`` on the login with this process's environment, to its end, whatever its exit code."""
        return system.run(self.command(argv), timeout_s, environ=self.environ(os.environ))

    def await_idle(self, indices: Iterable[int] | None = None, timeout_s: float = IDLE_TIMEOUT_S) -> None:
        """Wait until slurmctld says that nodes (None: all) are idle."""
        record = self._record()
        names = record.spec.nodes if indices is None else tuple(record.spec.nodes[index] for index in indices)
        Performer(self._layout_of(record.mark), record).perform(((plan.AwaitNodes(names, timeout_s),),))

    def kill_node(self, index: int, *, tells_slurm: bool = False) -> None:
        """Take a node's power: all its processes end at once, and with a network nobody hears of it.

        Args:
            tells_slurm: set it DOWN, as an administrator would; else slurmctld finds out by its timeouts.
        """
        with self._changing() as performer:
            performer.stop_node(index)
            if tells_slurm:
                performer.set_down(index, "killed")

    def reboot(self, index: int, *, is_unnoticed: bool = False) -> None:
        """Kill a node if it runs, and start it at once.

        Args:
            is_unnoticed: slurmd doesn't say that its machine has rebooted, as if only its daemons and jobs had died and
                come back between two of slurmctld's looks.
        """
        with self._changing() as performer:
            if performer.is_running(index):
                performer.stop_node(index)
                if not is_unnoticed:
                    time.sleep(_REBOOT_S)
            performer.start_node(index, *(() if is_unnoticed else ("-b",)))

    def return_node(self, index: int) -> None:
        """Start a node that does not run, and have slurmctld give it work again, whatever took it away."""
        with self._changing() as performer:
            if performer.name(index) in performer.record.cut:
                raise SandboxError(f"{performer.name(index)} is cut off: heal it first")
            if not performer.is_running(index):
                performer.start_node(index)
            performer.resume(index)

    def partition(self, indices: Iterable[int]) -> None:
        """Cut nodes off: they reach each other, and nobody else. Others that are cut off already are with them."""
        with self._changing() as performer:
            performer.set_cut(_cut(performer) | _checked(performer, indices))

    def heal(self, indices: Iterable[int] | None = None) -> None:
        """Connect nodes again; None for all."""
        with self._changing() as performer:
            performer.set_cut(set() if indices is None else _cut(performer) - _checked(performer, indices))

    def status(self) -> Status:
        """What lives, and what slurmctld says if it answers."""
        record = self._record()
        performer = Performer(self._layout_of(record.mark), record)
        try:
            states: Mapping[str, str] = performer.node_states()
        except SandboxError:
            states = {}
        return Status(
            directory=str(self._root),
            is_up=record.is_up and bool(states),
            has_netns=record.spec.has_netns,
            nodes=tuple(
                NodeStatus(name, performer.is_running(index), name in record.cut, states.get(name))
                for index, name in enumerate(record.spec.nodes)
            ),
        )

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Performer]:
        self._record()
        with system.locked(self._root):
            record = self._record()
            yield Performer(self._layout_of(record.mark), record)

    def _check_machine(self) -> None:
        if sys.platform != "linux":
            raise SandboxError("a sandbox needs Linux: it is made of namespaces")
        if os.geteuid() != 0:
            raise SandboxError(
                "a sandbox needs root: Slurm's daemons start jobs as other users, and nodes are namespaces"
            )
        if lacking := packages.missing(system.which):
            raise SandboxError(f"programs are missing; as root: {packages.install_command(lacking)}")
        if len(os.fsencode(self._root)) > MAX_DIR_BYTES:
            raise SandboxError(f"{self._root} is too deep: Unix sockets allow it {MAX_DIR_BYTES} bytes; choose --dir")
        if any(character.isspace() or character in "#,\"'\\%" for character in str(self._root)):
            raise SandboxError(f"{self._root!s} has characters that Slurm's configuration cannot hold; choose --dir")
        if not Path("/etc/hosts").is_file():
            raise SandboxError("there is no /etc/hosts; an empty file will do")

    def _make_root(self) -> None:
        if self._root.is_symlink() or (self._root.exists() and not self._root.is_dir()):
            raise SandboxError(f"{self._root} is not a folder")
        if not self._root.exists():
            if not self._root.parent.is_dir():
                raise SandboxError(f"there is no folder {self._root.parent} to make {self._root.name} in")
            system.make_folder(self._root, 0o755)
        elif self._root.stat().st_uid != 0:
            raise SandboxError(f"{self._root} belongs to user id {self._root.stat().st_uid}, not to root")
        elif not self._layout_of("").record.exists() and any(self._root.iterdir()):
            raise SandboxError(f"{self._root} has other things in it, and down would remove them: choose another --dir")

    def _prepare(self, spec: SandboxSpec) -> tuple[Layout, Record]:
        """Write everything that daemons read. The record comes first: ``down`` goes by it."""
        self._root.chmod(0o755)
        layout = self._layout_of(f"slurm-pathways-sandbox-{secrets.token_hex(8)}")
        addressing = (
            isolated_addressing(spec)
            if spec.has_netns
            else shared_addressing(spec, system.free_ports(num_shared_ports(spec)))
        )
        record = Record(mark=layout.mark, spec=spec, addressing=addressing)
        system.write(layout.record, encode(record), 0o644)
        for folder, mode in layout.folders(spec.nodes).items():
            system.make_folder(folder, mode)
        _write_slurm_files(configuration.on_one_machine(spec, layout, addressing), layout.etc)
        system.write(layout.my_cnf, render.my_cnf(layout), 0o600)
        system.write(layout.munge_key, secrets.token_bytes(128), 0o400)
        for place in (LOGIN, *spec.nodes):
            system.write(layout.hosts(place), render.hosts(spec, addressing), 0o644)
        return layout, record

    def _remove(self) -> None:
        """End and remove everything, in any state that a crash may have left."""
        path = self._layout_of("").record
        if path.exists():
            record = decode(path.read_bytes(), path)
            system.kill_marked(record.mark)
        elif any(self._root.iterdir()):
            raise SandboxError(f"{self._root} is no sandbox: it has other things in it; remove it by hand")
        system.remove_tree(self._root)

    def _layout_of(self, mark: str) -> Layout:
        return Layout(self._root, mark)

    def _record(self) -> Record:
        path = self._layout_of("").record
        try:
            return decode(path.read_bytes(), path)
        except (FileNotFoundError, NotADirectoryError):
            raise SandboxError(f"there is no sandbox in {self._root}: slurm-pathways sandbox up") from None


def render_for_containers(spec: SandboxSpec, target: Path) -> None:
    """Write the configuration of the containers of docker/compose.yaml, to be read as ``/etc/slurm``."""
    (target / "plugstack.conf.d").mkdir(parents=True, exist_ok=True)
    _write_slurm_files(configuration.in_containers(spec), target)


def _write_slurm_files(cluster: configuration.Configuration, folder: Path) -> None:
    for name, text in render.files(cluster).items():
        # slurmdbd refuses a file that others can read: it may hold a password.
        system.write(folder / name, text, 0o600 if name == "slurmdbd.conf" else 0o644)


def _cut(performer: Performer) -> set[int]:
    return {performer.record.spec.nodes.index(name) for name in performer.record.cut}


def _checked(performer: Performer, indices: Iterable[int]) -> set[int]:
    for index in indices:
        performer.name(index)
    return set(indices)
