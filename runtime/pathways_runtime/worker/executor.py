"""The executor process: ``python -m pathways_runtime.worker.executor``. Started by the supervisor."""

import argparse
import contextlib
import gc
import logging
import os
import sys
import threading
from pathlib import Path

from pathways_runtime.core.ids import WorkerId
from pathways_runtime.transport import addresses, network
from pathways_runtime.transport.addresses import AddressError, UnixAddress
from pathways_runtime.transport.credentials import CredentialsError
from pathways_runtime.transport.host_key import local_host_key
from pathways_runtime.transport.lifeline import die_with_parent, watch_lifeline
from pathways_runtime.worker import environment

logger = logging.getLogger(__name__)

#: ``<seed>:<longest>``: delay every launch by a random time up to so many seconds. For tests of the order.
LAUNCH_DELAY_VARIABLE = "SLURM_PATHWAYS_TEST_LAUNCH_DELAY_S"

_CONNECT_TIMEOUT_S = 10.0
#: How long closing in good order may take before the process ends without it.
_CLOSE_TIMEOUT_S = 2.0


#: How long a thread that comes back from PJRT may wait for the interpreter while another one runs. Python's default,
#: 5 ms, is longer than most programs.
_SWITCH_INTERVAL_S = 0.0002


def main(arguments: list[str] | None = None) -> None:
    """Run until the controller or the lifeline ends it. Never returns: threads may be inside collectives for good."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.INFO,
        format=f"%(asctime)s %(levelname)s {options.name} executor: %(message)s",
    )
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    watch_lifeline(options.lifeline_fd, lambda: _end(0, "whoever started this process is gone"))
    # A process that is stopped, or stuck in a call that keeps the interpreter, cannot watch.
    die_with_parent()
    environment.prepare(options.num_devices, options.worker_xla_flags)
    # jaxlib reads the environment when it is loaded, so what imports it comes only now.
    from pathways_runtime.worker.control import Executor, ExecutorConfig, Stopped
    from pathways_runtime.worker.dispatch import LaunchDelay

    seed, colon, longest_s = os.environ.get(LAUNCH_DELAY_VARIABLE, "").partition(":")
    try:
        connections = network.Network.from_options(
            options.credentials, options.advertise, options.data_plane_encryption
        )
    except CredentialsError as failure:
        _end(1, str(failure))
        return
    config = ExecutorConfig(
        worker=WorkerId(options.worker_id),
        name=options.name,
        epoch=options.epoch,
        num_devices=options.num_devices,
        platform=options.platform,
        compile_cache=options.compile_cache,
        data_address=_data_address(options.data_listen, options.worker_id, options.epoch),
        host_key=local_host_key(),
        network=connections,
        force_sockets=options.force_sockets,
        is_behind_relay=options.behind_relay,
        python_log=options.python_log,
        retained_fd=options.retained_fd,
        delay=LaunchDelay(int(seed), float(longest_s)) if colon else None,
    )
    try:
        handshake = None if connections is None else connections.connecting()
        sock = addresses.connect(options.controller, _CONNECT_TIMEOUT_S, handshake=handshake)
        executor = Executor(config, sock)
    except (OSError, AddressError) as failure:
        _end(1, str(failure))
        return
    # What is there now lives as long as the process; collections need not look at it again.
    gc.collect()
    gc.freeze()
    threading.excepthook = _end_with
    code, reason = 1, "the executor failed"
    try:
        executor.run()
    except Stopped as stopped:
        code, reason = 0, str(stopped)
    except BaseException:
        # Its state is not known any more. The supervisor starts another one.
        logger.exception("the executor failed")
    closing = threading.Thread(target=executor.close, name="close", daemon=True)
    closing.start()
    closing.join(_CLOSE_TIMEOUT_S)
    _end(code, reason)


def _end_with(failed: threading.ExceptHookArgs) -> None:
    """A thread failed unforeseen: the state is not known any more. The supervisor starts another executor."""
    name = "?" if failed.thread is None else failed.thread.name
    logger.critical("thread %r failed", name, exc_info=failed.exc_value)
    _end(1, f"thread {name!r} failed")


def _end(code: int, reason: str) -> None:
    """End at once, whatever threads are doing."""
    logger.info("ends: %s", reason)
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pathways_runtime.worker.executor", description=__doc__)
    parser.add_argument("--controller", required=True, metavar="ADDRESS", help="where the controller listens")
    parser.add_argument("--worker-id", required=True, type=int)
    parser.add_argument("--name", required=True, help="the host's name for people")
    parser.add_argument("--epoch", required=True, type=int, help="which start of this worker's executor this is")
    parser.add_argument("--num-devices", required=True, type=int)
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--compile-cache", required=True, type=Path, metavar="DIR")
    parser.add_argument(
        "--data-listen", required=True, metavar="DIR|ADDRESS", help="where other executors reach the data plane"
    )
    parser.add_argument("--lifeline-fd", type=int)
    parser.add_argument(
        "--behind-relay", action="store_true", help="the controller's address is a relay's, which tells of readiness"
    )
    parser.add_argument("--python-log", type=Path, metavar="FILE", help="where functions of colocated Python print to")
    parser.add_argument("--retained-fd", type=int, help="the supervisor's file for arrays that outlive this process")
    parser.add_argument("--force-sockets", action="store_true", help="never use shared memory between executors")
    network.add_options(parser)
    network.add_encryption_option(parser)
    parser.add_argument("--worker-xla-flags", metavar="FLAGS", help="XLA_FLAGS of this process")
    parser.add_argument("-v", "--verbose", action="store_true")
    return parser


def _data_address(listen: str, worker: int, epoch: int) -> str:
    return (
        listen
        if listen.startswith("unix:")
        else str(UnixAddress(f"{Path(listen).absolute()}/data-{worker}-{epoch}.sock"))
    )


if __name__ == "__main__":
    main()
