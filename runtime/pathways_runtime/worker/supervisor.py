"""The supervisor of one host: starts the executor when the controller says so, watches it, and tells how it ended.

It loads no JAX: it must start at once, stay small, and go on whatever happens in the executor. It ends when its
parent, the controller or its user wants it to, and never before its executor has.
"""

import argparse
import asyncio
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathways_runtime.core.ids import WorkerId
from pathways_runtime.transport import addresses, network, streams
from pathways_runtime.transport.credentials import CredentialsError
from pathways_runtime.transport.frames import AsyncChannel, Frame, FrameCodec
from pathways_runtime.transport.lifeline import (
    Child,
    EventWriter,
    die_with_parent,
    log_tail,
    spawn,
    watch_lifeline_on_loop,
)
from pathways_runtime.wire import messages
from pathways_runtime.wire.messages import AnyMessage
from pathways_runtime.worker import gpu, private_sockets
from pathways_runtime.worker.colocated import files_prefix
from pathways_runtime.worker.relay import Relay
from pathways_runtime.worker.retained import descriptor

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
HEARTBEAT_INTERVAL_S = 1.0
#: The controller answers heartbeats. Silent for so long, it is gone or this host is cut off: whatever the executor does
#: then, others do without it, and the host is better free.
CONTROLLER_TIMEOUT_S = 60.0
#: What the executor gets between SIGTERM and SIGKILL.
STOP_GRACE_S = 2.0
LOG_TAIL_LINES = 20
#: Of the job that lends a worker, when that is told to end.
LEAVING = "takes it back: that job ends, or was cancelled or preempted"

EXECUTOR_COMMAND = (sys.executable, "-m", "pathways_runtime.worker.executor")

#: How glibc shall treat the large buffers that XLA allocates for every result. By default each is mapped anew and
#: faulted page by page: 8 times slower than computing into memory that is there. So: one arena, nothing mapped apart,
#: nothing given back, and huge pages where memory is fresh. (256 MiB elementwise: 115 ms by default, 14 ms with this.)
GLIBC_TUNABLES = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {"arena_max": 1, "hugetlb": 1, "mmap_threshold": 1 << 34, "trim_threshold": 1 << 34}.items()
)

#: Of the environment that the user's program brought along: they are for its JAX, not for ours.
_DROPPED_PREFIXES = ("JAX_", "XLA_")
#: gRPC in jaxlib would take these for the way to the coordination service on this machine.
_DROPPED_NAMES = frozenset({"http_proxy", "https_proxy", "grpc_proxy"})


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """What a supervisor is told on its command line; see ``parse_options``."""

    controller: str
    worker_id: int
    name: str
    devices_per_host: int
    platform: str
    compile_cache: Path
    run_dir: Path
    log_dir: Path
    force_sockets: bool = False
    worker_xla_flags: str | None = None
    events_fd: int | None = None
    lifeline_fd: int | None = None
    credentials: Path | None = None
    advertise: str | None = None
    data_plane_encryption: str = "tls"
    controller_timeout_s: float = CONTROLLER_TIMEOUT_S
    first_device: int = 0
    companion: str = ""


def parse_options(argv: Sequence[str]) -> SupervisorOptions:
    """The options of a command line without the program's name."""
    parser = argparse.ArgumentParser(prog="python -m pathways_runtime.worker", description=__doc__)
    parser.add_argument("--controller", required=True, help="address of the controller")
    parser.add_argument("--worker-id", type=int, required=True)
    parser.add_argument("--name", required=True, help="the host's name for people")
    parser.add_argument("--devices-per-host", type=int, required=True)
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--first-device", type=int, default=0, help="the first of this worker's devices on the machine")
    parser.add_argument("--companion", default="", help="what people call the job that lends this host to the run")
    parser.add_argument("--compile-cache", type=Path, required=True, help="folder of compiled programs")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder for sockets")
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--force-sockets", action="store_true", help="no shared memory between executors")
    parser.add_argument("--worker-xla-flags", help="the executor's XLA_FLAGS")
    parser.add_argument(
        "--controller-timeout-s", type=float, default=CONTROLLER_TIMEOUT_S, help="silence after which it is given up"
    )
    network.add_options(parser)
    network.add_encryption_option(parser)
    parser.add_argument("--events-fd", type=int)
    parser.add_argument("--lifeline-fd", type=int)
    return SupervisorOptions(**vars(parser.parse_args(argv)))


def executor_environment(inherited: Mapping[str, str], options: SupervisorOptions) -> dict[str, str]:
    """The executor's environment: what it inherits without the user's settings of JAX and XLA, and with ours of malloc.

    What only matters once jaxlib is loaded, the executor sets itself (``worker.environment``).

    Raises:
        DevicesMissing: there are fewer GPUs than this host needs.
    """
    environment = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(_DROPPED_PREFIXES) and name not in _DROPPED_NAMES
    }
    environment["JAX_PLATFORMS"] = options.platform
    environment.setdefault("GLIBC_TUNABLES", GLIBC_TUNABLES)
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    # A crash in native code then leaves a stack in the log.
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    if options.worker_xla_flags:
        environment["XLA_FLAGS"] = options.worker_xla_flags
    if options.platform == gpu.PLATFORM:
        environment |= gpu.executor_environment(
            inherited, options.first_device, options.devices_per_host, options.advertise
        )
    if options.platform == "cpu":
        environment |= private_sockets.preload(environment, options.run_dir)
    return environment


class Supervisor:
    """One executor at a time, at the controller's command.

    Args:
        executor_command: what is run as the executor, without its options.
    """

    def __init__(self, options: SupervisorOptions, executor_command: Sequence[str] = EXECUTOR_COMMAND) -> None:
        self._options = options
        self._network = network.Network.from_options(
            options.credentials, options.advertise, options.data_plane_encryption
        )
        self._executor_command = tuple(executor_command)
        self._events = EventWriter(options.events_fd)
        self._channel: AsyncChannel[AnyMessage] | None = None
        self._executor: Child | None = None
        self._executor_epoch = 0
        # The epoch whose executor should run; None after it was told to stop.
        self._wanted_epoch: int | None = None
        self._commands: asyncio.Queue[messages.StartExecutor] = asyncio.Queue()
        #: Set while this supervisor also stands between the controller and executors.
        self._relay: Relay | None = None
        self._starting_relay: asyncio.Task[None] | None = None
        self._ending: asyncio.Future[str] | None = None
        self._last_heard_s = 0.0
        self._is_run_over = self._is_asked = False
        #: Memory that outlives executors; the kernel frees it with this process.
        self._retained_fd = _retained_file()

    async def run(self) -> None:
        """Serve until there is a reason to end; the executor has ended then.

        Raises:
            ConnectFailed: the controller was not there in time.
        """
        loop = asyncio.get_running_loop()
        self._ending = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end_as_asked, f"got {number.name}")
        watch_lifeline_on_loop(self._options.lifeline_fd, lambda: self._end_as_asked("its parent is gone"))
        connecting = asyncio.ensure_future(self._connect())
        await asyncio.wait((connecting, self._ending), return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            connecting.cancel()
            await asyncio.wait((connecting,))
            logger.info("worker %d ends: %s", self._options.worker_id, self._ending.result())
            return
        self._channel = connecting.result()
        self._events.write("registered", worker=self._options.worker_id)
        serving = (asyncio.ensure_future(self._heartbeat()), asyncio.ensure_future(self._run_executors()))
        try:
            await asyncio.wait((self._ending, *serving), return_when=asyncio.FIRST_COMPLETED)
            if self._is_asked and self._options.companion:
                # Before the executor ends, whose loss would else be looked into.
                self._channel.send(messages.WorkerLeaves(f"{self._options.companion} {LEAVING}"))
        finally:
            # Also frees an executor that is running: its life ends in _run_executors.
            for task in serving:
                task.cancel()
            results = await asyncio.gather(*serving, return_exceptions=True)
            await self._stop_relay()
            self._channel.close()
        for result in results:
            if isinstance(result, Exception):
                raise result
        logger.info("worker %d ends: %s", self._options.worker_id, self._ending.result())
        self._events.write(
            "ended", reason=self._ending.result(), is_run_over=self._is_run_over, is_asked=self._is_asked
        )
        self._events.close()

    def _end(self, reason: str) -> None:
        assert self._ending is not None
        if not self._ending.done():
            self._ending.set_result(reason)

    def _end_as_asked(self, reason: str) -> None:
        """Whoever started it wants it to end."""
        self._is_asked = True
        self._end(reason)

    # The controller

    async def _connect(self) -> AsyncChannel[AnyMessage]:
        options = self._options
        codec: FrameCodec[AnyMessage] = FrameCodec(AnyMessage)
        try:
            channel = await streams.connect(
                options.controller,
                lambda: AsyncChannel(codec, self._received, self._disconnected),
                CONNECT_TIMEOUT_S,
                self._network,
            )
        except addresses.ConnectFailed as failure:
            raise addresses.ConnectFailed(
                f"worker {options.worker_id} ({options.name}) has no controller: {failure.strerror}"
            ) from failure
        channel.send(messages.Hello("supervisor", messages.PROTOCOL_VERSION, os.getpid()))
        worker = WorkerId(options.worker_id)
        channel.send(
            messages.RegisterWorker(worker, options.name, os.getpid(), options.devices_per_host, options.companion)
        )
        return channel

    def _received(self, channel: AsyncChannel[AnyMessage], frames: Sequence[Frame[AnyMessage]]) -> None:
        self._last_heard_s = time.monotonic()
        for frame in frames:
            message = frame.message
            if isinstance(message, messages.Heartbeat):
                continue
            if isinstance(message, messages.StartExecutor):
                # The controller starts another only when it has given the one before up.
                self._wanted_epoch = message.epoch
                self._commands.put_nowait(message)
                self._kill_unwanted()
            elif isinstance(message, messages.StopExecutor):
                if message.epoch == self._wanted_epoch:
                    self._wanted_epoch = None
                self._kill_unwanted()
            elif isinstance(message, messages.ToChildren):
                self._require_relay().pass_on(message.children, frame.payload)
            elif isinstance(message, messages.CloseChild):
                self._require_relay().close_child(message.child)
            elif isinstance(message, messages.StartRelay):
                if self._starting_relay is not None:
                    raise ValueError("told twice to be a relay")
                self._starting_relay = asyncio.ensure_future(self._start_relay())
            elif isinstance(message, messages.Shutdown):
                self._is_run_over = True
                self._end(f"the controller shuts down: {message.reason}")
            elif isinstance(message, messages.Refused):
                self._end(f"the controller refused it: {message.reason}")
            else:
                raise TypeError(f"a supervisor does not understand {type(message).__name__}")

    def _disconnected(self, channel: AsyncChannel[AnyMessage], failure: Exception | None) -> None:
        self._end(f"the controller is gone ({failure or 'closed the connection'})")

    # The relay

    async def _start_relay(self) -> None:
        assert self._channel is not None
        if self._network is None:
            path = self._options.run_dir / f"relay-{self._options.worker_id}.sock"
            address = str(addresses.UnixAddress(str(path.absolute())))
        else:
            address = self._network.any_port
        relay = Relay(address, self._channel.send, self._network)
        try:
            await relay.start()
        except (OSError, addresses.AddressError) as failure:
            # The controller then chooses another.
            self._end(f"it cannot be a relay: {failure}")
            return
        self._relay = relay
        logger.info("relay at %s", relay.address)
        self._channel.send(messages.RelayListening(relay.address))

    def _require_relay(self) -> Relay:
        if self._relay is None:
            raise ValueError("the controller sent something for executors to a supervisor that is no relay")
        return self._relay

    async def _stop_relay(self) -> None:
        if self._starting_relay is not None:
            self._starting_relay.cancel()
            await asyncio.gather(self._starting_relay, return_exceptions=True)
        if self._relay is not None:
            self._relay.close()

    async def _heartbeat(self) -> None:
        assert self._channel is not None
        timeout_s = self._options.controller_timeout_s
        self._last_heard_s = last_turn_s = time.monotonic()
        while True:
            self._channel.send(messages.Heartbeat(time.monotonic_ns()))
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            now_s = time.monotonic()
            late_s = now_s - last_turn_s - HEARTBEAT_INTERVAL_S
            if late_s > timeout_s / 2:
                # It was this process that did not run; what the controller said may lie unread.
                self._last_heard_s += late_s
            last_turn_s = now_s
            silence_s = now_s - self._last_heard_s
            if silence_s > timeout_s:
                self._end(f"the controller has been silent for {silence_s:.1f} s")

    # The executor

    async def _run_executors(self) -> None:
        while True:
            command = await self._commands.get()
            await self._run_executor(command.epoch, command.relay_address)

    async def _run_executor(self, epoch: int, relay_address: str) -> None:
        assert self._channel is not None
        options = self._options
        log_path = options.log_dir / f"executor-{options.worker_id}.log"
        if epoch != self._wanted_epoch:
            self._report_exit(epoch, -signal.SIGKILL, "stopped before it was started")
            return
        try:
            child = spawn(
                self._executor_argv(epoch, relay_address),
                name=f"executor {options.worker_id} (epoch {epoch})",
                env=executor_environment(os.environ, options),
                log_path=log_path,
                pass_fds=() if self._retained_fd is None else (self._retained_fd,),
            )
        except gpu.DevicesMissing as failure:
            logger.error("the executor of %s cannot be started: %s", options.name, failure)
            self._report_exit(epoch, 1, str(failure))
            return
        except OSError as failure:
            logger.exception("the executor of %s cannot be started", options.name)
            self._report_exit(epoch, 127, f"{self._executor_command[0]} cannot be started: {failure}")
            return
        self._executor, self._executor_epoch = child, epoch
        logger.info("executor of epoch %d started: pid %d", epoch, child.pid)
        self._events.write("executor_started", epoch=epoch, pid=child.pid)
        try:
            await child.ended()
        finally:
            self._executor = None
            # Ends at once when it has ended by itself; the rest is for the case that we are cancelled.
            returncode = await child.stop_on_loop(STOP_GRACE_S)
            for path in self._sockets(epoch):
                path.unlink(missing_ok=True)
            shutil.rmtree(private_sockets.folder_beside(self._data_address(epoch)), ignore_errors=True)
            self._remove_files_of_functions(child.pid)
            logger.info("executor of epoch %d ended: exit code %d", epoch, returncode)
            self._events.write("executor_exited", epoch=epoch, returncode=returncode)
            self._report_exit(epoch, returncode, log_tail(log_path, LOG_TAIL_LINES))

    def _remove_files_of_functions(self, executor_pid: int) -> None:
        for path in self._options.run_dir.glob(f"{files_prefix(executor_pid)}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _kill_unwanted(self) -> None:
        if self._executor is not None and self._executor_epoch != self._wanted_epoch:
            self._executor.signal(signal.SIGKILL)

    def _report_exit(self, epoch: int, returncode: int, text: str) -> None:
        assert self._channel is not None
        worker = WorkerId(self._options.worker_id)
        self._channel.send(messages.ExecutorExited(worker, epoch, returncode, text))

    def _data_socket(self, epoch: int) -> Path:
        return self._options.run_dir / f"data-{self._options.worker_id}-{epoch}.sock"

    def _data_address(self, epoch: int) -> str:
        return str(addresses.UnixAddress(str(self._data_socket(epoch).absolute())))

    def _sockets(self, epoch: int) -> list[Path]:
        """What an executor that was killed leaves behind."""
        of_worlds = self._options.run_dir.glob(f"world-*-{self._options.worker_id}-{epoch}.sock")
        return [self._data_socket(epoch), *of_worlds]

    def _executor_argv(self, epoch: int, relay_address: str) -> list[str]:
        options = self._options
        argv = [
            *self._executor_command,
            *("--controller", relay_address or options.controller),
            *("--worker-id", str(options.worker_id)),
            *("--name", options.name),
            *("--epoch", str(epoch)),
            *("--num-devices", str(options.devices_per_host)),
            *("--platform", options.platform),
            *("--compile-cache", str(options.compile_cache)),
            *("--data-listen", self._data_address(epoch)),
            *("--python-log", str(options.log_dir / f"python-{options.worker_id}.log")),
        ]
        if self._retained_fd is not None:
            argv += ["--retained-fd", str(self._retained_fd)]
        if relay_address:
            argv.append("--behind-relay")
        if options.force_sockets:
            argv.append("--force-sockets")
        if options.credentials is not None:
            argv += ["--credentials", str(options.credentials)]
            argv += ["--data-plane-encryption", options.data_plane_encryption]
        if options.advertise is not None:
            argv += ["--advertise", options.advertise]
        if options.worker_xla_flags:
            argv.append(f"--worker-xla-flags={options.worker_xla_flags}")
        return argv


def _retained_file() -> int | None:
    try:
        return descriptor.make()
    except OSError as failure:
        logger.warning("arrays in host memory are lost with their executor: there is no memory to share: %s", failure)
        return None


def main(argv: Sequence[str], executor_command: Sequence[str] = EXECUTOR_COMMAND) -> int:
    """Run a supervisor; the exit code of its process."""
    die_with_parent(signal.SIGTERM)
    options = parse_options(argv)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname)s worker-{options.worker_id} %(name)s: %(message)s"
    )
    try:
        asyncio.run(Supervisor(options, executor_command).run())
    except (addresses.ConnectFailed, addresses.AddressError, CredentialsError) as failure:
        logger.error("%s", failure)
        return 1
    return 0
