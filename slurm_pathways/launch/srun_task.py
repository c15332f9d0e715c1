"""``slurm-pathways srun-task``: one task of a step that the SPANK plugin has turned into a runtime.

The first task starts the controller, the proxy, its node's worker and the program. Every other task is its node's
worker. What a worker needs to know (its number, the controller's address) the first task brings it by a step of its own
over all other nodes, the *post*: its tasks read it from their standard input, put it into a private folder of the node,
and remove it when the first task is gone.
"""

import contextlib
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pathways_runtime.transport.credentials import Credentials
from slurm_pathways.config import RUNS_VARIABLE, ConfigurationError, RuntimeSpec
from slurm_pathways.launch.client_environment import component_environment
from slurm_pathways.launch.components import (
    ComponentEnded,
    ComponentEvent,
    Components,
    RuntimeEvent,
    describe_end,
    quote_log,
)
from slurm_pathways.launch.local import (
    CLOSE_GRACE_S,
    CONTROLLER,
    LISTENING_EVENT,
    REAL_MODULES,
    LocalRuntime,
    controller_arguments,
    worker_arguments,
)
from slurm_pathways.launch.node_address import own_address
from slurm_pathways.launch.placement import Placement, find_allocation, plan, tcp_address
from slurm_pathways.launch.run import RUN_FAILED, run_with
from slurm_pathways.launch.run_folder import RunFolder, make_private
from slurm_pathways.launch.slurm import STEP_PREFIX
from slurm_pathways.launch.steps import StepOptions, srun_argv, step_environment
from slurm_pathways.slurm.environment import Allocation, Step

POST = "post"
_POLL_INTERVAL_S = 0.02


class Invitation(msgspec.Struct, frozen=True):
    """What the first task tells all others.

    Attributes:
        workers: the nodes, by worker id.
        controller_address: where workers connect.
        credentials: of the job, as text.
    """

    workers: tuple[str, ...]
    controller_address: str
    credentials: str


def run_task(values: Mapping[str, Any], argv: Sequence[str], environ: Mapping[str, str], node_dir: Path | None) -> int:
    """Be this task of the step.

    Args:
        values: what the user asked for, from ``config.gather``.
        node_dir: a private folder of the job on this node, for run folders.

    Returns:
        The task's exit code.

    Raises:
        ConfigurationError: this is no task of a step with one task per node, or what was asked for cannot be.
    """
    allocation = find_allocation(environ)
    step = allocation.step
    if step is None or step.nodes is None or step.node is None or step.task_index is None:
        raise ConfigurationError("this is no task of a step: srun-task is started by srun --pathways, not by hand")
    if step.num_tasks != len(step.nodes):
        raise ConfigurationError(
            f"the step has {step.num_tasks} tasks on {len(step.nodes)} nodes, and a runtime has one on each: give "
            "srun --ntasks-per-node=1"
        )
    spec, placement = plan(values, step.nodes)
    environ = step_environment(environ)
    if node_dir is not None and RUNS_VARIABLE not in environ:
        environ[RUNS_VARIABLE] = str(node_dir)
    if step.task_index != 0:
        return _WorkerTask(spec, allocation, step, environ).run()
    return run_with(
        lambda on_event: FirstTaskRuntime(spec, allocation, step, placement, on_event=on_event, environ=environ),
        spec,
        argv,
        environ,
        verbosity=-1,
        passes_signals=False,
    )


def _network(folder: RunFolder, host: str) -> tuple[str, ...]:
    """Of every process that speaks with other nodes."""
    return ("--credentials", str(folder.path), "--advertise", host)


def letter_box(job_id: int, step_id: int, node: str) -> Path:
    """Where the post puts the invitation. Nodes may share the file system."""
    return Path(f"/tmp/slurm-pathways-{os.getuid()}") / f"invitation-{job_id}.{step_id}.{node}"


class FirstTaskRuntime(LocalRuntime):
    """``LocalRuntime`` with one worker of its own; the others are tasks of the same step."""

    def __init__(
        self,
        spec: RuntimeSpec,
        allocation: Allocation,
        step: Step,
        placement: Placement,
        *,
        on_event: Callable[[RuntimeEvent], None],
        environ: Mapping[str, str],
    ) -> None:
        super().__init__(spec, on_event=on_event, environ=environ, modules=REAL_MODULES)
        self._allocation = allocation
        self._step = step
        self._placement = placement
        self._post_fd: int | None = None
        self._links: tuple[str, ...] = ()

    @property
    def host_names(self) -> tuple[str, ...]:
        """The nodes, by worker id."""
        return self._placement.workers

    def describe_component(self, name: str) -> str:
        """With its node."""
        kind, _, number = name.partition("-")
        return f"{name} ({self.host_names[int(number)]})" if kind == "worker" else name

    def _start_processes(self, cache: Path) -> None:
        assert self._components is not None
        self._credentials = Credentials.create(self.folder.path)
        host = own_address(self._environ)
        network = _network(self.folder, host)
        self._links = ("--links", f"tcp:{host}:0", *network)
        listen = (self.controller_address, f"tcp:{host}:0")
        self._start_component(CONTROLLER, self._modules.controller, *controller_arguments(self.spec, *listen), *network)
        assert self._step.nodes is not None
        others = [node for node in self._step.nodes if node != self._step.node]
        if others:
            options = StepOptions(STEP_PREFIX + POST, ",".join(others), num_nodes=len(others))
            module = [sys.executable, "-m", "slurm_pathways.launch.srun_task"]
            argv = srun_argv(
                self._allocation, options, [*module, str(self._allocation.job_id), str(self._step.step_id)]
            )
            child, self._post_fd = self._components.start_step(
                POST, argv, component_environment(self._environ), self.folder.log_of(POST)
            )
            self._started.append(child)
        worker_id = self.host_names.index(str(self._step.node))
        self._start_component(
            f"worker-{worker_id}",
            self._modules.worker,
            *worker_arguments(
                self.spec,
                worker_id=worker_id,
                host_name=self.host_names[worker_id],
                controller_address=self.controller_address,
                cache=cache,
                run_dir=self.folder.path,
                log_dir=self.folder.logs,
            ),
            *network,
        )
        self._start_proxy()

    def _links_arguments(self, number: int) -> tuple[object, ...]:
        return self._links

    def _note(self, event: RuntimeEvent) -> None:
        match event:
            case ComponentEvent(component, name, fields) if component == CONTROLLER and name == LISTENING_EVENT:
                self._invite(tcp_address(fields))
            case _:
                pass
        super()._note(event)

    def _invite(self, controller_address: str) -> None:
        if self._post_fd is None:
            return
        # Where the post is gone, its end is reported where all ends are.
        with contextlib.suppress(BrokenPipeError):
            invitation = Invitation(self._placement.workers, controller_address, self._credentials.to_text())
            os.write(self._post_fd, msgspec.json.encode(invitation) + b"\n")

    def close(self) -> None:
        """End what runs here; the other tasks end with the controller."""
        if self._post_fd is not None:
            os.close(self._post_fd)
            self._post_fd = None
        super().close()


class _WorkerTask:
    """A task that is nothing but its node's worker."""

    def __init__(self, spec: RuntimeSpec, allocation: Allocation, step: Step, environ: Mapping[str, str]) -> None:
        assert step.nodes is not None and step.node is not None
        self._spec = spec
        self._environ = environ
        self._first_node = step.nodes[0]
        self._node = step.node
        self._box = letter_box(allocation.job_id, step.step_id, step.node)
        self._inbox: queue.SimpleQueue[RuntimeEvent | None] = queue.SimpleQueue()
        self._is_asked = threading.Event()

    def run(self) -> int:
        """Returns the task's exit code: 0 when the run has ended in good order."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self._end())
        # Ctrl-C is the program's: it ends the runtime when it ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        invitation = self._wait_for_invitation()
        if invitation is None:
            return RUN_FAILED
        worker_id = invitation.workers.index(self._node)
        folder = RunFolder.create(self._environ)
        Credentials.from_text(invitation.credentials).save(folder.path)
        network = _network(folder, own_address(self._environ))
        cache = self._spec.compile_cache_dir or folder.path / "compile-cache"
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        components = Components(component_environment(self._environ), self._inbox.put)
        name = f"worker-{worker_id}"
        returncode = 0
        try:
            arguments = worker_arguments(
                self._spec,
                worker_id=worker_id,
                host_name=self._node,
                controller_address=invitation.controller_address,
                cache=cache,
                run_dir=folder.path,
                log_dir=folder.logs,
            )
            components.start(
                name, [sys.executable, "-m", REAL_MODULES.worker, *map(str, arguments), *network], folder.log_of(name)
            )
            while (event := self._inbox.get()) is not None:
                if isinstance(event, ComponentEnded):
                    returncode = event.returncode
                    if returncode != 0:
                        log = quote_log(folder.log_of(name))
                        print(
                            f"slurm-pathways: {name} ({self._node}) {describe_end(returncode)}\n{log}", file=sys.stderr
                        )
                    break
        finally:
            components.close(CLOSE_GRACE_S)
            folder.remove(keep_logs=self._spec.keep_logs)
        return returncode if returncode >= 0 else 128 - returncode

    def _end(self) -> None:
        self._is_asked.set()
        self._inbox.put(None)

    def _wait_for_invitation(self) -> Invitation | None:
        deadline_s = time.monotonic() + self._spec.startup_timeout_s
        while not self._is_asked.is_set():
            try:
                return msgspec.json.decode(self._box.read_bytes(), type=Invitation)
            except FileNotFoundError:
                pass
            if time.monotonic() >= deadline_s:
                print(
                    f"slurm-pathways: {self._node}: the first task, on {self._first_node}, has not said within "
                    f"{self._spec.startup_timeout_s:g} s where its controller is",
                    file=sys.stderr,
                )
                return None
            self._is_asked.wait(_POLL_INTERVAL_S)
        return None


def deliver(job_id: int, step_id: int, input_fd: int) -> int:
    """The post on one node: put what comes into the letter box, and remove it at the end of file."""
    box = letter_box(job_id, step_id, os.environ["SLURMD_NODENAME"])
    make_private(box.parent)
    wake_read, wake_write = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(wake_write, b"x"))
    poll = select.poll()
    poll.register(input_fd, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    text = b""
    try:
        while wake_read not in dict(poll.poll()) and (chunk := os.read(input_fd, 1 << 16)):
            text += chunk
            if text.endswith(b"\n"):
                fresh = box.with_name(box.name + ".new")
                with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                    file.write(text)
                fresh.replace(box)
    finally:
        box.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(deliver(int(sys.argv[1]), int(sys.argv[2]), sys.stdin.fileno()))
