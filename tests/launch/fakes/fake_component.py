"""Stands in for the runtime's processes: accepts their command lines, says what they say, ends when its launcher ends.

What it does beyond that, it is told by FAKE_<NAME>, NAME being the component's (CONTROLLER, WORKER_0, PROXY_0):
``exit:CODE`` ends at once with words on stderr, ``failed:REASON`` says that the start has failed, and ends, ``mute``
never becomes ready, ``deaf`` outlives its lifeline.
"""

import argparse
import os
import signal
import socket
import sys
import time

from pathways_runtime.transport.lifeline import EventWriter


def play(role: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument("--events-fd", type=int, required=True)
    parser.add_argument("--listen")
    parser.add_argument("--worker-id", type=int)
    arguments, rest = parser.parse_known_args()
    options = dict(zip(rest[::2], rest[1::2], strict=False))
    number = arguments.worker_id
    if role == "proxy":
        number = int(arguments.listen.removesuffix(".sock").rpartition("-")[2])
    name = role if number is None else f"{role}_{number}"
    behaviour = os.environ.get(f"FAKE_{name.upper()}", "")
    print(f"{name} begins", flush=True)
    if behaviour.startswith("exit:"):
        print(f"{name} cannot go on: the reason is written here", file=sys.stderr, flush=True)
        sys.exit(int(behaviour.removeprefix("exit:")))
    events = EventWriter(arguments.events_fd)
    if behaviour.startswith("failed:"):
        events.write("failed", reason=behaviour.removeprefix("failed:"))
        sys.exit(1)
    if behaviour != "mute":
        if arguments.listen is not None:
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(arguments.listen.removeprefix("unix:"))
            sock.listen()
            events.write("listening")
        if role == "worker":
            events.write("registered", worker=number)
        if role == "controller":
            num_hosts = int(options["--num-slices"]) * int(options["--hosts-per-slice"])
            for host in range(num_hosts):
                events.write("host_ready", worker=host, name=f"host-{host}")
            events.write("ready")
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    while os.read(arguments.lifeline_fd, 64):
        pass
