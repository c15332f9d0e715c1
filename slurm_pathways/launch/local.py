"""A runtime on this machine: controller, one worker per host, one proxy per client, as child processes.

    with LocalRuntime(RuntimeSpec(num_slices=2, hosts_per_slice=2, devices_per_host=2)) as runtime:
        subprocess.run([sys.executable, "train.py"], env=runtime.environment(), check=True)

All processes are started at once; those that need one another try to connect until it is there.
"""

import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pathways_runtime.transport.lifeline import Child, spawn
from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch import caretaker
from slurm_pathways.launch.arguments import controller_arguments, proxy_arguments, worker_arguments
from slurm_pathways.launch.client_environment import client_environment, component_environment
from slurm_pathways.launch.components import (
    ComponentEnded,
    ComponentEvent,
    Components,
    RuntimeEvent,
    describe_end,
    only_blocked,
    quote_log,
)
from slurm_pathways.launch.controller_status import NoAnswer, Report, ask
from slurm_pathways.launch.growth.messages import Lend
from slurm_pathways.launch.news import (
    FAILED_EVENT,
    HOST_READY_EVENT,
    LISTENING_EVENT,
    READY_EVENT,
    STUCK_EVENT,
    describe_trouble,
)
from slurm_pathways.launch.program import Program
from slurm_pathways.launch.restarts import ENDED_EVENT, Restarts
from slurm_pathways.launch.run_folder import SCHEMA_VERSION, RunFolder, RunRecord, identify
from slurm_pathways.launch.runtime import is_at_terminal
from slurm_pathways.slurm.environment import is_in_job
from slurm_pathways.slurm.quantities import Gres

logger = logging.getLogger(__name__)

#: What ends in good order takes milliseconds; a stuck process is not waited for longer.
CLOSE_GRACE_S = 5.0

CONTROLLER = "controller"

#: When many are missing, they are missing for one reason.
_LOGS_SHOWN = 2


@dataclass(frozen=True, slots=True)
class Modules:
    """The Python modules that are the runtime's processes (``python -m``)."""

    controller: str = "pathways_runtime.controller"
    worker: str = "pathways_runtime.worker"
    proxy: str = "pathways_runtime.proxy"


REAL_MODULES = Modules()


class StartupFailed(Exception):
    """The runtime did not come up. The message names who failed or is missing, and shows the end of its log."""


@dataclass(frozen=True, slots=True)
class Client:
    """A place for one client: a proxy of its own.

    Attributes:
        proxy: the proxy's name among the components.
        address: where it listens for the IFRT proxy protocol.
    """

    proxy: str
    address: str


@dataclass(frozen=True, slots=True)
class Lent:
    """Where a worker is that was lent; see ``growth``.

    Attributes:
        node: its name for people.
        lend: what the companion said.
    """

    node: str
    lend: Lend


class LocalRuntime:
    """Starts a runtime on entering and ends it on leaving; nothing of it is left then, whatever happened in between.

    When the runtime itself failed, its logs stay (``kept_logs``).

    Args:
        on_event: is told what components say and when they end, on a thread of its own; must not block.
        environ: what components and clients inherit; default: this process's environment.
        modules: other processes than the real ones, for tests of the launching.
    """

    def __init__(
        self,
        spec: RuntimeSpec,
        *,
        on_event: Callable[[RuntimeEvent], None] | None = None,
        environ: Mapping[str, str] | None = None,
        modules: Modules = REAL_MODULES,
    ) -> None:
        self.spec = spec
        self._modules = modules
        self._environ = dict(os.environ if environ is None else environ)
        self._tell = on_event
        self._changed = threading.Condition()
        self._is_ready = False
        self._listening: set[str] = set()
        #: The first that ended unasked.
        self._failure: ComponentEnded | None = None
        #: Seconds from the start by the name of each host that is ready.
        self._hosts_ready: dict[str, float] = {}
        #: What broke and was survived.
        self._troubles: list[str] = []
        self._restarts = Restarts()
        #: Of components that have been started, by name.
        self._argv: dict[str, list[str]] = {}
        #: Why the runtime cannot become ready.
        self._startup_failure: str | None = None
        #: From now on everybody ends, and some are lost to others: nothing of that is trouble.
        self._is_closing = False
        self._clients: list[Client] = []
        #: Ever made: their proxies are numbered.
        self._num_clients = 0
        self._folder: RunFolder | None = None
        self._components: Components | None = None
        self._caretaker: Child | None = None
        self._started: list[Child] = []
        self._record: RunRecord | None = None
        #: The workers beyond the run's own, by their place behind these; none ever goes from this list.
        self._lent: list[Lent] = []
        #: Of them, the components that were given back, or were told to end by who lends them.
        self._returned: set[str] = set()
        self._stopping: list[threading.Thread] = []
        self._cache: Path | None = None
        self._started_s = 0.0
        self._deadline_s = 0.0
        self.kept_logs: Path | None = None

    def __enter__(self) -> "LocalRuntime":
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # What a user of the runtime asks

    @property
    def folder(self) -> RunFolder:
        """The run folder; only between ``start`` and ``close``."""
        assert self._folder is not None, "the runtime has not been started"
        return self._folder

    @property
    def run_dir(self) -> Path:
        """The run folder's path."""
        return self.folder.path

    @property
    def controller_address(self) -> str:
        """Where the controller listens."""
        return self.folder.address(CONTROLLER)

    @property
    def host_names(self) -> tuple[str, ...]:
        """What people call the hosts, by worker id."""
        return tuple(f"host-{worker_id}" for worker_id in range(self.spec.num_hosts + len(self._lent)))

    @property
    def grows(self) -> bool:
        """Whether it can ``take`` workers that are lent."""
        return True

    @property
    def job_id(self) -> int | None:
        """The Slurm job that it runs in."""
        return None

    @property
    def gres_per_node(self) -> tuple[Gres, ...]:
        """Generic resources of its nodes, as far as Slurm says."""
        return ()

    def take(self, lend: Lend) -> tuple[str, ...]:
        """Start a worker on each node that somebody lends; returns their names at once. From the main thread.

        Raises:
            OSError: one cannot be started.
        """
        first = self.spec.num_hosts + len(self._lent)
        self._lent += [Lent(node, lend) for node in lend.nodes]
        names = tuple(f"worker-{first + place}" for place in range(len(lend.nodes)))
        for name in names:
            self._start_lent(name)
        self._write_record()
        return names

    def _start_lent(self, name: str) -> None:
        assert self._cache is not None
        self._start_worker(_number(name), self._cache, self.controller_address)

    def give_back(self, names: Sequence[str]) -> None:
        """End workers that were lent; returns at once."""
        self._returned.update(names)
        assert self._components is not None
        self._stopping = [thread for thread in self._stopping if thread.is_alive()]
        thread = threading.Thread(target=self._components.stop, args=(list(names), CLOSE_GRACE_S), name="give-back")
        self._stopping.append(thread)
        thread.start()

    def _lent_of(self, component: str) -> Lent | None:
        """Of a worker that was lent; None of the run's own components."""
        place = _number(component) - self.spec.num_hosts if is_worker(component) else -1
        return self._lent[place] if place >= 0 else None

    def program(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """The command line and environment of a process that runs ``argv`` as the first proxy's client."""
        return [*self.program_prefix(self._clients[0], has_terminal=is_at_terminal()), *argv], self.environment()

    def program_prefix(self, client: Client, *, has_terminal: bool) -> list[str]:
        """What stands before a program's command line. ``has_terminal``: whoever starts it is at one."""
        return []

    def signal_client(self, client: Client, number: int) -> bool:
        """Send a client's program a signal, where that is not for its launcher to do; False where it is."""
        return False

    def signal_program(self, program: Program, number: int) -> None:
        """See ``Runtime``."""
        program.signal(number)

    def status(self, timeout_s: float) -> Report:
        """See ``Runtime``."""
        assert self._components is not None and self._record is not None, "the runtime has not been started"
        if CONTROLLER not in self._components.running():
            raise NoAnswer("has ended")
        return ask(self._record.controller_address, timeout_s)

    @property
    def failure(self) -> ComponentEnded | None:
        """The component that ended first without having been asked to; a worker only while the runtime starts."""
        return self._failure

    def pids(self) -> dict[str, int]:
        """Pid by component: ``controller``, ``worker-N`` (its supervisor), ``proxy-N``."""
        assert self._components is not None, "the runtime has not been started"
        return self._components.running()

    def environment(self, client: Client | None = None) -> dict[str, str]:
        """The whole environment of a client process, by default of the first proxy's client."""
        chosen = self._clients[0] if client is None else client
        return client_environment(self._environ, chosen.address, self.run_dir)

    # Start

    def start(self) -> None:
        """Start every process; returns at once. From the main thread (see ``Components.start``).

        Raises:
            ConfigurationError: the run folder cannot be used. OSError: a process cannot be started.
        """
        self._started_s = time.monotonic()
        self._deadline_s = self._started_s + self.spec.startup_timeout_s
        self._folder = folder = RunFolder.create(self._environ, self.spec.run_dir, log_dir=self.spec.log_dir)
        cache = self.spec.compile_cache_dir or folder.path / "compile-cache"
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._cache = cache
        self._record = RunRecord(
            schema_version=SCHEMA_VERSION,
            run_id=folder.run_id,
            launcher=identify("launcher", os.getpid()),
            started_at_unix_s=time.time(),
            controller_address=self.controller_address,
            components=(),
            growth="" if self.grows else None,
            **self._where(),
        )
        # Before anything starts, so that the caretaker finds it at any later moment.
        folder.write(self._record)
        self._start_caretaker()
        # In a job, what ends the program's processes need not end those that it saves with.
        self._components = Components(
            component_environment(self._environ), self._note, outlast_sigterm=is_in_job(self._environ)
        )
        self._start_processes(cache)
        self._write_record()

    def _where(self) -> dict[str, Any]:
        """Fields of the record that say where else than here the runtime is."""
        return {}

    def _start_processes(self, cache: Path) -> None:
        """Start everything but the caretaker."""
        self._start_component(
            CONTROLLER, self._modules.controller, *controller_arguments(self.spec, self.controller_address)
        )
        self._start_workers(cache, self.controller_address)
        self._start_proxy()

    def _start_workers(self, cache: Path, controller_address: str) -> None:
        for worker_id in range(self.spec.num_hosts):
            self._start_worker(worker_id, cache, controller_address)

    def _start_worker(self, worker_id: int, cache: Path, controller_address: str) -> None:
        self._start_component(
            f"worker-{worker_id}",
            self._modules.worker,
            *worker_arguments(
                self.spec,
                worker_id=worker_id,
                host_name=self.host_names[worker_id],
                controller_address=controller_address,
                cache=cache,
                run_dir=self.folder.path,
                log_dir=self.folder.logs,
                # Hosts of one machine share its GPUs out.
                first_device=worker_id * self.spec.devices_per_host,
                companion=self._companion_of(f"worker-{worker_id}"),
            ),
            *self._extra_worker_arguments(worker_id),
        )

    def _companion_of(self, component: str) -> str:
        lent = self._lent_of(component)
        return "" if lent is None else lent.lend.companion

    def _extra_worker_arguments(self, worker_id: int) -> tuple[object, ...]:
        """What a worker's command line has besides, where hosts are reached in another way."""
        return ()

    def _start_caretaker(self) -> None:
        script = Path(caretaker.__file__)
        with only_blocked():
            self._caretaker = spawn(
                [sys.executable, "-I", "-S", str(script), "--run-dir", str(self.run_dir)],
                name="caretaker",
                env={},
                log_path=self.folder.log_of("caretaker"),
            )

    def _start_component(self, name: str, module: str, *arguments: object) -> None:
        assert self._components is not None
        argv = self._argv[name] = [sys.executable, "-m", module, *map(str, arguments)]
        self.folder.place_log(name, self._node_of(name))
        self._started.append(self._components.start(name, argv, self.folder.log_of(name)))

    def _links_arguments(self, number: int) -> tuple[object, ...]:
        """Where executors connect to a proxy."""
        return ("--links", self.folder.address(f"links-{number}"))

    def _new_client(self) -> Client:
        """A client whose proxy is still to be started."""
        number = self._num_clients
        self._num_clients += 1
        client = Client(f"proxy-{number}", self._address_of_client(number))
        self._clients.append(client)
        return client

    def _address_of_client(self, number: int) -> str:
        return self.folder.address(f"proxy-{number}")

    def _start_proxy(self) -> Client:
        client = self._new_client()
        self._start_component(
            client.proxy,
            self._modules.proxy,
            *("--controller", self.controller_address),
            *("--listen", client.address),
            *self._links_arguments(self._num_clients - 1),
            *proxy_arguments(self.spec),
        )
        return client

    @property
    def clients(self) -> tuple[Client, ...]:
        """Those that have a proxy, the oldest first."""
        return tuple(self._clients)

    def add_proxy(self) -> Client:
        """Start a proxy for one more client; returns at once. From the main thread."""
        client = self._start_proxy()
        self._write_record()
        return client

    def is_listening(self, client: Client) -> bool:
        """Whether a client's proxy accepts connections."""
        return client.proxy in self._listening

    def new_proxy(self) -> Client:
        """Start a proxy for one more client, and wait until it listens.

        Raises:
            StartupFailed: it ended, or took longer than a start may take.
        """
        self._deadline_s = time.monotonic() + self.spec.startup_timeout_s
        client = self.add_proxy()
        self.wait_ready()
        return client

    def close_proxy(self, client: Client) -> None:
        """End a proxy, and with it the session of its client. Waits for its end, ``CLOSE_GRACE_S`` at most."""
        self._clients.remove(client)
        self._stop_proxy(client)

    def _stop_proxy(self, client: Client) -> None:
        assert self._components is not None
        self._components.stop([client.proxy], CLOSE_GRACE_S)

    def _write_record(self) -> None:
        with self._changed:
            assert self._record is not None and self._components is not None
            running = self._components.running()
            self.record(components=tuple(identify(name, pid) for name, pid in running.items()))

    def record(self, **changes: object) -> None:
        """Change ``run.json``; the fields are those of ``RunRecord``."""
        with self._changed:
            assert self._record is not None
            fields = {name: getattr(self._record, name) for name in self._record.__struct_fields__}
            self._record = RunRecord(**{**fields, **changes})
            self.folder.write(self._record)

    # While it runs

    def _note(self, event: RuntimeEvent) -> None:
        """On the thread that watches components."""
        with self._changed:
            if isinstance(event, ComponentEvent):
                self._restarts.note(event.component, event.name, event.fields, time.monotonic())
                if event.name == ENDED_EVENT and event.fields.get("is_asked") and self._lent_of(event.component):
                    self._returned.add(event.component)
            elif event.component in self._returned:
                event = dataclasses.replace(event, was_asked=True)
            elif self._may_restart(event):
                event = self._restart(event)
            match event:
                case ComponentEvent(component, name) if name == LISTENING_EVENT:
                    self._listening.add(component)
                case ComponentEvent(component, name) if name == READY_EVENT and component == CONTROLLER:
                    self._is_ready = True
                case ComponentEvent(component, name, fields) if name == HOST_READY_EVENT and component == CONTROLLER:
                    self._hosts_ready.setdefault(fields["name"], time.monotonic() - self._started_s)
                case ComponentEvent(component, name, fields) if name == FAILED_EVENT and component == CONTROLLER:
                    self._startup_failure = str(fields["reason"])
                case ComponentEvent(component, name, fields) if name == STUCK_EVENT and component == CONTROLLER:
                    self._kill_worker(f"worker-{fields['worker']}")
                case ComponentEvent() if not self._is_closing and (trouble := describe_trouble(event)) is not None:
                    self._troubles.append(trouble)
                case ComponentEnded(component, returncode, was_asked=False) if self._is_ready and is_worker(component):
                    self._troubles.append(f"{component} {describe_end(returncode)}")
                case ComponentEnded(was_asked=False) if self._failure is None and self._startup_failure is None:
                    self._failure = event
                case _:
                    pass
            self._changed.notify_all()
        if self._tell is not None:
            self._tell(event)

    def _may_restart(self, event: ComponentEnded) -> bool:
        is_over = self._is_closing or event.was_asked or not self._is_ready
        return not is_over and event.will_restart is None and is_worker(event.component)

    def _restart(self, event: ComponentEnded) -> ComponentEnded:
        """Start a worker again, if that may be of use; the event, which says then whether it was."""
        assert self._components is not None
        name = event.component
        if name not in self._argv or CONTROLLER not in self._components.running():
            return event
        if not (is_due := self._restarts.is_another_due(name, time.monotonic())):
            return dataclasses.replace(event, will_restart=is_due)
        try:
            child = self._components.restart(name, self._argv[name], self.folder.log_of(name))
        except OSError:
            logger.exception("%s cannot be started again", name)
            return dataclasses.replace(event, will_restart=False)
        if child is None:
            return event
        self._started.append(child)
        self._write_record()
        return dataclasses.replace(event, will_restart=True)

    def _kill_worker(self, name: str) -> None:
        """Kill what is left of a worker that does not answer; its end is then that of any other."""
        assert self._components is not None
        self._components.kill(name)

    def is_ready(self) -> bool:
        """Whether all hosts are there and every proxy listens."""
        return self._is_ready and all(client.proxy in self._listening for client in self._clients)

    @property
    def startup_deadline_s(self) -> float:
        """When the start has failed, on ``time.monotonic``."""
        return self._deadline_s

    def hosts_ready(self) -> dict[str, float]:
        """The hosts that are ready, by name, with the seconds that it took."""
        with self._changed:
            return dict(self._hosts_ready)

    def has_failed(self) -> bool:
        """Whether a component ended unasked, or reported that something broke: then the logs are worth keeping."""
        return self._failure is not None or self._startup_failure is not None or bool(self._troubles)

    def wait_ready(self) -> None:
        """Wait until ``is_ready``.

        Raises:
            StartupFailed: a component ended, or ``startup_timeout_s`` passed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.is_ready() or self._failure is not None or self._startup_failure is not None,
                max(0.0, self._deadline_s - time.monotonic()),
            )
        self.check_startup()

    def check_startup(self) -> None:
        """Raise StartupFailed if a component has ended, the controller gave up, or the time for the start is over."""
        if self._failure is not None:
            raise StartupFailed("the runtime did not start: " + self.describe_failure())
        if self._startup_failure is not None:
            raise StartupFailed("\n".join([f"the runtime did not start: {self._startup_failure}", *self._troubles]))
        if not self.is_ready() and time.monotonic() >= self._deadline_s:
            self._startup_failure = self.describe_missing()
            raise StartupFailed(self._startup_failure)

    def describe_failure(self) -> str:
        """Who ended first, how, and the end of its log."""
        assert self._failure is not None
        name = self._failure.component
        end = describe_end(self._failure.returncode)
        return f"{self.describe_component(name)} {end}\n{quote_log(self.folder.log_of(name))}"

    def describe_missing(self) -> str:
        """Who is not there yet, with the ends of their logs."""
        missing = [client.proxy for client in self._clients if client.proxy not in self._listening]
        if CONTROLLER not in self._listening:
            missing.insert(0, CONTROLLER)
        hosts_ready = self.hosts_ready()
        missing += [f"worker-{n}" for n, name in enumerate(self.host_names) if name not in hosts_ready]
        logs = "\n".join(quote_log(self.folder.log_of(name)) for name in missing[:_LOGS_SHOWN])
        missing = [self.describe_component(name) for name in missing]
        return (
            f"the runtime did not start within {self.spec.startup_timeout_s:g} s; missing: {', '.join(missing)}\n{logs}"
        )

    def describe_component(self, name: str) -> str:
        """A component's name for people; of one that was lent, with its place."""
        lent = self._lent_of(name)
        return name if lent is None else f"{name} ({self._node_of(name)} of {lent.lend.companion})"

    def _node_of(self, component: str) -> str:
        """The name of the host that a component is on."""
        kind, _, number = component.partition("-")
        return self.host_names[int(number)] if kind == "worker" else os.uname().nodename

    # End

    def close(self) -> None:
        """End every process and remove the folder. May be called twice.

        Logs stay (``kept_logs``) if ``spec.keep_logs`` asks for them, or if something of the runtime had failed.
        """
        if self._folder is None or self._is_closing:
            return
        with self._changed:
            self._is_closing = True
        if self._components is not None:
            self._troubles += [f"{name} had to be killed" for name in self._components.close(CLOSE_GRACE_S)]
        for thread in self._stopping:
            thread.join()
        # Until here events may come in, and whoever handles them looks into it.
        folder, self._folder = self._folder, None
        keep_logs = self.spec.keep_logs or self.has_failed()
        folder.remove(keep_logs=keep_logs)
        if keep_logs:
            self.kept_logs = self.spec.log_dir or folder.logs
        if self._caretaker is not None:
            self._caretaker.release_lifeline()
            self._caretaker.has_ended(CLOSE_GRACE_S)
            self._caretaker.reap()


def _number(worker: str) -> int:
    return int(worker.removeprefix("worker-"))


def is_worker(component: str) -> bool:
    """Whether a component is a host's worker: a supervisor, or the step that it is in."""
    return component.startswith("worker-")
