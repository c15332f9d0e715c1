"""How two processes of a job make sure of each other before a connection between hosts is used.

A handshake is a generator: it yields what it waits for (``select.POLLIN`` or ``POLLOUT``) and returns the connection,
so that one thread can carry on many (``door``) and a connecting thread its own (``complete``). It raises OSError when
the peer is not of the job or does not speak the protocol, and owns the socket: it closes it unless it returns a
connection.

Both kinds end with a greeting by the side that accepts. In TLS 1.3 the side that connects is done before its
certificate has been looked at; with the greeting, *connected* means that both sides have accepted each other.
"""

import contextlib
import hmac
import os
import secrets
import select
import socket
import ssl
import time
from collections.abc import Callable, Generator

from pathways_runtime.transport.credentials import Credentials
from pathways_runtime.transport.tls_socket import Connection, TlsSocket

Handshake = Generator[int, None, Connection]
#: Makes the handshake of an accepted or connected, non-blocking socket.
HandshakeFactory = Callable[[socket.socket], Handshake]

#: A handshake takes two round trips and a millisecond of computing; on a host that is starved of processors, seconds.
HANDSHAKE_TIMEOUT_S = 10.0

_GREETING = b"+"
_PLAIN_MAGIC = b"SPWplain"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_ANSWER_INTERVAL_S = 0.1


class NotOfThisJob(ConnectionError):
    """The peer could not show the job's credentials, or found that we could not."""


def tls_accepting(credentials: Credentials) -> HandshakeFactory:
    """Handshakes by TLS for the side that accepts."""
    context = credentials.server_context()
    return lambda sock: _tls(sock, context, is_accepting=True)


def tls_connecting(credentials: Credentials) -> HandshakeFactory:
    """Handshakes by TLS for the side that connects."""
    context = credentials.client_context()
    return lambda sock: _tls(sock, context, is_accepting=False)


def _tls(sock: socket.socket, context: ssl.SSLContext, is_accepting: bool) -> Handshake:
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(sock.close)
        tls = context.wrap_socket(sock, server_side=is_accepting, do_handshake_on_connect=False)
        on_failure.callback(tls.close)
        greeting = b""
        is_shaken = False
        while True:
            try:
                if not is_shaken:
                    tls.do_handshake()
                    is_shaken = True
                if is_accepting:
                    tls.write(_GREETING)
                else:
                    greeting = tls.read(len(_GREETING))
                break
            except ssl.SSLWantReadError:
                yield select.POLLIN
            except ssl.SSLWantWriteError:
                yield select.POLLOUT
            except ssl.SSLEOFError as failure:
                raise ConnectionError("the peer closed the connection during the TLS handshake") from failure
            except ssl.SSLError as failure:
                raise NotOfThisJob(f"the TLS handshake failed: {failure.reason or failure}") from failure
        if not is_accepting and greeting != _GREETING:
            raise ConnectionError("the peer closed the connection during the TLS handshake")
        on_failure.pop_all()
        return TlsSocket(tls)


def plain_accepting(credentials: Credentials) -> HandshakeFactory:
    """Handshakes for a trusted fabric, accepting: both sides prove that they hold the job's key; then plain bytes."""
    key = credentials.derived_key("plain data plane")
    return lambda sock: _plain_accepting(sock, key)


def plain_connecting(credentials: Credentials) -> HandshakeFactory:
    """Handshakes for a trusted fabric, connecting."""
    key = credentials.derived_key("plain data plane")
    return lambda sock: _plain_connecting(sock, key)


def _plain_accepting(sock: socket.socket, key: bytes) -> Handshake:
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(sock.close)
        opening = yield from _receive(sock, len(_PLAIN_MAGIC) + _NONCE_BYTES)
        magic, theirs = opening[: len(_PLAIN_MAGIC)], opening[len(_PLAIN_MAGIC) :]
        if magic != _PLAIN_MAGIC:
            raise NotOfThisJob("the peer does not begin as a data plane without encryption does")
        ours = secrets.token_bytes(_NONCE_BYTES)
        yield from _send(sock, ours + _proof(key, b"accepts", theirs, ours))
        proof = yield from _receive(sock, _PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(key, b"connects", ours, theirs)):
            raise NotOfThisJob("the peer does not hold this job's key")
        yield from _send(sock, _GREETING)
        on_failure.pop_all()
        return sock


def _plain_connecting(sock: socket.socket, key: bytes) -> Handshake:
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(sock.close)
        ours = secrets.token_bytes(_NONCE_BYTES)
        yield from _send(sock, _PLAIN_MAGIC + ours)
        answer = yield from _receive(sock, _NONCE_BYTES + _PROOF_BYTES)
        theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(key, b"accepts", ours, theirs)):
            raise NotOfThisJob("the peer does not hold this job's key")
        yield from _send(sock, _proof(key, b"connects", theirs, ours))
        yield from _receive(sock, len(_GREETING))
        on_failure.pop_all()
        return sock


def _proof(key: bytes, role: bytes, challenge: bytes, own: bytes) -> bytes:
    # The role keeps an answer from being sent back to its maker as the maker's own.
    return hmac.digest(key, role + b":" + challenge + own, "sha256")


def _receive(sock: socket.socket, size: int) -> Generator[int, None, bytes]:
    received = b""
    while len(received) < size:
        try:
            part = sock.recv(size - len(received))
        except BlockingIOError:
            yield select.POLLIN
            continue
        if not part:
            raise ConnectionError("the peer closed the connection during the handshake")
        received += part
    return received


def _send(sock: socket.socket, content: bytes) -> Generator[int, None, None]:
    view = memoryview(content)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            yield select.POLLOUT


def complete(handshake: Handshake, fd: int, timeout_s: float, is_given_up: Callable[[], bool]) -> Connection:
    """Carry a handshake through on the calling thread.

    Args:
        fd: of its socket.
        is_given_up: asked a few times a second; True ends it.

    Raises:
        OSError: it failed. TimeoutError: the peer did not answer in time, or it was given up.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        while True:
            poll = select.poll()
            poll.register(fd, next(handshake))
            while not poll.poll(_ANSWER_INTERVAL_S * 1e3):
                if time.monotonic() >= deadline_s or is_given_up():
                    raise TimeoutError(f"no answer to the handshake in {timeout_s:g} s")
    except StopIteration as done:
        connection: Connection = done.value
        os.set_blocking(fd, isinstance(connection, socket.socket))
        return connection
    finally:
        handshake.close()
