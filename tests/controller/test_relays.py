"""Relays as they are: a controller process, supervisor processes, and fake executors that connect to relays."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pathways_runtime.core import operations as ops
from pathways_runtime.core.status import Code, Status
from pathways_runtime.transport.lifeline import Child, spawn
from pathways_runtime.wire import messages as msg
from tests.waiting import until

DEADLINE_S = 15.0

#: A supervisor whose executors only note where they were told to connect; the test plays them.
SUPERVISOR = """
import sys
from pathways_runtime.worker.supervisor import main
sys.exit(main(sys.argv[3:], (sys.executable, "-c", sys.argv[1], sys.argv[2])))
"""
EXECUTOR = """
import os, sys, threading
from pathlib import Path
from pathways_runtime.transport.lifeline import watch_lifeline
argv = sys.argv[2:]
value = lambda name: argv[argv.index(name) + 1]
watch_lifeline(int(value("--lifeline-fd")), lambda: os._exit(0))
notes = Path(sys.argv[1]) / ("executor-" + value("--worker-id"))
notes.with_suffix(".new").write_text(value("--controller") + (" relayed" if "--behind-relay" in argv else ""))
notes.with_suffix(".new").rename(notes)
threading.Event().wait()
"""


class RelayedCluster:
    """One slice of four hosts, two behind each of two relays."""

    num_hosts = 4

    def __init__(self, folder: Path, controller) -> None:
        self.folder = folder
        self.controller = controller
        self.supervisors: list[Child] = []
        for worker in range(self.num_hosts):
            argv = [sys.executable, "-c", SUPERVISOR, EXECUTOR, str(folder)]
            argv += ["--controller", controller.address, "--worker-id", str(worker), "--name", f"node-{worker}"]
            argv += ["--devices-per-host", "2", "--compile-cache", str(folder), "--run-dir", str(folder)]
            argv += ["--log-dir", str(folder)]
            log = folder / f"worker-{worker}.log"
            self.supervisors.append(spawn(argv, name=f"worker {worker}", env=dict(os.environ), log_path=log))
        self.relay_of = [self.wait_for_relay(worker) for worker in range(self.num_hosts)]
        assert [self.relay_of[0] in (0, 1), self.relay_of[2] in (2, 3)] == [True, True]
        assert (self.relay_of[0], self.relay_of[2]) == (self.relay_of[1], self.relay_of[3])
        self.executors = [self.connect(worker) for worker in range(self.num_hosts)]
        #: By host: the hosts that its executor was told to be lost.
        self.losses_told: dict[int, set[int]] = {}
        for host, executor in enumerate(self.executors):
            bind = executor.next(msg.Bind)
            assert bind.host == host and len(bind.peers) == self.num_hosts
            world = executor.next(msg.FormWorld)
            executor.send(msg.WorldFormed(host, world.world, None))
        controller.wait_for("ready")

    def wait_for_relay(self, worker: int) -> int:
        """Whose relay a worker's executor was told to connect to."""
        notes = self.folder / f"executor-{worker}"
        until(notes.exists, f"the executor of worker {worker} was not started", DEADLINE_S)
        address, _, relayed = notes.read_text().partition(" ")
        assert relayed == "relayed" and address.startswith(f"unix:{self.folder}/relay-")
        return int(address.removesuffix(".sock").rpartition("-")[2])

    def connect(self, worker: int):
        address = f"unix:{self.folder}/relay-{self.relay_of[worker]}.sock"
        executor = self.controller.connect("executor", address=address)
        platform = ("m", "cpu", "v", "cpu", 2)
        executor.send(msg.RegisterExecutor(worker, 1, 6000 + worker, f"unix:/d{worker}", *platform))
        return executor

    def attach(self):
        proxy = self.controller.connect("proxy")
        proxy.send(msg.Attach("train.py", 77, "unix:/links"))
        session = proxy.next(msg.Attached).session
        for executor in self.executors:
            assert executor.next(msg.OpenSession) == msg.OpenSession(session, "unix:/links", 0)
        return proxy, session

    def operations_of(self, host: int, count: int) -> list[tuple[int, ops.Operation]]:
        """The next operations of a host, in the order of its stream; what it is told of losses before them, too."""
        received: list[tuple[int, ops.Operation]] = []
        while len(received) < count:
            message = self.executors[host].next(msg.Batch, msg.PeersLost, msg.LeaveWorld)
            if isinstance(message, msg.PeersLost):
                self.losses_told.setdefault(host, set()).update(lost for lost, _ in message.lost)
            elif isinstance(message, msg.Batch):
                received += [(o.seq, msgspec.msgpack.decode(o.body, type=ops.Operation)) for o in message.operations]
        assert len(received) == count
        assert [seq for seq, _ in received] == sorted({seq for seq, _ in received})
        return received

    def kill_supervisor(self, worker: int) -> None:
        os.kill(self.supervisors[worker].pid, signal.SIGKILL)

    def close(self) -> None:
        for supervisor in self.supervisors:
            supervisor.release_lifeline()
            supervisor.reap()


@pytest.fixture
def cluster(tmp_path: Path, start_controller) -> Iterator[RelayedCluster]:
    shape = ("--num-slices", "1", "--hosts-per-slice", "4", "--devices-per-host", "2", "--relay-fanout", "2")
    made = RelayedCluster(tmp_path, start_controller(*shape))
    yield made
    made.close()


def launch(session, op_id, hosts=(0, 1, 2, 3)):
    body = msgspec.Raw(msgspec.msgpack.encode(ops.Launch(op_id, 1, (), (op_id,))))
    return msg.Submit(session, op_id, True, hosts, (), (op_id,), (), (), False, body)


def test_operations_reach_hosts_behind_relays_in_one_order(cluster):
    proxy, session = cluster.attach()
    groups = [(0, 1, 2, 3), (1, 2), (0,), (1, 2), (2, 3), (0, 1, 2, 3)]
    proxy.send(msg.SubmitBatch(tuple(launch(session, n, hosts) for n, hosts in enumerate(groups, 1))))
    for host in range(4):
        expected = [n for n, hosts in enumerate(groups, 1) if host in hosts]
        received = cluster.operations_of(host, len(expected))
        assert received == [(n, ops.Launch(n, 1, (), (n,))) for n in expected]
    assert proxy.next(msg.Dispatched) == msg.Dispatched(session, len(groups))


def test_launches_beyond_credit_follow_what_relays_say(cluster):
    proxy, session = cluster.attach()
    proxy.send(msg.SubmitBatch(tuple(launch(session, n) for n in range(1, 31))))
    for host, executor in enumerate(cluster.executors):
        assert [seq for seq, _ in cluster.operations_of(host, 24)] == list(range(1, 25))
        if host != 3:
            executor.send(msg.Acknowledge(host, 6, ()))
    assert proxy.next(msg.Dispatched).count == 24
    # The last host lets two out, then the other four.
    cluster.executors[3].send(msg.Acknowledge(3, 2, ()))
    for host in range(4):
        assert [seq for seq, _ in cluster.operations_of(host, 2)] == [25, 26]
    cluster.executors[3].send(msg.Acknowledge(3, 4, ()))
    for host in range(4):
        assert [seq for seq, _ in cluster.operations_of(host, 4)] == [27, 28, 29, 30]


def test_readiness_and_failures_reach_the_proxy(cluster):
    proxy, session = cluster.attach()
    for executor in cluster.executors:
        executor.send(msg.ReadyHere(session, 9))
    ready: list[int] = []
    while len(ready) < 4:
        told = proxy.next(msg.ReadyOnHosts)
        assert (told.session, told.wait_id) == (session, 9)
        ready += told.hosts
    assert sorted(ready) == [0, 1, 2, 3]
    failed = msg.OperationFailed(session, 1, (1,), Status(Code.INTERNAL, "no luck"))
    cluster.executors[3].send(failed)
    assert proxy.next(msg.OperationFailed) == failed


def test_a_program_reaches_all_executors_behind_relays(cluster):
    proxy, session = cluster.attach()
    proxy.send(msg.CompileProgram(session, 9, b"vhlo", b"", tuple(range(8))))
    assert cluster.executors[0].next(msg.Compile).wants_metadata
    metadata = msg.ProgramMetadata("f", b"", None, None, (), (), (), (), (), (), {}, 0, {}, "")
    cluster.executors[0].send(msg.Compiled(0, session, 9, metadata, None, False, 0.1))
    for host in (1, 2, 3):
        assert cluster.executors[host].next(msg.Compile).program == b"vhlo"
        cluster.executors[host].send(msg.Compiled(host, session, 9, None, None, True, 0.1))
    assert proxy.next(msg.ProgramCompiled) == msg.ProgramCompiled(session, 9, metadata, None)


def test_a_lost_relay_is_the_cause_of_the_loss_of_the_executors_behind_it(cluster):
    proxy, session = cluster.attach()
    proxy.send(msg.SubmitBatch((launch(session, 1),)))
    relay = cluster.relay_of[0]
    cluster.kill_supervisor(relay)
    changed = {}
    for _ in range(2):
        state = proxy.next(msg.HostChanged, msg.Dispatched)
        if isinstance(state, msg.Dispatched):
            state = proxy.next(msg.HostChanged)
        changed[state.state.host] = state.state.failure
    assert set(changed) == {0, 1}
    assert all(failure.code is Code.DATA_LOSS for failure in changed.values())
    assert f"host {relay} (node-{relay}) was lost at" in changed[relay].message
    assert f"its relay, the supervisor of host {relay} (node-{relay}), is gone" in changed[1 - relay].message
    for host in (0, 1):
        assert cluster.executors[host].is_closed()
    # The others go on, without what needs the lost ones.
    proxy.send(msg.SubmitBatch((launch(session, 2), launch(session, 3, (2, 3)))))
    for host in (2, 3):
        received = [operation for _, operation in cluster.operations_of(host, 3)]
        assert received[0] == ops.Launch(1, 1, (), (1,))
        assert received[1] == ops.Poison(2, (2,), changed[relay])
        assert received[2] == ops.Launch(3, 1, (), (3,))
        assert cluster.losses_told[host] == {0, 1}


@pytest.mark.parametrize("speaks_nonsense", [False, True])
def test_a_lost_executor_behind_a_relay_is_lost_alone(cluster, speaks_nonsense):
    proxy, session = cluster.attach()
    gone = 1 - cluster.relay_of[0]
    if speaks_nonsense:
        cluster.executors[gone].sock.sendall(b"\x05\0\0\0" + b"\0" * 8 + b"hello")
    else:
        cluster.executors[gone].close()
    state = proxy.next(msg.HostChanged).state
    assert (state.host, state.failure.code) == (gone, Code.DATA_LOSS)
    assert "its executor's connection is gone" in state.failure.message
    rest = tuple(host for host in range(4) if host != gone)
    proxy.send(msg.SubmitBatch((launch(session, 1, rest),)))
    for host in rest:
        assert cluster.operations_of(host, 1) == [(1, ops.Launch(1, 1, (), (1,)))]
        cluster.executors[host].send(msg.Acknowledge(host, 1, ()))
        assert cluster.losses_told[host] == {gone}
    assert proxy.next(msg.Dispatched) == msg.Dispatched(session, 1)


def test_everybody_is_told_to_end(cluster):
    assert cluster.controller.end() == 0
    for executor in cluster.executors:
        assert executor.is_closed()
    for supervisor in cluster.supervisors:
        assert supervisor.has_ended(DEADLINE_S), f"{supervisor.name} goes on"
    assert list(cluster.folder.glob("relay-*.sock")) == []
