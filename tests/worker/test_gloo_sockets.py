"""Sockets of a process as gloo would have them: who has accepted what, and what ends."""

import socket
import threading

import pytest

from pathways_runtime.worker.descriptors import stream_sockets
from pathways_runtime.worker.gloo_sockets import Listener


@pytest.fixture
def listening():
    """Listens as gloo does, noted by a Listener; the two are given."""
    noted = Listener()
    with noted.note():
        server = socket.create_server(("127.0.0.1", 0))
    yield noted, server
    server.close()


def test_what_was_accepted_ends_and_the_listener_goes_on(listening):
    noted, server = listening
    with socket.create_connection(server.getsockname()) as member:
        accepted, _ = server.accept()
        assert noted.cut() == 1
        # Both sides see it: who waits here for the member, and the member itself.
        assert accepted.recv(1) == b"" and member.recv(1) == b""
        accepted.close()
    with socket.create_connection(server.getsockname()) as again:
        accepted, _ = server.accept()
        accepted.sendall(b"x")
        assert again.recv(1) == b"x"
        accepted.close()


def test_a_thread_that_waits_for_a_member_is_freed(listening):
    noted, server = listening
    received = []
    with socket.create_connection(server.getsockname()):
        accepted, _ = server.accept()
        waits = threading.Thread(target=lambda: received.append(accepted.recv(1)))
        waits.start()
        noted.cut()
        waits.join(10)
        assert received == [b""]
        accepted.close()


def test_other_worlds_and_other_connections_stay(listening):
    noted, _ = listening
    other = Listener()
    with other.note():
        server = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(server.getsockname()) as member:
        accepted, _ = server.accept()
        assert noted.cut() == 0
        accepted.sendall(b"x")
        assert member.recv(1) == b"x"
        assert other.cut() == 1
        accepted.close()
    server.close()


def test_a_world_of_one_has_no_listener_and_nothing_to_cut():
    noted = Listener()
    with noted.note():
        pass
    assert noted.cut() == 0


def test_stream_sockets_are_those_of_the_process_and_stay_open():
    mine, other = socket.socketpair()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with mine, other, datagrams:
        seen = [(sock.family, sock.type) for sock in stream_sockets()]
        assert seen.count((socket.AF_UNIX, socket.SOCK_STREAM)) >= 2
        assert all(kind == socket.SOCK_STREAM for _, kind in seen)
        mine.sendall(b"x")
        assert other.recv(1) == b"x"
