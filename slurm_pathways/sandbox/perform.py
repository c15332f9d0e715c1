"""Does what plans say, and writes down what it did: one change of a sandbox, by whoever holds its folder's lock."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from slurm_pathways.sandbox import places, plan, system
from slurm_pathways.sandbox.errors import SandboxError
from slurm_pathways.sandbox.layout import Layout
from slurm_pathways.sandbox.record import Process, Record, encode
from slurm_pathways.sandbox.spec import LOGIN

#: For a command to slurmctld; it retries by itself, and for ever.
COMMAND_TIMEOUT_S = 20.0
#: For the namespaces of places, and for commands to the kernel.
PLACE_TIMEOUT_S = 30.0
#: For a node that was brought back, until slurmctld gives it work again.
RETURN_TIMEOUT_S = 60.0

_STATE_INTERVAL_S = 0.1
#: States in which slurmctld gives a node no work until it is told to.
_NEEDS_RESUME = ("down", "drain", "fail", "reboot")
_TAKES_WORK = ("idle", "mixed", "allocated")


class Performer:
    """Makes, ends and connects places, and starts daemons in them.

    Attributes:
        record: as it is on disk.
    """

    def __init__(self, layout: Layout, record: Record) -> None:
        self._layout = layout
        self.record = record

    def save(self, **changes: object) -> None:
        """Change the record, here and on disk."""
        self.record = msgspec.structs.replace(self.record, **changes)
        system.write(self._layout.record, encode(self.record), 0o644)

    def perform(self, stages: Iterable[plan.Stage]) -> None:
        """Do stages one after the other.

        Raises:
            SandboxError: a step failed or was late; names the step, with the end of its log.
        """
        for stage in stages:
            # Daemons first: they become ready while programs run.
            daemons = [step for step in stage if isinstance(step, plan.StartDaemon)]
            started = [(daemon, self._start(daemon)) for daemon in daemons]
            for step in stage:
                match step:
                    case plan.MakePlaces(names):
                        self._make_places(names)
                    case plan.RunProgram(_, argv, timeout_s):
                        system.check(self._in_place(LOGIN, argv), timeout_s)
                    case plan.AwaitNodes(names, timeout_s):
                        self._await_idle(names, timeout_s)
                    case plan.StartDaemon():
                        continue
                    case other:
                        raise AssertionError(f"no such step: {other!r}")
            for daemon, process in started:
                self._await_ready(daemon, process)

    def init(self, place: str) -> Process:
        """The init of a place that runs.

        Raises:
            SandboxError: it doesn't.
        """
        return running_init(self.record, place)

    def name(self, index: int) -> str:
        """The node of an index.

        Raises:
            SandboxError: there is none.
        """
        nodes = self.record.spec.nodes
        if not 0 <= index < len(nodes):
            raise SandboxError(f"there is no node {index}: they are {nodes[0]} to {nodes[-1]}")
        return nodes[index]

    def is_running(self, index: int) -> bool:
        """Whether a node's processes live."""
        init = self.record.inits.get(self.name(index))
        return init is not None and system.is_alive(init)

    def stop_node(self, index: int) -> None:
        """End a node as a loss of power does."""
        name = self.name(index)
        init = self.init(name)
        if self.record.spec.has_netns:
            # Before its processes end: the kernel would close their connections, and peers would hear of it.
            self._ip(LOGIN, places.unplug(index))
        system.kill(init)
        if self.record.spec.has_netns:
            self._ip(LOGIN, places.remove_port(index), "-force", may_fail=True)
        self.save(inits={place: process for place, process in self.record.inits.items() if place != name})

    def start_node(self, index: int, *slurmd_options: str) -> None:
        """Make a node that does not run, with its slurmd; a node that was cut off still is."""
        self.name(index)
        self.perform(plan.start_node(index, self.record.spec, self._layout, self.record.addressing, *slurmd_options))

    def set_cut(self, cut: Collection[int]) -> None:
        """Cut these nodes off, and connect all others."""
        if not self.record.spec.has_netns:
            raise SandboxError(
                "the nodes of this sandbox share the machine's network: only one of up --netns can be cut"
            )
        running = [index for index in range(self.record.spec.num_nodes) if self.is_running(index)]
        self._ip(LOGIN, places.move([index for index in running if index in cut], places.CUT))
        self._ip(LOGIN, places.move([index for index in running if index not in cut], places.LAN))
        self.save(cut=tuple(self.name(index) for index in sorted(cut)))

    def set_down(self, index: int, reason: str) -> None:
        """Have slurmctld take a node for lost."""
        self._client("scontrol", "update", f"nodename={self.name(index)}", "state=down", f"reason={reason}")

    def resume(self, index: int) -> None:
        """Have slurmctld give a node work; returns when it would.

        Raises:
            SandboxError: it doesn't in time; with its state and the end of slurmd's log.
        """
        name = self.name(index)
        state = ""

        def takes_work() -> bool:
            nonlocal state
            state = self.node_states().get(name, "unknown")
            if state.startswith(_NEEDS_RESUME):
                # Fails while the node has not said yet that it is there; it is tried again then.
                system.run(
                    self._client_argv("scontrol", "update", f"nodename={name}", "state=resume"), COMMAND_TIMEOUT_S
                )
            # A mark behind the state says that the node does not answer, or that something is still to be done with it.
            return state in _TAKES_WORK

        if not system.wait_until(takes_work, RETURN_TIMEOUT_S, _STATE_INTERVAL_S):
            raise SandboxError(
                f"{RETURN_TIMEOUT_S:g} s after it was told to, slurmctld still has {name} as {state}; "
                + self._tail(f"slurmd.{name}")
            )

    def node_states(self) -> dict[str, str]:
        """What slurmctld says of every node, such as ``idle`` or ``down*``."""
        return dict(
            line.split()[:2] for line in self._client("sinfo", "--noheader", "--Node", "-o", "%N %T").splitlines()
        )

    def _client(self, *argv: str) -> str:
        return system.check(self._client_argv(*argv), COMMAND_TIMEOUT_S)

    def _client_argv(self, *argv: str) -> Sequence[str]:
        settings = (f"{name}={value}" for name, value in plan.daemon_environ(self._layout).items())
        return places.network_argv(self.init(LOGIN).pid, self.record.spec, ("env", *settings, *argv))

    def _in_place(self, place: str, argv: Sequence[str]) -> Sequence[str]:
        return places.daemon_argv(self.init(place).pid, self.record.spec, argv)

    def _ip(self, place: str, batch: str, *options: str, may_fail: bool = False) -> None:
        argv = places.network_argv(self.init(place).pid, self.record.spec, ("ip", *options, "-batch", "-"))
        if may_fail:
            system.run(argv, PLACE_TIMEOUT_S, stdin=batch)
        else:
            system.check(argv, PLACE_TIMEOUT_S, stdin=batch)

    def _make_places(self, names: Sequence[str]) -> None:
        spec, deadline_s = self.record.spec, time.monotonic() + PLACE_TIMEOUT_S
        parents: dict[str, Process | None] = {}
        for name in names:
            # The word of a node's last life must not be taken for this one's.
            system.write(self._layout.out(name), "", 0o644)
            parents[name] = system.start_detached(places.init_argv(name, spec, self._layout), self._layout.out(name))
        inits: dict[str, Process] = {}
        for name, parent in parents.items():

            def is_settled(name: str = name, parent: Process | None = parent) -> bool:
                return self._says_ready(name) or parent is None or not system.is_alive(parent)

            system.wait_until(is_settled, max(0.0, deadline_s - time.monotonic()))
            init = system.only_child(parent) if parent is not None and self._says_ready(name) else None
            if init is None:
                raise SandboxError(
                    f"the namespaces of {name} were not made in {PLACE_TIMEOUT_S:g} s; {self._tail(name)}\n"
                    "a sandbox needs CAP_SYS_ADMIN: in a container, --privileged"
                )
            inits[name] = init
        self.save(inits={**self.record.inits, **inits})
        if spec.has_netns:
            self._connect(names)

    def _says_ready(self, place: str) -> bool:
        return self._layout.out(place).read_text(errors="replace").rstrip().endswith(places.READY)

    def _connect(self, names: Sequence[str]) -> None:
        addressing, spec = self.record.addressing, self.record.spec
        if LOGIN in names:
            self._ip(LOGIN, places.login_network(addressing))
        nodes = [index for index, name in enumerate(spec.nodes) if name in names]
        for bridge, is_cut in ((places.LAN, False), (places.CUT, True)):
            members = [index for index in nodes if (self.name(index) in self.record.cut) == is_cut]
            self._ip(LOGIN, places.plug_in([(index, self.init(self.name(index)).pid) for index in members], bridge))
        for index in nodes:
            self._ip(self.name(index), places.node_network(index, addressing))

    def _start(self, daemon: plan.StartDaemon) -> Process | None:
        argv = self._in_place(daemon.place, daemon.argv)
        return system.start_detached(argv, self._layout.out(daemon.name), daemon.environ)

    def _await_ready(self, daemon: plan.StartDaemon, process: Process | None) -> None:
        def has_ended() -> bool:
            return process is None or not system.is_alive(process)

        def is_ready() -> bool:
            match daemon.ready:
                case plan.SocketAnswers(path):
                    return system.socket_answers(path)
                case plan.PortListens(port):
                    return system.port_listens(self.init(daemon.place).pid, port)

        system.wait_until(lambda: has_ended() or is_ready(), daemon.timeout_s)
        if has_ended() or not is_ready():
            what = "ended" if has_ended() else f"was not ready in {daemon.timeout_s:g} s"
            raise SandboxError(f"{daemon.name} {what}; {self._tail(daemon.name)}")

    def _await_idle(self, names: Sequence[str], timeout_s: float) -> None:
        states: Mapping[str, str] = {}

        def are_idle() -> bool:
            nonlocal states
            states = self.node_states()
            return all(states.get(name) == "idle" for name in names)

        if not system.wait_until(are_idle, timeout_s, _STATE_INTERVAL_S):
            late = [name for name in names if states.get(name) != "idle"]
            listed = ", ".join(f"{name} is {states.get(name, 'unknown')}" for name in late)
            raise SandboxError(f"not idle after {timeout_s:g} s: {listed}; {self._tail(f'slurmd.{late[0]}')}")

    def _tail(self, name: str) -> str:
        return system.log_tail([self._layout.daemon_log(name), self._layout.out(name)])


def running_init(record: Record, place: str) -> Process:
    """The init of a place that runs.

    Raises:
        SandboxError: it doesn't.
    """
    init = record.inits.get(place)
    if init is None or not system.is_alive(init):
        raise SandboxError(f"{place} is not running" + (": slurm-pathways sandbox down" if place == LOGIN else ""))
    return init
