"""The controller process, spoken to by fake peers over real sockets."""

import os
import signal
import stat
import subprocess
import sys
import time

import msgspec
import psutil
import pytest

from pathways_runtime.core import operations as ops
from pathways_runtime.core.status import Code, Status
from pathways_runtime.transport import addresses, handshakes
from pathways_runtime.transport.credentials import Credentials
from pathways_runtime.transport.frames import ConnectionClosed
from pathways_runtime.transport.host_key import local_host_key
from pathways_runtime.transport.tunnel import Entrance
from pathways_runtime.wire import messages as msg

FOUR_SINGLES = (4, 1)
SHAPE = ("--num-slices", "1", "--hosts-per-slice", "1", "--devices-per-host", "2")


def raw(operation):
    return msgspec.Raw(msgspec.msgpack.encode(operation))


def launch(session, op_id, hosts=(0, 1, 2, 3), **fields):
    body = raw(ops.Launch(op_id, 1, (), (op_id,)))
    rest = {"reads": (), "writes": (op_id,), "consumes": (), "after_transfers": (), "is_transfer": False, **fields}
    return msg.Submit(session=session, op_id=op_id, is_launch=True, hosts=hosts, body=body, **rest)


def operations_of(batch):
    return [(o.seq, o.session, msgspec.msgpack.decode(o.body, type=ops.Operation)) for o in batch.operations]


def test_operations_reach_their_hosts_as_they_were_encoded(start_cluster):
    cluster = start_cluster(*FOUR_SINGLES)
    proxy, session = cluster.attach()
    proxy.send(
        msg.SubmitBatch((launch(session, 1), launch(session, 2, (1, 2)), launch(session, 3, (2,)), launch(session, 4)))
    )
    expected = {0: [1, 4], 1: [1, 2, 4], 2: [1, 2, 3, 4], 3: [1, 4]}
    for host, executor in enumerate(cluster.executors):
        batch = executor.next(msg.Batch)
        assert operations_of(batch) == [(n, session, ops.Launch(n, 1, (), (n,))) for n in expected[host]]
    assert proxy.next(msg.Dispatched) == msg.Dispatched(session, 4)


def test_launches_beyond_credit_follow_acknowledgements(start_cluster):
    cluster = start_cluster(*FOUR_SINGLES)
    proxy, session = cluster.attach()
    proxy.send(msg.SubmitBatch(tuple(launch(session, n) for n in range(1, 31))))
    for executor in cluster.executors:
        assert [seq for seq, _, _ in operations_of(executor.next(msg.Batch))] == list(range(1, 25))
    assert proxy.next(msg.Dispatched).count == 24
    for host, executor in enumerate(cluster.executors):
        executor.send(msg.Acknowledge(host, 6, ()))
    received = {host: [] for host in range(4)}
    for host, executor in enumerate(cluster.executors):
        while len(received[host]) < 6:
            received[host] += [seq for seq, _, _ in operations_of(executor.next(msg.Batch))]
    assert list(received.values()) == [list(range(25, 31))] * 4


def test_a_program_is_compiled_by_one_host_and_then_loaded_by_the_others(start_cluster):
    cluster = start_cluster(1, 3)
    proxy, session = cluster.attach()
    proxy.send(msg.CompileProgram(session, 9, b"vhlo", b"options", (5, 0, 3)))
    first = cluster.executors[0].next(msg.Compile)
    assert (first.wants_metadata, first.program, first.devices, first.world) == (True, b"vhlo", (5, 0, 3), 1)
    metadata = msg.ProgramMetadata("f", b"", None, None, (), (), (), (), (), (), {}, 0, {}, "")
    cluster.executors[0].send(msg.Compiled(0, session, 9, metadata, None, False, 0.1))
    for host in (1, 2):
        assert not cluster.executors[host].next(msg.Compile).wants_metadata
        cluster.executors[host].send(msg.Compiled(host, session, 9, None, None, True, 0.1))
    assert proxy.next(msg.ProgramCompiled) == msg.ProgramCompiled(session, 9, metadata, None)


def test_a_program_that_spans_slices_makes_their_world_come_into_being(start_cluster, tmp_path):
    cluster = start_cluster(2, 1)
    assert [world.coordinator_address for world in cluster.worlds.values()] == ["", ""]
    proxy, session = cluster.attach()
    proxy.send(msg.CompileProgram(session, 9, b"vhlo", b"", (0, 1, 2, 3)))
    for host, executor in enumerate(cluster.executors):
        form = executor.next(msg.FormWorld)
        assert (form.world, form.rank, form.hosts) == (3, host, (0, 1))
        assert form.coordinator_address == f"unix:{tmp_path}/world-3.sock"
        executor.send(msg.WorldFormed(host, 3, None))
    assert cluster.executors[0].next(msg.Compile).world == 3
    failure = Status(Code.INVALID_ARGUMENT, "no such op")
    cluster.executors[0].send(msg.Compiled(0, session, 9, None, failure, False, 0.1))
    compiled = proxy.next(msg.ProgramCompiled)
    assert compiled.failure == Status(Code.INVALID_ARGUMENT, "host 0: no such op")


@pytest.mark.parametrize("says", [True, False])
def test_a_lost_executor_is_a_lost_host_with_its_cause(start_cluster, says):
    cluster = start_cluster(*FOUR_SINGLES)
    proxy, session = cluster.attach()
    cluster.executors[2].close()
    if says:
        cluster.supervisors[2].send(msg.ExecutorExited(2, 1, -9, "last words"))
    state = proxy.next(msg.HostChanged).state
    assert (state.host, state.worker, state.name, state.failure.code) == (2, None, "node-2", Code.DATA_LOSS)
    assert state.failure.message.startswith("host 2 (node-2) was lost at 20")
    cause = "its executor was killed by signal 9 (SIGKILL)" if says else "its executor's connection is gone (closed)"
    assert f", and with it slice 2: {cause}" in state.failure.message
    announced = cluster.controller.wait_for("host_lost")
    assert (announced["host"], announced["log_tail"]) == (2, "last words" if says else "")
    # What the lost host has a part in becomes an error on the others, and the session is told.
    assert cluster.executors[0].next(msg.PeersLost) == msg.PeersLost(((2, state.failure),))
    proxy.send(launch(session, 1))
    ((_, _, poison),) = operations_of(cluster.executors[0].next(msg.Batch))
    assert poison == ops.Poison(1, (1,), state.failure)
    failed = proxy.next(msg.OperationFailed)
    assert failed == msg.OperationFailed(session, 1, (1,), state.failure)


def test_a_client_that_goes_takes_its_session_with_it(start_cluster):
    cluster = start_cluster(*FOUR_SINGLES)
    proxy, session = cluster.attach()
    other, other_session = cluster.attach()
    proxy.close()
    for executor in cluster.executors:
        assert executor.next(msg.CloseSession) == msg.CloseSession(session)
    other.send(msg.Detach(other_session))
    assert other.next(msg.SessionEnded) == msg.SessionEnded(other_session, None)


def test_a_client_may_come_before_the_hosts(start_controller):
    controller = start_controller(*SHAPE)
    proxy = controller.connect("proxy")
    proxy.send(msg.Attach("early", 1, "unix:/l"))
    supervisor, executor = controller.connect("supervisor"), controller.connect("executor")
    supervisor.send(msg.RegisterWorker(0, "node-0", 1, 2))
    supervisor.next(msg.StartExecutor)
    executor.send(msg.RegisterExecutor(0, 1, 2, "unix:/d", "m", "cpu", "version", "cpu kind", 2))
    executor.next(msg.Bind)
    world = executor.next(msg.FormWorld)
    executor.send(msg.WorldFormed(0, world.world, None))
    attached = proxy.next(msg.Attached)
    assert (attached.topology.num_devices, attached.platform_version, attached.device_kind) == (
        2,
        "version",
        "cpu kind",
    )
    assert attached.hosts == (msg.HostState(0, 0, "node-0"),)


@pytest.mark.parametrize(
    "role, version, message, complaint",
    [
        ("proxy", msg.PROTOCOL_VERSION + 1, None, "protocol version 4; ours is 3"),
        ("cook", msg.PROTOCOL_VERSION, None, "no such role: 'cook'"),
        ("executor", msg.PROTOCOL_VERSION, msg.Detach(1), "a executor must not send Detach"),
        ("proxy", msg.PROTOCOL_VERSION, msg.Detach(1), "this proxy has no session 1"),
        ("supervisor", msg.PROTOCOL_VERSION, msg.RegisterWorker(0, "n", 1, 8), "n has 8 devices"),
    ],
)
def test_peers_that_do_not_fit_are_told_why(start_controller, role, version, message, complaint):
    controller = start_controller(*SHAPE)
    peer = controller.connect(role, version)
    if message is not None:
        peer.send(message)
    assert complaint in peer.next(msg.Refused).reason
    assert peer.is_closed()


def test_silence_is_loss(start_cluster):
    cluster = start_cluster(2, 1, "--heartbeat-timeout-s", "1.5")
    proxy, _ = cluster.attach()
    deadline_s = time.monotonic() + 10
    while not proxy.received:
        assert time.monotonic() < deadline_s
        for peer in (*cluster.supervisors, cluster.executors[0]):
            peer.send(msg.Heartbeat(time.monotonic_ns()))
        proxy.sock.settimeout(0.1)
        try:
            proxy.received += [frame.message for frame in proxy.channel.receive()]
        except ConnectionClosed as failure:
            assert isinstance(failure.__cause__, TimeoutError)
    state = proxy.next(msg.HostChanged).state
    assert state.host == 1 and "its executor has been silent for" in state.failure.message
    assert cluster.supervisors[1].next(msg.StopExecutor).epoch == 1


def test_status_gathers_reports_and_names_who_did_not_answer(start_cluster):
    cluster = start_cluster(*FOUR_SINGLES)
    proxy, session = cluster.attach()
    proxy.send(launch(session, 1, after_transfers=()), launch(session, 2, (0,)))
    status = cluster.controller.connect("status")
    status.send(msg.StatusRequest(5))
    for host in range(3):
        executor = cluster.executors[host]
        while not isinstance(request := executor.next(msg.Batch, msg.StatusRequest), msg.StatusRequest):
            pass
        report = {"host": "a name", "arrays": 3, "bytes": 24, "bytes_moved": {"shared_memory": 10, "socket": 1}}
        executor.send(msg.StatusReply(request.request, {**report, "transfers": [{"what": "t"}], "waiting": []}))
    while not isinstance(request := proxy.next(msg.Dispatched, msg.StatusRequest), msg.StatusRequest):
        pass
    proxy.send(
        msg.StatusReply(request.request, {"sessions": [{"id": session, "arrays": 7, "bytes": 99}], "waiting": []})
    )
    reply = status.next(msg.StatusReply)
    report = reply.report
    assert (reply.request, report["schema_version"]) == (5, 1)
    assert report["did_not_answer"] == ["executor of host 3 (node-3)"]
    assert report["devices"][7] == {"id": 7, "slice_index": 3, "host": 3, "state": "running"}
    worker = report["workers"][1]
    assert (worker["host"], worker["slice_index"], worker["state"], worker["name"]) == (1, 1, "bound", "node-1")
    assert (worker["supervisor_pid"], worker["executor_pid"], worker["arrays"]) == (5001, 6001, 3)
    assert report["bytes_moved"] == {"host_buffers": 0, "shared_memory": 30, "socket": 3}
    assert [transfer["host"] for transfer in report["transfers"]] == [0, 1, 2]
    (entry,) = report["sessions"]
    assert (entry["id"], entry["arrays"], entry["bytes"], entry["client_name"]) == (session, 7, 99, "train.py")
    assert report["queues"][0] == {"host": 0, "launches_in_flight": 2}


@pytest.mark.parametrize("how", ["lifeline", "SIGTERM"])
def test_the_end_tells_everybody_and_leaves_nothing(start_cluster, how, tmp_path):
    cluster = start_cluster(2, 2)
    proxy, _ = cluster.attach()
    services = cluster.controller.descendants()
    assert len(services) == 2
    sockets = [tmp_path / f"world-{world}.sock" for world in (1, 2)]
    assert [stat.S_IMODE(path.stat().st_mode) for path in sockets] == [0o600, 0o600]
    if how == "SIGTERM":
        cluster.controller.process.send_signal(signal.SIGTERM)
    else:
        os.close(cluster.controller.lifeline)
        cluster.controller.lifeline = -1
    for peer in (proxy, *cluster.supervisors, *cluster.executors):
        assert peer.next(msg.Shutdown).reason == ("the launcher is gone" if how == "lifeline" else "signal SIGTERM")
        peer.close()
    assert cluster.controller.process.wait(10) == 0
    assert not any(service.is_running() for service in services)
    assert list(tmp_path.iterdir()) == []


def test_services_listen_at_unix_sockets_only(start_cluster):
    cluster = start_cluster(2, 2)
    for process in (psutil.Process(cluster.controller.process.pid), *cluster.controller.descendants()):
        assert process.net_connections("inet") == []


def test_members_of_other_hosts_reach_a_service_through_a_tunnel(start_cluster, tmp_path):
    credentials = Credentials.create(tmp_path / "credentials")
    cluster = start_cluster(1, 2, "--credentials", str(tmp_path / "credentials"), "--advertise", "127.0.0.1")
    form = cluster.worlds[1]
    tcp, _, unix = form.coordinator_address.partition(",")
    assert unix == f"unix:{tmp_path}/world-1.sock"
    assert form.coordinator_host_key == local_host_key()
    [service] = cluster.controller.descendants()
    [listener] = service.net_connections("inet")
    assert tcp == f"tcp:127.0.0.1:{listener.laddr.port}"
    # What comes out is what the service says at its socket: the beginning of HTTP/2.
    entrance = Entrance(f"unix:{tmp_path}/entrance", tcp, handshakes.tls_connecting(credentials))
    beginnings = []
    for address in (unix, entrance.address):
        with addresses.connect_unix(address, 15.0) as member:
            member.settimeout(15.0)
            beginnings.append(member.recv(9))
    entrance.close()
    # A frame of SETTINGS, of any length.
    assert [beginning[3:] for beginning in beginnings] == [b"\x04" + bytes(5)] * 2
    with pytest.raises(addresses.ConnectFailed):
        addresses.connect(tcp, 15.0, handshake=handshakes.tls_connecting(Credentials.make()))


def test_a_controller_without_a_unix_socket_says_what_is_missing():
    argv = [sys.executable, "-m", "pathways_runtime.controller", "--listen", "tcp:127.0.0.1:0", *SHAPE]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr == (
        "the controller cannot start: tcp:127.0.0.1:0: a controller must listen at a Unix socket too (unix:/path), "
        "beside which coordination services listen\n"
    )


def test_services_notice_that_the_controller_was_killed(start_cluster):
    cluster = start_cluster(2, 2)
    services = cluster.controller.descendants()
    assert len(services) == 2
    cluster.controller.process.kill()
    _, alive = psutil.wait_procs(services, timeout=10)
    assert alive == []


def test_a_service_that_ends_is_announced_and_its_end_is_reaped(start_cluster, tmp_path):
    cluster = start_cluster(2, 2)
    victim, other = cluster.controller.descendants()
    victim.kill()
    announced = cluster.controller.wait_for("coordination_lost")
    assert announced["world"] in (1, 2) and announced["reason"] == "its process ended with -9"
    assert not psutil.pid_exists(victim.pid) and other.is_running()
    assert [path.name for path in tmp_path.glob("world-*")] == [f"world-{3 - announced['world']}.sock"]
    # The worlds were formed; sessions go on.
    proxy, session = cluster.attach()
    proxy.send(launch(session, 1))
    assert proxy.next(msg.Dispatched).count == 1
