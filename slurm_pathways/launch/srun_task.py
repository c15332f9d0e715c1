"""``slurm-pathways srun-task``: one task of a step that the SPANK plugin has turned into a runtime.

The first task starts the controller, the proxy, its node's worker and the program. Every other task is its node's
worker. What a worker needs to know (its number, the controller's address) the first task brings it by ``launch.post``.
"""

import dataclasses
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

from pathways_runtime.transport.addresses import TcpAddress
from pathways_runtime.transport.credentials import Credentials
from slurm_pathways.config import RUNS_VARIABLE, ConfigurationError, RuntimeSpec
from slurm_pathways.launch.arguments import controller_arguments, worker_arguments
from slurm_pathways.launch.client_environment import component_environment
from slurm_pathways.launch.components import (
    ComponentEnded,
    ComponentEvent,
    Components,
    RuntimeEvent,
    describe_end,
    quote_log,
)
from slurm_pathways.launch.local import CLOSE_GRACE_S, CONTROLLER, REAL_MODULES, LocalRuntime
from slurm_pathways.launch.news import FAILED_EVENT, LISTENING_EVENT
from slurm_pathways.launch.node_address import Place, explain_unreachable, own_place
from slurm_pathways.launch.placement import Placement, find_allocation, plan, tcp_address
from slurm_pathways.launch.post import POST, TASK_FAILED_EVENT, WORKER_ENDED_EVENT, Invitation, LetterBox, Post
from slurm_pathways.launch.restarts import Restarts, describe_restart
from slurm_pathways.launch.run import RUN_FAILED, run_with
from slurm_pathways.launch.run_folder import RunFolder
from slurm_pathways.launch.steps import step_environment
from slurm_pathways.slurm.commands import Slurm
from slurm_pathways.slurm.environment import Allocation, Step


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
    environ = step_environment(environ)
    if node_dir is not None and RUNS_VARIABLE not in environ:
        environ[RUNS_VARIABLE] = str(node_dir)
    if step.task_index != 0:
        # What the slices are is the first task's to find out.
        return _WorkerTask(RuntimeSpec(**values), allocation, step, environ).run()
    post = Post(allocation, step, environ)
    returncode = RUN_FAILED
    try:
        # The task script has it ignored, so that nobody ends before the others can be told.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        spec, placement = plan(values, step.nodes, Slurm(environ))
        returncode = run_with(
            lambda on_event: FirstTaskRuntime(spec, step, placement, post, on_event=on_event, environ=environ),
            spec,
            argv,
            environ,
            verbosity=-1,
            passes_signals=False,
        )
    finally:
        # Those signals Slurm sends to all tasks.
        if returncode not in (128 + signal.SIGTERM, 128 + signal.SIGHUP):
            post.dismiss_uninvited()
    return returncode


def _network(folder: RunFolder, place: Place) -> tuple[str, ...]:
    """Of every process that speaks with other nodes."""
    return ("--credentials", str(folder.path), "--advertise", place.address)


class FirstTaskRuntime(LocalRuntime):
    """``LocalRuntime`` with one worker of its own; the others are tasks of the same step."""

    def __init__(
        self,
        spec: RuntimeSpec,
        step: Step,
        placement: Placement,
        post: Post,
        *,
        on_event: Callable[[RuntimeEvent], None],
        environ: Mapping[str, str],
    ) -> None:
        super().__init__(spec, on_event=on_event, environ=environ, modules=REAL_MODULES)
        self._step = step
        self._placement = placement
        self._post = post
        self._place: Place | None = None

    @property
    def host_names(self) -> tuple[str, ...]:
        """The nodes, by worker id."""
        return self._placement.workers

    @property
    def grows(self) -> bool:
        """Workers of other jobs would need agents, which this kind of run has none of."""
        return False

    def describe_component(self, name: str) -> str:
        """With its node."""
        kind, _, number = name.partition("-")
        return f"{name} ({self.host_names[int(number)]})" if kind == "worker" else name

    def _node_of(self, component: str) -> str:
        return super()._node_of(component) if component.startswith("worker-") else str(self._step.node)

    def _start_processes(self, cache: Path) -> None:
        assert self._components is not None
        self._credentials = Credentials.create(self.folder.path)
        self._place = own_place(self._environ, self.spec.interface)
        listen = (self.controller_address, self._any_port)
        self._start_component(
            CONTROLLER, self._modules.controller, *controller_arguments(self.spec, *listen), *self._network
        )
        self.folder.place_log(POST, self._node_of(POST))
        if (child := self._post.start(self._components, self.folder.log_of(POST))) is not None:
            self._started.append(child)
        self._start_worker(self.host_names.index(str(self._step.node)), cache, self.controller_address)
        self._start_proxy()

    @property
    def _any_port(self) -> str:
        assert self._place is not None
        return str(TcpAddress(self._place.address, 0))

    @property
    def _network(self) -> tuple[str, ...]:
        assert self._place is not None
        return _network(self.folder, self._place)

    def _links_arguments(self, number: int) -> tuple[object, ...]:
        return ("--links", self._any_port, *self._network)

    def _extra_worker_arguments(self, worker_id: int) -> tuple[object, ...]:
        return self._network

    def _note(self, event: RuntimeEvent) -> None:
        match event:
            case ComponentEvent(component, name, fields) if component == CONTROLLER and name == LISTENING_EVENT:
                self._post.invite(
                    Invitation(self._placement.workers, tcp_address(fields), self._credentials.to_text(), self._place)
                )
            case ComponentEvent(name=name, fields=fields) if name == TASK_FAILED_EVENT:
                event = ComponentEvent(CONTROLLER, FAILED_EVENT, fields)
            case ComponentEvent(component, name, fields) if name == WORKER_ENDED_EVENT:
                # A start that fails for it fails with what its task has said, which knows the log.
                if self._tell is not None:
                    self._tell(ComponentEnded(component, fields["returncode"], was_asked=self._is_closing))
                return
            case ComponentEnded(component) if component == POST and self._is_ready:
                # The others have been invited, and what they would say at their end, the controller sees too. Its srun
                # ends by the SIGTERM that every process of the step gets when the job is to end.
                event = dataclasses.replace(event, was_asked=True)
            case _:
                pass
        super()._note(event)

    def close(self) -> None:
        """End what runs here; the other tasks end with the controller."""
        self._post.close()
        super().close()


class _DrainedInput:
    """Reads standard input and forgets it: srun sends it to all tasks, and waits until the slowest has taken it."""

    def __enter__(self) -> None:
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._drain, name="stdin")
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        os.close(self._wake_write)
        self._thread.join()
        os.close(self._wake_read)

    def _drain(self) -> None:
        poll = select.poll()
        for fd in (0, self._wake_read):
            poll.register(fd, select.POLLIN)
        while self._wake_read not in dict(poll.poll()) and os.read(0, 1 << 20):
            pass


class _WorkerTask:
    """A task that is nothing but its node's worker."""

    def __init__(self, spec: RuntimeSpec, allocation: Allocation, step: Step, environ: Mapping[str, str]) -> None:
        assert step.nodes is not None and step.node is not None
        self._spec = spec
        self._environ = environ
        self._first_node = step.nodes[0]
        self._node = step.node
        self._box = LetterBox(allocation.job_id, step.step_id, step.node)
        self._inbox: queue.SimpleQueue[RuntimeEvent | None] = queue.SimpleQueue()
        self._is_asked = threading.Event()

    def run(self) -> int:
        """Returns the task's exit code: 0 when the run has ended in good order.

        Raises:
            ConfigurationError: this node cannot take part.
        """
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self._end())
        # Ctrl-C is the program's: it ends the runtime when it ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with _DrainedInput():
            return self._run()

    def _run(self) -> int:
        invitation = self._box.wait(self._spec.startup_timeout_s, self._is_asked)
        if invitation is None:
            if not self._is_asked.is_set():
                print(
                    f"slurm-pathways: {self._node}: the first task, on {self._first_node}, has not said within "
                    f"{self._spec.startup_timeout_s:g} s where its controller is",
                    file=sys.stderr,
                )
            return RUN_FAILED
        if not invitation.workers:
            return 0
        try:
            return self._work(invitation)
        except Exception as failure:
            self._box.decline(f"{self._node}: {failure}")
            raise

    def _work(self, invitation: Invitation) -> int:
        worker_id = invitation.workers.index(self._node)
        place = own_place(self._environ, self._spec.interface)
        if invitation.place is not None and (reason := explain_unreachable([invitation.place, place])) is not None:
            raise ConfigurationError(reason)
        folder = RunFolder.create(self._environ, log_dir=self._spec.log_dir)
        folder.mark_in_use()
        Credentials.from_text(invitation.credentials).save(folder.path)
        network = _network(folder, place)
        cache = self._spec.compile_cache_dir or folder.path / "compile-cache"
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        # From here on the program's end is the end of the task; before, SIGTERM is.
        signal.signal(signal.SIGTERM, lambda *_: None)
        components = Components(component_environment(self._environ), self._note, outlast_sigterm=True)
        # It ends with its supervisor, which ends with the controller.
        restarts = Restarts(must_register=True)
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
            folder.place_log(name, self._node)
            argv = [sys.executable, "-m", REAL_MODULES.worker, *map(str, arguments), *network]
            components.start(name, argv, folder.log_of(name))
            while (event := self._inbox.get()) is not None:
                if isinstance(event, ComponentEvent):
                    restarts.note(name, event.name, event.fields, time.monotonic())
                    continue
                returncode = event.returncode
                will_restart = restarts.is_another_due(name, time.monotonic())
                if returncode != 0:
                    end = describe_end(returncode) + describe_restart(will_restart)
                    reason = f"{name} ({self._node}) {end}\n{quote_log(folder.log_of(name))}"
                    print(f"slurm-pathways: {reason}", file=sys.stderr)
                    if not will_restart:
                        self._box.decline(reason)
                if not will_restart:
                    self._box.tell_end(name, returncode)
                    break
                components.start(name, argv, folder.log_of(name))
        finally:
            components.close(CLOSE_GRACE_S)
            folder.remove(keep_logs=self._spec.keep_logs)
        return returncode if returncode >= 0 else 128 - returncode

    def _note(self, event: RuntimeEvent) -> None:
        if isinstance(event, ComponentEnded) and event.was_asked:
            # Nobody waits for it any more.
            self._box.tell_end(event.component, event.returncode)
        self._inbox.put(event)

    def _end(self) -> None:
        self._is_asked.set()
        self._inbox.put(None)
