"""Collectives between CPU devices of several executors, by ways that nobody else can take.

gloo, in jaxlib, speaks plain TCP to the addresses that members of a world publish, and knows no authentication. Here it
is given *stand-ins*, addresses of 127.192.0.0/10, one per host. ``runtime/native/private_sockets.c``, preloaded into
the executor, turns what is bound or connected to one into Unix sockets in a folder of the executor's:

    gloo ── <folder>/m3/17 ───────────────────────────────────── gloo      m3: a link to the folder of host 3's executor
    gloo ── <folder>/m4 ── here ══ data connection ══ there ── <its folder>/17 ── gloo      host 4 is on another machine

Between machines the bytes go through a *tunnel*, a connection of the data plane that is given away for them, with its
authentication and encryption. One thread carries all of them; where the data plane does not encrypt, gloo is given the
connection itself.

The supervisor, which imports this, loads no JAX.
"""

import contextlib
import ctypes
import functools
import ipaddress
import itertools
import logging
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from pathways_runtime.core.ids import HostIndex
from pathways_runtime.transport import addresses
from pathways_runtime.transport.tls_socket import Connection
from pathways_runtime.transport.tunnel import Carrier
from pathways_runtime.worker import descriptors

logger = logging.getLogger(__name__)

#: Beside this file where there was a C compiler when the package was built.
LIBRARY = Path(__file__).with_name("_private_sockets.abi3.so")
PRELOAD_VARIABLE = "LD_PRELOAD"
#: Leave gloo in plain TCP, to compare.
PLAIN_VARIABLE = "SLURM_PATHWAYS_TEST_PLAIN_COLLECTIVES"

#: What the library adds to a process.
_ENTRY = "slurm_pathways_private_sockets_use"
_TRY_TIMEOUT_S = 20.0
#: As in private_sockets.h.
_STAND_INS = ipaddress.IPv4Network("127.192.0.0/10")
#: What the library says first on a connection that leads elsewhere: member, port.
_WHOM = struct.Struct("!II")
#: Library and this module answer each other at once.
_ANSWER_TIMEOUT_S = 10.0
#: What the library takes for: go on. With it may come a descriptor to go on with.
_GO_ON = b"\0"
_OUT_NAME = "out"

#: Opens a connection to a port of another machine's executor; raises OSError where it cannot.
OpenTunnel = Callable[[HostIndex, int], Connection]


def why_not(environ: Mapping[str, str]) -> str:
    """Why collectives of executors that are started with this environment are plain TCP; empty: they are not."""
    if environ.get(PLAIN_VARIABLE):
        return f"{PLAIN_VARIABLE} is set"
    if not LIBRARY.exists():
        return f"{LIBRARY} is missing: there was no C compiler when slurm-pathways was built"
    return ""


def preload(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """What to add to an executor's environment so that the library is loaded before all others; empty: nothing.

    Args:
        folder: for a link to the library, where its own path cannot be written in the variable.

    Raises:
        OSError: the link cannot be made.
    """
    if why_not(environ):
        return {}
    path = LIBRARY
    # The loader takes both for separators, and knows no quoting.
    if set(" :") & set(str(path)):
        path = folder.absolute() / LIBRARY.name
        # Supervisors of one machine may share the folder.
        with contextlib.suppress(FileExistsError):
            path.symlink_to(LIBRARY)
    before = environ.get(PRELOAD_VARIABLE)
    return {PRELOAD_VARIABLE: f"{path}:{before}" if before else str(path)}


def is_preloaded() -> bool:
    """Whether the library is in this process, before the C library."""
    return hasattr(ctypes.CDLL(None), _ENTRY)


def try_preloading(environ: Mapping[str, str]) -> str:
    """Starts a process as an executor is started: why it has no private sockets; empty: it has.

    Raises:
        OSError: it cannot be started, or there is no temporary folder. subprocess.TimeoutExpired: it does not end.
    """
    if reason := why_not(environ):
        return reason
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-I", "-c", f"import ctypes; ctypes.CDLL(None).{_ENTRY}"]
        variables = {**environ, **preload(environ, Path(folder))}
        done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=_TRY_TIMEOUT_S, check=False)
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines() or ["nothing was said of it"]
    return f"{LIBRARY} cannot be preloaded: {said[0]}"


def folder_beside(data_address: str) -> Path:
    """The folder of the executor whose data plane is reached there from its own host."""
    return Path(addresses.parse_unix(addresses.way_to(data_address, True)).path).with_suffix(".d")


def stand_in(host: HostIndex) -> str:
    """The address that stands for a host's executor."""
    return str(_STAND_INS[host])


class PrivateSockets:
    """The sockets of this process: there can be one of these in it, and the library must be preloaded.

    Args:
        folder: to be made; this user's alone.
        host: whose executor this is.
        open_tunnel: see ``OpenTunnel``; called on threads of their own.

    Raises:
        OSError: the folder cannot be made, or its path is too long for sockets in it.
    """

    def __init__(self, folder: Path, host: HostIndex, open_tunnel: OpenTunnel) -> None:
        self._folder = folder
        self._host = host
        self._open_tunnel = open_tunnel
        self._lock = threading.Lock()
        self._ways: dict[HostIndex, Path] = {}
        #: Connections through tunnels, by the host that they lead to.
        self._led_out: dict[HostIndex, list[weakref.ref[socket.socket]]] = {}
        self._numbers = itertools.count()
        self._carrier: Carrier | None = None
        self._listener: socket.socket | None = None
        self._is_closed = False
        folder.mkdir(mode=0o700)
        library = ctypes.CDLL(None, use_errno=True)
        if library[_ENTRY](os.fsencode(folder), ctypes.c_uint32(host)) != 0:
            number = ctypes.get_errno()
            shutil.rmtree(folder)
            raise OSError(number, f"no private sockets in {folder}: {os.strerror(number)}")

    @property
    def own_stand_in(self) -> str:
        """Where collectives of this executor are to listen."""
        return stand_in(self._host)

    def lead_to(self, host: HostIndex, folder: Path | None) -> None:
        """Have the stand-in of another host lead to its executor: to that folder on this machine, or (None) to another.

        Raises:
            OSError: the folder of this process has no room, or is gone.
        """
        with self._lock:
            target = folder or self._out()
            if self._ways.get(host) == target:
                return
            way = self._folder / f"m{host}"
            way.unlink(missing_ok=True)
            way.symlink_to(target)
            self._ways[host] = target

    def lose(self, host: HostIndex) -> None:
        """A host is lost: what was connected to it here ends, should it be stopped or cut off and not say so itself.

        What it has connected to this one is not known by its name; see ``gloo_sockets``.
        """
        with self._lock:
            way, led_out = self._ways.pop(host, None), self._led_out.pop(host, [])
        for reference in led_out:
            if (sock := reference()) is not None:
                _end(sock)
        if way is not None:
            for sock in descriptors.stream_sockets():
                with contextlib.suppress(OSError):
                    peer = sock.getpeername()
                    if isinstance(peer, str) and Path(peer).parent == way:
                        _end(sock)

    def take_in(self, port: int) -> Callable[[Connection], None]:
        """Who takes over a connection from another machine: carries what comes to what listens at this port here.

        Raises:
            OSError: nobody listens there.
        """
        with self._lock:
            carrier = self._get_carrier()
        return functools.partial(_go_on, carrier, self._connect_to(port))

    def _connect_to(self, port: int) -> socket.socket:
        """A connection to a listener of this process from a member elsewhere: the library knows it by its name."""
        name = self._folder / f"in{next(self._numbers)}"
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            ours.bind(str(name))
            try:
                ours.settimeout(_ANSWER_TIMEOUT_S)
                ours.connect(str(self._folder / str(port)))
            finally:
                name.unlink(missing_ok=True)
        except OSError as failure:
            ours.close()
            raise OSError(failure.errno, f"no collectives listen at {port}: {failure.strerror}") from failure
        return ours

    def bytes_out(self) -> int:
        """What the thread that carries has sent to other machines so far."""
        with self._lock:
            return 0 if self._carrier is None else self._carrier.bytes_out()

    def close(self) -> None:
        """End tunnels and remove the folder. May be called again."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            listener, carrier = self._listener, self._carrier
        if listener is not None:
            addresses.stop_listening(listener, f"unix:{self._folder / _OUT_NAME}")
        if carrier is not None:
            carrier.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _get_carrier(self) -> Carrier:
        if self._is_closed:
            raise OSError("this executor ends")
        if self._carrier is None:
            self._carrier = Carrier("collectives")
        return self._carrier

    # The way out

    def _out(self) -> Path:
        path = self._folder / _OUT_NAME
        if self._listener is None:
            self._listener = addresses.listen(f"unix:{path}")
            threading.Thread(target=self._accept, args=(self._listener,), name="collectives out", daemon=True).start()
        return path

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                ours, _ = listener.accept()
            except OSError:
                if not self._is_closed:
                    raise
                return
            # To connect takes a handshake; others need not wait for it.
            threading.Thread(target=self._lead_out, args=(ours,), name="collectives connect", daemon=True).start()

    def _lead_out(self, ours: socket.socket) -> None:
        host = None
        try:
            ours.settimeout(_ANSWER_TIMEOUT_S)
            host, port = _WHOM.unpack(ours.recv(_WHOM.size, socket.MSG_WAITALL))
            with self._lock:
                carrier = self._get_carrier()
                kept = [known for known in self._led_out.get(HostIndex(host), ()) if known() is not None]
                self._led_out[HostIndex(host)] = [*kept, weakref.ref(ours)]
            _go_on(carrier, ours, self._open_tunnel(HostIndex(host), port))
        except (OSError, struct.error) as failure:
            # gloo is refused, and fails the program.
            logger.warning("collectives with host %s have no connection: %s", host, failure)
            ours.close()


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _go_on(carrier: Carrier, ours: socket.socket, theirs: Connection) -> None:
    """Have the library's connection go on to another machine. Owns both.

    Raises:
        OSError: the library's end is gone.
    """
    try:
        if isinstance(theirs, socket.socket):
            socket.send_fds(ours, [_GO_ON], [theirs.fileno()])
        else:
            ours.sendall(_GO_ON)
    except OSError:
        ours.close()
        theirs.close()
        raise
    if isinstance(theirs, socket.socket):
        ours.close()
        theirs.close()
    else:
        carrier.join(ours, theirs)
