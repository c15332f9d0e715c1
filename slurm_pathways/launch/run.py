"""``slurm-pathways run``: a runtime for the life of one program.

Everything that happens (signals, the program's end, what components say, their ends) arrives in one inbox and is
handled by one loop, in the order of arrival.
"""

import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch.client_environment import check_client_environment
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent, RuntimeEvent, describe_end, quote_log
from slurm_pathways.launch.growth.companions import Companions
from slurm_pathways.launch.growth.door import Came, Went
from slurm_pathways.launch.local import CONTROLLER, REAL_MODULES, LocalRuntime, Modules, StartupFailed
from slurm_pathways.launch.news import describe_news
from slurm_pathways.launch.preflight import check_devices, check_machine
from slurm_pathways.launch.program import (
    Program,
    ProgramEnded,
    ProgramNotStarted,
    SignalReceived,
    Signals,
    find_program,
)
from slurm_pathways.launch.progress import Progress
from slurm_pathways.launch.recorder import RunRecorder
from slurm_pathways.launch.restarts import describe_restart
from slurm_pathways.launch.run_folder import STEP, identify
from slurm_pathways.launch.runtime import Runtime
from slurm_pathways.launch.startup import next_event, start_up

#: Of a warm runtime: the process that lets programs in.
KEEPER = "keeper"
#: The exit code when the runtime did not start: what `env`, `timeout` and `docker run` give for their own failures.
RUN_FAILED = 125

Event = RuntimeEvent | SignalReceived | ProgramEnded | Came | Went


def run_local(
    spec: RuntimeSpec,
    argv: Sequence[str],
    environ: Mapping[str, str],
    verbosity: int,
    modules: Modules = REAL_MODULES,
) -> int:
    """Start a runtime, run the program ``argv`` against it, end the runtime.

    To be called from the main thread.

    Returns:
        The program's exit code: 128+n after signal n, 127 when it cannot be found, 126 when it cannot be executed;
        ``RUN_FAILED`` when the runtime did not start.

    Raises:
        ConfigurationError: what was asked for cannot be; nothing has been started.
    """
    check_devices(spec, environ)
    return run_with(
        lambda on_event: LocalRuntime(spec, on_event=on_event, environ=environ, modules=modules),
        spec,
        argv,
        environ,
        verbosity,
    )


def run_with(
    make_runtime: Callable[[Callable[[RuntimeEvent], None]], Runtime],
    spec: RuntimeSpec,
    argv: Sequence[str],
    environ: Mapping[str, str],
    verbosity: int,
    *,
    passes_signals: bool = True,
    is_warm: bool = False,
    make_progress: Callable[[], Progress] | None = None,
) -> int:
    """``run_local`` with any runtime.

    Args:
        make_runtime: gets what is to be told of the runtime's events.
        passes_signals: False where whoever signals us signals our whole process group, as Slurm does.
        is_warm: the runtime is there already.
        make_progress: what is said on stderr; by default as of a run.
    """
    check_client_environment(environ)
    if not is_warm:
        check_machine(spec)
    progress = Progress(spec, verbosity) if make_progress is None else make_progress()
    try:
        find_program(argv[0], environ)
    except ProgramNotStarted as failure:
        progress.line(str(failure))
        return failure.exit_code
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    recorder = RunRecorder(environ, spec, argv, is_warm=is_warm, warn=progress.line)

    def tell(event: RuntimeEvent) -> None:
        recorder.note(event)
        inbox.put(event)

    with Signals(inbox.put):
        return _Run(make_runtime(tell), argv, progress, inbox, recorder, passes_signals, is_warm).execute()


class _Run:
    def __init__(
        self,
        runtime: Runtime,
        argv: Sequence[str],
        progress: Progress,
        inbox: "queue.SimpleQueue[Event]",
        recorder: RunRecorder,
        passes_signals: bool,
        is_warm: bool,
    ) -> None:
        self._runtime = runtime
        self._spec = runtime.spec
        self._argv = argv
        self._progress = progress
        self._inbox = inbox
        self._recorder = recorder
        #: Why the program was not run; for the record.
        self._problem: str | None = "the launcher failed"
        self._passes_signals = passes_signals
        self._is_warm = is_warm
        #: None where the runtime takes no workers that are lent; a warm one has its keeper for that.
        self._companions: Companions | None = None
        if isinstance(runtime, LocalRuntime) and runtime.grows:
            self._companions = Companions(runtime, progress.line)
        self._started_s = time.monotonic()

    def execute(self) -> int:
        exit_code = RUN_FAILED
        try:
            exit_code = self._run()
            return exit_code
        finally:
            self._recorder.close(exit_code, self._problem)

    def _run(self) -> int:
        try:
            if not self._is_warm:
                self._progress.starting()
            self._runtime.start()
            self._recorder.begin(self._runtime.folder.path.name, self._runtime.status)
            interruption = start_up(self._runtime, self._inbox, self._progress, self._started_s)
            if interruption is not None:
                self._problem = f"{interruption.name} came before the runtime was ready"
                return 128 + interruption
            self._progress.ready(self._elapsed_s(), str(self._spec.log_dir or self._runtime.folder.logs))
            self._recorder.ready()
            if self._companions is not None:
                self._companions.open(self._inbox.put)
            command, environ = self._runtime.program(self._argv)
            program = Program(command, environ, self._inbox.put)
            try:
                self._runtime.record(
                    program=identify(STEP if len(command) > len(self._argv) else "program", program.pid),
                    program_argv=tuple(self._argv),
                )
                exit_code = self._supervise(program)
                self._problem = None
                self._recorder.program_ended(exit_code)
                return exit_code
            except BaseException:
                self._runtime.signal_program(program, signal.SIGKILL)
                raise
            finally:
                program.join()
        except StartupFailed as failure:
            self._problem = str(failure)
            self._progress.line(self._problem)
            return RUN_FAILED
        except ProgramNotStarted as failure:
            self._problem = str(failure)
            self._progress.line(self._problem)
            return failure.exit_code
        finally:
            self._runtime.close()
            if self._companions is not None:
                self._companions.close()
            if self._runtime.kept_logs is not None:
                self._progress.line(f"the logs are in {self._runtime.kept_logs}")

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _supervise(self, program: Program) -> int:
        """Until the program has ended; returns its exit code."""
        is_served = True
        # What the program is sent, and when, once the runtime can serve it no more.
        due: list[tuple[float, signal.Signals]] = []
        while True:
            event = next_event(self._inbox, due[0][0] if due else None)
            if self._companions is not None and isinstance(event, ComponentEvent | ComponentEnded):
                self._companions.note(event)
            match event:
                case Came() | Went():
                    assert self._companions is not None
                    self._companions.handle(event)
                case ProgramEnded(exit_code):
                    return exit_code
                case SignalReceived(number, from_terminal):
                    if self._passes_signals and not from_terminal:
                        self._runtime.signal_program(program, number)
                case ComponentEnded() as event:
                    self._progress.event(event, self._elapsed_s())
                    # Once a vital one is gone, others follow: that says nothing new.
                    if not event.was_asked and is_served:
                        self._say_lost(event)
                        if is_vital(event.component):
                            is_served = False
                            term_s = time.monotonic() + self._spec.failure_grace_s
                            due = [(term_s, signal.SIGTERM), (term_s + self._spec.kill_after_s, signal.SIGKILL)]
                case ComponentEvent() as event:
                    self._progress.event(event, self._elapsed_s())
                    if (news := describe_news(event)) is not None and is_served:
                        self._progress.line(news)
                case None:
                    _, number = due.pop(0)
                    self._progress.line(
                        f"the program has not ended although its runtime is gone: sending it {number.name}"
                    )
                    self._runtime.signal_program(program, number)

    def _say_lost(self, event: ComponentEnded) -> None:
        log = self._runtime.folder.log_of(event.component)
        consequence = f"; what its devices held is lost{describe_restart(event.will_restart)}"
        if is_vital(event.component):
            consequence = (
                f"; the program cannot use its devices any more, and is ended if it does not end by itself within "
                f"{self._spec.failure_grace_s:g} s"
            )
        name = self._runtime.describe_component(event.component)
        # With srun --pathways it may be on its node, whose task has shown the end of it.
        quoted = f"\n{quote_log(log)}" if log.exists() else ""
        self._progress.line(f"{name} {describe_end(event.returncode)}{consequence}{quoted}")


def is_vital(component: str) -> bool:
    """Whether the program can get nothing done without it; a lost host is for the program to see, and to survive."""
    return component in (CONTROLLER, KEEPER) or component.startswith("proxy-")
