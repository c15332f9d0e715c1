"""A controller process of its own, and peers that speak to it over real sockets."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from pathways_runtime.core import operations as ops
from pathways_runtime.transport import addresses
from pathways_runtime.transport.frames import Channel, ConnectionClosed, FrameCodec
from pathways_runtime.wire import messages as msg

DEADLINE_S = 15.0

#: Answers to heartbeats, and what executors are told of one another.
AT_ANY_TIME = (msg.Heartbeat, msg.PeersLost, msg.PeerReplaced, msg.LeaveWorld)


class Peer:
    """One connection to the controller, on blocking sockets with a deadline."""

    def __init__(self, address: str, role: str, version: int = msg.PROTOCOL_VERSION) -> None:
        self.role = role
        self.sock = addresses.connect(address, DEADLINE_S)
        self.sock.settimeout(DEADLINE_S)
        self.channel = Channel(self.sock, FrameCodec(msg.AnyMessage))
        self.received: list[msg.AnyMessage] = []
        self.send(msg.Hello(role, version, os.getpid()))

    def send(self, *messages: msg.AnyMessage) -> None:
        for message in messages:
            self.channel.send(message)

    def next(self, *kinds: type) -> msg.AnyMessage:
        """The next message, which must be of one of these kinds; what is said at any time is passed over."""
        while True:
            if not self.received:
                self.received += [frame.message for frame in self.channel.receive()]
            message = self.received.pop(0)
            if isinstance(message, kinds) or not isinstance(message, AT_ANY_TIME):
                break
        assert isinstance(message, kinds), f"the {self.role} got {message}, not {kinds}"
        return message

    def is_closed(self) -> bool:
        """Whether the controller closes this connection, after anything that it may still say."""
        try:
            while True:
                self.channel.receive()
        except ConnectionClosed:
            return True

    def close(self) -> None:
        self.channel.close()


class ControllerProcess:
    """The process, its announcements, and peers."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.address = f"unix:{folder}/c"
        lifeline_read, self.lifeline = os.pipe()
        self.events, events_write = os.pipe()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "pathways_runtime.controller", "--listen", self.address),
                *("--events-fd", str(events_write), "--lifeline-fd", str(lifeline_read), *options),
            ],
            pass_fds=(lifeline_read, events_write),
        )
        os.close(lifeline_read)
        os.close(events_write)
        self.unread = b""
        self.peers: list[Peer] = []
        self.wait_for("listening")

    def wait_for(self, event: str) -> dict:
        """The next announcement of this kind; others before it are skipped."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            while b"\n" in self.unread:
                line, _, self.unread = self.unread.partition(b"\n")
                announced = json.loads(line)
                if announced["event"] == event:
                    return announced
            ready, _, _ = select.select([self.events], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"the controller did not announce {event!r} within {DEADLINE_S} s"
            received = os.read(self.events, 65536)
            assert received, f"the controller ended before it announced {event!r}"
            self.unread += received

    def connect(self, role: str, version: int = msg.PROTOCOL_VERSION, address: str | None = None) -> Peer:
        """Connect to the controller, or to a relay at ``address``."""
        peer = Peer(address or self.address, role, version)
        self.peers.append(peer)
        return peer

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> int:
        """Let go of the lifeline; the exit code."""
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        if self.process.poll() is None:
            try:
                self.end()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
        elif self.lifeline >= 0:
            os.close(self.lifeline)
        os.close(self.events)


class Cluster:
    """A controller with fake workers that do at once what they are told, until it is ready."""

    def __init__(self, controller: ControllerProcess, num_hosts: int, devices_per_host: int) -> None:
        self.controller = controller
        self.supervisors = []
        self.executors = []
        for host in range(num_hosts):
            supervisor = controller.connect("supervisor")
            supervisor.send(msg.RegisterWorker(host, f"node-{host}", 5000 + host, devices_per_host))
            assert supervisor.next(msg.StartExecutor).epoch == 1
            self.supervisors.append(supervisor)
        for host in range(num_hosts):
            executor = controller.connect("executor")
            executor.send(
                msg.RegisterExecutor(host, 1, 6000 + host, f"unix:/d{host}", "m", "cpu", "v", "cpu", devices_per_host)
            )
            self.executors.append(executor)
        self.worlds = {}
        for host, executor in enumerate(self.executors):
            bind = executor.next(msg.Bind)
            assert bind.host == host and [peer.name for peer in bind.peers] == [f"node-{h}" for h in range(num_hosts)]
            world = executor.next(msg.FormWorld)
            self.worlds[world.world] = world
            executor.send(msg.WorldFormed(host, world.world, None))
        controller.wait_for("ready")

    def attach(self, name: str = "train.py") -> tuple[Peer, int]:
        proxy = self.controller.connect("proxy")
        proxy.send(msg.Attach(name, 77, "unix:/links"))
        session = proxy.next(msg.Attached).session
        for executor in self.executors:
            assert executor.next(msg.OpenSession) == msg.OpenSession(session, "unix:/links", 0)
        return proxy, session


def encode(operation: ops.Operation) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(operation))


@pytest.fixture
def start_controller(tmp_path: Path) -> Iterator:
    started = []

    def start(*options: str) -> ControllerProcess:
        controller = ControllerProcess(tmp_path, *options)
        started.append(controller)
        return controller

    yield start
    for controller in started:
        controller.close()


@pytest.fixture
def start_cluster(start_controller) -> Iterator:
    def start(num_slices: int, hosts_per_slice: int, *options: str) -> Cluster:
        shape = ("--num-slices", str(num_slices), "--hosts-per-slice", str(hosts_per_slice), "--devices-per-host", "2")
        return Cluster(start_controller(*shape, *options), num_slices * hosts_per_slice, 2)

    return start
