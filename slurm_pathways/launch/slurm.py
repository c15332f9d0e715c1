"""A runtime on the nodes of a Slurm allocation: the same processes as on one machine, each in a step of its own.

The *head* is the allocation's first node; controller, proxy and program run there. In front of each step stands an
srun of ours, which carries what the launcher and the step's agent say to each other (``launch.agent``). All sruns are
started at once; components are started as soon as their node is there and what they connect to has an address.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pathways_runtime.transport.credentials import FILE_NAME as CREDENTIALS_NAME
from pathways_runtime.transport.credentials import Credentials
from slurm_pathways.config import RUNS_VARIABLE, ConfigurationError, RuntimeSpec
from slurm_pathways.launch import agent, client_step, head_loss
from slurm_pathways.launch.arguments import controller_arguments, proxy_arguments, worker_arguments
from slurm_pathways.launch.caretaker import remove_run
from slurm_pathways.launch.client_environment import component_environment
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent, RuntimeEvent
from slurm_pathways.launch.controller_status import NoAnswer, Report
from slurm_pathways.launch.local import CLOSE_GRACE_S, CONTROLLER, REAL_MODULES, Client, LocalRuntime, Modules
from slurm_pathways.launch.news import AGENT_EVENT, AGENT_FAILED_EVENT, FAILED_EVENT, LISTENING_EVENT, TERMINATING_EVENT
from slurm_pathways.launch.node_address import Place, explain_unreachable
from slurm_pathways.launch.placement import Placement, find_allocation, plan, tcp_address
from slurm_pathways.launch.program import Program
from slurm_pathways.launch.run import run_with
from slurm_pathways.launch.run_folder import LOCK_NAME
from slurm_pathways.launch.steps import (
    KILL_STEPS,
    STEP_PREFIX,
    StepOptions,
    enter_argv,
    enter_environment,
    srun_argv,
    step_environment,
)
from slurm_pathways.slurm.commands import CommandError, Slurm
from slurm_pathways.slurm.environment import Allocation
from slurm_pathways.slurm.quantities import Gres

logger = logging.getLogger(__name__)

#: Of every process that speaks with other nodes, as agents complete it.
_NETWORK = ("--credentials", agent.FOLDER, "--advertise", agent.HOST)
_AGENT_GRACE_S = 0.5
#: Where Slurm starts what has lost its working folder.
_SLURMS_LAST_RESORT = "/tmp"


def run_in_allocation(
    values: Mapping[str, Any], argv: Sequence[str], environ: Mapping[str, str], verbosity: int
) -> int:
    """``run.run_local`` on the nodes of the allocation that ``environ`` describes.

    Args:
        values: what the user asked for, from ``config.gather``.

    Raises:
        ConfigurationError: what was asked for cannot be; nothing has been started.
    """
    spec, _, make_runtime = in_allocation(values, environ)
    return run_with(make_runtime, spec, argv, environ, verbosity)


def in_allocation(
    values: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[RuntimeSpec, Allocation, Callable[[Callable[[RuntimeEvent], None]], "SlurmRuntime"]]:
    """The runtime that was asked for on the nodes of the allocation that ``environ`` describes; not started yet.

    Returns:
        What it will be, where, and what makes it, given what is to be told of its events.

    Raises:
        ConfigurationError: what was asked for cannot be.
    """
    allocation = find_allocation(environ)
    step = allocation.step
    if step is not None and (step.num_tasks or 1) > 1:
        raise ConfigurationError(
            f"this is one of {step.num_tasks} tasks of a step, and each would start a runtime: start slurm-pathways "
            "once, in the batch script or the shell of salloc, without srun before it"
        )
    submit_dir = allocation.submit_dir
    if submit_dir and os.getcwd() == _SLURMS_LAST_RESORT and not os.path.isdir(submit_dir):  # noqa: PTH109, PTH112
        raise ConfigurationError(
            f"the job was submitted from {submit_dir}, which is not there on this node, so Slurm has started it in "
            f"{_SLURMS_LAST_RESORT}: submit from a folder that all nodes see, or give sbatch --chdir"
        )
    spec, placement = plan(values, allocation.nodes, Slurm(environ))

    def make_runtime(on_event: Callable[[RuntimeEvent], None]) -> SlurmRuntime:
        return SlurmRuntime(spec, allocation, placement, on_event=on_event, environ=environ)

    return spec, allocation, make_runtime


def _pid_file(client: Client) -> str:
    return f"program-of-{client.proxy}.pid"


class _Step:
    """The srun of an agent: lines go to its standard input, from any thread.

    An srun that does not read holds up nobody: what its pipe (64 KiB) has no room for is not sent.
    """

    def __init__(self, input_fd: int) -> None:
        os.set_blocking(input_fd, False)
        self._lock = threading.Lock()
        self._input_fd: int | None = input_fd

    def send(self, line: agent.Line) -> bool:
        """Whether it could be sent. An end is reported where all ends are."""
        with self._lock:
            if self._input_fd is None:
                return False
            try:
                os.write(self._input_fd, agent.encode_line(line))
            except BlockingIOError:
                return False
            except BrokenPipeError:
                self._close()
                return False
            return True

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._input_fd is not None:
            os.close(self._input_fd)
            self._input_fd = None


class SlurmRuntime(LocalRuntime):
    """``LocalRuntime`` with other places for its processes."""

    def __init__(
        self,
        spec: RuntimeSpec,
        allocation: Allocation,
        placement: Placement,
        *,
        on_event: Callable[[RuntimeEvent], None] | None = None,
        environ: Mapping[str, str] | None = None,
        modules: Modules = REAL_MODULES,
    ) -> None:
        super().__init__(spec, on_event=on_event, environ=environ, modules=modules)
        self._environ = step_environment(self._environ)
        self._allocation = allocation
        self._placement = placement
        self._steps: dict[str, _Step] = {}
        #: Of those whose agent has said something, by component.
        self._step_ids: dict[str, str] = {}
        self._places: list[Place] = []
        self._cancelling: list[threading.Thread] = []
        self._num_asked = 0
        self._has_controller_ended = False
        #: Slurm has said that the job ends.
        self._is_terminating = False
        #: Of agents that were asked for the controller's status; guarded by ``_changed``.
        self._answers: dict[int, Mapping[str, Any]] = {}
        self._has_closed = threading.Event()
        self._credentials = ""
        #: Where workers reach the controller, once it listens.
        self._controller_tcp = ""

    # Names and places

    @property
    def host_names(self) -> tuple[str, ...]:
        """The nodes, by worker id."""
        return (*self._placement.workers, *(lent.node for lent in self._lent))

    @property
    def job_id(self) -> int | None:
        """See ``LocalRuntime``."""
        return self._allocation.job_id

    @property
    def gres_per_node(self) -> tuple[Gres, ...]:
        """See ``LocalRuntime``."""
        return self._allocation.gres_per_node

    def describe_component(self, name: str) -> str:
        """With its node."""
        return f"{name} ({self._node_of(name)})" if self._lent_of(name) is None else super().describe_component(name)

    def _node_of(self, component: str) -> str:
        kind, _, number = component.partition("-")
        return self.host_names[int(number)] if kind == "worker" else self._placement.head

    def _allocation_of(self, component: str) -> Allocation:
        """The job that a component's step is in."""
        lent = self._lent_of(component)
        if lent is None:
            return self._allocation
        lend = lent.lend
        assert lend.job_id is not None
        return Allocation(lend.job_id, lend.nodes, lend.cpus_per_node, gres_per_node=lend.gres_per_node)

    def _folder_on_node(self, step: str) -> str:
        """The folder of a step's agent. Nodes may share the file system, so each step has its own."""
        # Not XDG_RUNTIME_DIR: it belongs to a login.
        root = self._environ.get(RUNS_VARIABLE) or f"/tmp/slurm-pathways-{os.getuid()}"
        return f"{Path(root).expanduser().absolute()}/{self.folder.run_id}.{step}"

    @property
    def _head_folder(self) -> str:
        return self._folder_on_node(CONTROLLER)

    @property
    def controller_address(self) -> str:
        """Where the controller listens for what runs on the head."""
        return f"unix:{self._head_folder}/{CONTROLLER}.sock"

    # Start

    def _where(self) -> dict[str, Any]:
        job_id = self._allocation.job_id
        reach = enter_argv(job_id, self._placement.head, STEP_PREFIX + "status", has_terminal=False)
        return {"job_id": job_id, "reach": tuple(reach)}

    def _start_processes(self, cache: Path) -> None:
        self._new_client()
        self._start_step(CONTROLLER, has_devices=False)
        for worker_id in range(self.spec.num_hosts):
            self._start_step(f"worker-{worker_id}", has_devices=True)
        # While the steps start.
        self._credentials = Credentials.make().to_text()
        heads = self._heads()
        for name in self._steps:
            self._welcome(name, heads.get(name))
        if heads:
            threading.Thread(target=self._say_alive, name="alive", daemon=True).start()
        listen = (self.controller_address, agent.ANY_PORT)
        self._start(
            CONTROLLER, CONTROLLER, self._modules.controller, (*controller_arguments(self.spec, *listen), *_NETWORK)
        )

    def _welcome(self, name: str, head: head_loss.Head | None) -> None:
        self._steps[name].send(
            agent.Welcome(
                folder=self._folder_on_node(name),
                launcher_folder=str(self.folder.path),
                log_dir=None if self.spec.log_dir is None else str(self.spec.log_dir),
                work_dir=os.getcwd(),  # noqa: PTH109 (bytes-exact)
                files={CREDENTIALS_NAME: self._credentials},
                interface=self.spec.interface,
                head=head,
                is_lent=self._lent_of(name) is not None,
            )
        )

    def _start_lent(self, name: str) -> None:
        self._start_step(name, has_devices=True)
        self._welcome(name, None)
        self._start_worker_in(name)

    def give_back(self, names: Sequence[str]) -> None:
        """See ``LocalRuntime``."""
        self._returned.update(names)
        for name in names:
            self._steps[name].send(agent.Dismiss())
            self._steps[name].close()

    def _heads(self) -> dict[str, head_loss.Head]:
        """What agents are told of this node, if it is that of a batch job's script: those of other nodes, in turn."""
        here = self._environ.get("SLURMD_NODENAME")
        if self._environ.get("ENVIRONMENT") != "BATCH" or here is None:
            return {}
        elsewhere = [name for name in self._steps if self._node_of(name) != here]
        watchers = elsewhere[: head_loss.MAX_WATCHERS]
        job_id, on_loss = self._allocation.job_id, self.spec.on_head_loss
        return {name: head_loss.Head(job_id, here, on_loss, turn) for turn, name in enumerate(watchers)}

    def _say_alive(self) -> None:
        while not self._has_closed.wait(agent.ALIVE_INTERVAL_S):
            for step in list(self._steps.values()):
                step.send(agent.Alive())

    def _start_step(self, name: str, *, has_devices: bool) -> None:
        assert self._components is not None
        options = StepOptions(STEP_PREFIX + name, self._node_of(name), has_devices)
        argv = srun_argv(self._allocation_of(name), options, [sys.executable, "-m", "slurm_pathways.launch.agent"])
        self.folder.place_log(name, options.node)
        # What describes the run's job would contradict a step of another.
        environ = self._environ if self._lent_of(name) is None else enter_environment(self._environ)
        child, input_fd = self._components.start_step(
            name, argv, component_environment(environ), self.folder.log_of(name)
        )
        self._started.append(child)
        self._steps[name] = _Step(input_fd)

    def _start(
        self,
        step: str,
        component: str,
        module: str,
        arguments: tuple[object, ...],
        *,
        is_primary: bool = True,
        restarts: bool = False,
    ) -> None:
        argv = (sys.executable, "-m", module, *map(str, arguments))
        self._steps[step].send(agent.Start(component, argv, is_primary, restarts))

    def _start_connected(self, controller_address: str) -> None:
        """Start all that connects to the controller, which listens now. On the thread that watches components."""
        self._controller_tcp = controller_address
        self._start_proxy_of(self._clients[0])
        for worker_id in range(len(self._placement.workers)):
            self._start_worker_in(f"worker-{worker_id}")

    def _start_worker_in(self, name: str) -> None:
        """In the step of its name. Once the controller listens."""
        arguments = worker_arguments(
            self.spec,
            worker_id=int(name.removeprefix("worker-")),
            host_name=self._node_of(name),
            controller_address=self._controller_tcp,
            cache=self.spec.compile_cache_dir or agent.CACHE,
            run_dir=agent.FOLDER,
            log_dir=agent.LOGS,
            companion=self._companion_of(name),
        )
        self._start(name, name, self._modules.worker, (*arguments, *_NETWORK), restarts=True)

    def _address_of_client(self, number: int) -> str:
        return f"unix:{self._head_folder}/proxy-{number}.sock"

    def _start_proxy(self) -> Client:
        client = self._new_client()
        self._start_proxy_of(client)
        return client

    def _may_restart(self, event: ComponentEnded) -> bool:
        # Agents start workers again themselves; an srun that has ended has lost its node.
        return False

    def _kill_worker(self, name: str) -> None:
        self._steps[name].send(agent.Kill(name))

    def _start_proxy_of(self, client: Client) -> None:
        """Once the controller listens."""
        self._start(
            CONTROLLER,
            client.proxy,
            self._modules.proxy,
            (
                *("--controller", self.controller_address),
                *("--listen", client.address),
                *("--links", agent.ANY_PORT),
                *_NETWORK,
                *map(str, proxy_arguments(self.spec)),
            ),
            is_primary=False,
        )

    def _stop_proxy(self, client: Client) -> None:
        self._steps[CONTROLLER].send(agent.Stop(client.proxy))

    def _note(self, event: RuntimeEvent) -> None:
        match event:
            case ComponentEvent(name=agent.STATUS_EVENT, fields=fields):
                with self._changed:
                    self._answers[fields["number"]] = fields
                    self._changed.notify_all()
                return
            case ComponentEvent(name=name) if name == TERMINATING_EVENT:
                # Every agent hears it.
                if self._is_terminating or self._is_closing:
                    return
                self._is_terminating = True
            case ComponentEvent(component, name, fields) if name == agent.PROCESS_ENDED_EVENT:
                will_restart = fields.get("will_restart")
                event = ComponentEnded(component, fields["returncode"], self._is_closing, will_restart)
            case ComponentEvent(component, name, fields) if name == AGENT_FAILED_EVENT:
                # One that was lent is missed by nobody.
                if self._lent_of(component) is None:
                    event = ComponentEvent(CONTROLLER, FAILED_EVENT, fields)
            case ComponentEvent(component, name, fields) if name == AGENT_EVENT:
                self._step_ids[component] = fields["step_id"]
                place = Place(**fields["place"])
                is_own = self._lent_of(component) is None
                if (reason := explain_unreachable([*self._places, place])) is not None:
                    failed = (CONTROLLER, FAILED_EVENT) if is_own else (component, AGENT_FAILED_EVENT)
                    event = ComponentEvent(*failed, {"reason": reason})
                if is_own:
                    self._places.append(place)
                elif reason is None:
                    job_id = self._allocation_of(component).job_id
                    event = ComponentEvent(component, name, {**fields, "job_id": job_id})
            case ComponentEnded(component, was_asked=False) if (
                component in self._step_ids and component not in self._returned
            ):
                self._end_step(component)
            case ComponentEvent(component, name, fields) if component == CONTROLLER and name == LISTENING_EVENT:
                if not self._is_closing:
                    self._start_connected(tcp_address(fields))
            case _:
                pass
        if isinstance(event, ComponentEnded) and event.component == CONTROLLER:
            self._has_controller_ended = True
        super()._note(event)

    def status(self, timeout_s: float) -> Report:
        """See ``Runtime``: the agent of the controller's node asks, as its socket may be on another machine."""
        with self._changed:
            self._num_asked += 1
            number = self._num_asked
        step = self._steps[CONTROLLER]
        if not step.send(agent.Ask(number, self.controller_address, timeout_s)):
            raise NoAnswer("has ended")
        with self._changed:
            # The agent's answer needs a moment more than the controller's.
            self._changed.wait_for(
                lambda: number in self._answers or self._has_controller_ended, timeout_s + _AGENT_GRACE_S
            )
            answer = self._answers.pop(number, None)
        if answer is None:
            raise NoAnswer("has ended" if self._has_controller_ended else f"did not answer within {timeout_s:g} s")
        if "problem" in answer:
            raise NoAnswer(answer["problem"])
        report: Report = answer["report"]
        return report

    def _end_step(self, component: str) -> None:
        """See that a step ends whose srun has ended: when srun was killed, or lost the node for a time, it goes on."""
        slurm = Slurm(self._environ, CLOSE_GRACE_S)
        job_id, step_id = self._allocation_of(component).job_id, self._step_ids[component]

        def cancel() -> None:
            try:
                # Not SIGTERM, which agents outlast.
                slurm.signal_step(job_id, int(step_id), "INT")
                if not self._has_closed.wait(CLOSE_GRACE_S):
                    slurm.signal_step(job_id, int(step_id), "KILL")
            except CommandError as failure:
                logger.warning("step %d.%s may still run: %s", job_id, step_id, failure)

        self._cancelling.append(threading.Thread(target=cancel, name="scancel"))
        self._cancelling[-1].start()

    # The program

    def signal_program(self, program: Program, number: int) -> None:
        """srun answers some signals by killing its step: the program gets these by way of the head's agent."""
        if not self.signal_client(self._clients[0], number):
            program.signal(KILL_STEPS[0] if number == signal.SIGKILL else number)

    def signal_client(self, client: Client, number: int) -> bool:
        """See ``LocalRuntime``: those that srun does not pass on."""
        if number not in KILL_STEPS:
            return False
        # Where the head's agent is gone, the task has seen that and ends the program.
        self._steps[CONTROLLER].send(agent.Signal(_pid_file(client), number))
        return True

    def program_prefix(self, client: Client, *, has_terminal: bool) -> list[str]:
        """A step on the head, which runs what follows."""
        options = StepOptions(STEP_PREFIX + "client", self._placement.head, has_terminal=has_terminal)
        wrapper = [
            *(sys.executable, "-I", "-S", client_step.__file__),
            *("--lock", f"{self._head_folder}/{LOCK_NAME}", "--over", f"{self._head_folder}/{agent.OVER_NAME}"),
            *("--pid-file", f"{self._head_folder}/{_pid_file(client)}"),
            *("--grace-s", str(self.spec.failure_grace_s), "--kill-after-s", str(self.spec.kill_after_s)),
            "--",
        ]
        return srun_argv(self._allocation, options, wrapper)

    # End

    def close(self) -> None:
        """End every step and remove the folder. May be called twice."""
        for step in list(self._steps.values()):
            step.send(agent.Dismiss())
            step.close()
        folders = [Path(self._folder_on_node(name)) for name in self._steps] if self._folder is not None else []
        super().close()
        self._has_closed.set()
        for thread in self._cancelling:
            thread.join()
        # What agents that were killed have left, where this node sees it; each node's next run sees to the others.
        for folder in folders:
            remove_run(folder, keep_logs=False)
