"""The program's end of callbacks: what is done to its modules, and the connection that brings calls."""

import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from pathways_runtime.core.status import Code
from pathways_runtime.transport import addresses
from pathways_runtime.transport.frames import Channel, FrameCodec
from pathways_runtime.wire.callbacks import (
    CALLBACKS_VERSION,
    AnyCallbackMessage,
    CallbackCall,
    CallbacksHello,
    CallbacksUnused,
    Functions,
    callbacks_address,
    pack,
    unpack,
)
from slurm_pathways.client import jax_programs
from slurm_pathways.client.callbacks import Callbacks, CallbacksError

DEADLINE_S = 20.0


class Proxy:
    """Listens as a proxy does, and takes one client."""

    def __init__(self, folder: Path) -> None:
        self.target = f"grpc://unix:{folder}/p.sock"
        self._listener = addresses.listen(callbacks_address(f"unix:{folder}/p.sock"))
        self._listener.settimeout(DEADLINE_S)
        self._frames: list[Any] = []
        self._accepted: list[socket.socket] = []

    def accept(self) -> str:
        """The client's id."""
        sock, _ = self._listener.accept()
        self._accepted.append(sock)
        sock.settimeout(DEADLINE_S)
        self.channel: Channel[Any] = Channel(sock, FrameCodec(AnyCallbackMessage))
        hello = self.receive().message
        assert isinstance(hello, CallbacksHello)
        assert hello.version == CALLBACKS_VERSION
        return hello.client

    def receive(self) -> Any:
        while not self._frames:
            self._frames += self.channel.receive()
        return self._frames.pop(0)

    def call(self, call: int, client: str, number: int, *operands: Any) -> None:
        specs, payload = pack([None if each is None else np.asarray(each) for each in operands])
        self.channel.send(CallbackCall(call, client, number, specs), payload)

    def close(self) -> None:
        for sock in (self._listener, *self._accepted):
            sock.close()


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    proxy = Proxy(tmp_path)
    yield proxy
    proxy.close()


def test_calls_are_answered_and_failures_told(proxy: Proxy) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("no such thing")

    callbacks = Callbacks(lambda: proxy.target)
    functions = [lambda token, x: (token, np.asarray(x) + 1), fail]
    taken = callbacks.take(functions)
    client = proxy.accept()
    assert taken.functions == Functions(client, (0, 1))
    # A function is another's too: each program has numbers of its own.
    assert callbacks.take([fail, len]).functions == Functions(client, (2, 3))
    proxy.call(5, client, 0, None, np.float32(2))
    frame = proxy.receive()
    assert (frame.message.call, frame.message.failure) == (5, None)
    token, value = unpack(frame.message.results, frame.payload)
    assert token is None
    assert value is not None
    assert value.tolist() == 3.0
    proxy.call(6, client, 1)
    failure = proxy.receive().message.failure
    assert failure.code == Code.INTERNAL
    assert failure.message.endswith("KeyError: 'no such thing'")
    assert failure.message.startswith("Traceback")


def test_functions_are_kept_until_nothing_can_call_them(proxy: Proxy) -> None:
    callbacks = Callbacks(lambda: proxy.target)
    gone = [threading.Event(), threading.Event()]

    def made(index: int) -> Any:
        def function() -> Any:
            return (np.int32(index),)

        weakref.finalize(function, gone[index].set)
        return function

    deleted, _, refused = callbacks.take([made(0)]), callbacks.take([made(1), len]), callbacks.take([len])
    client = proxy.accept()
    refused.forget()
    proxy.call(1, client, refused.functions.numbers[0])
    assert "deleted with its program" in proxy.receive().message.failure.message
    proxy.call(2, client, 0)
    assert proxy.receive().message.failure is None
    proxy.channel.send(CallbacksUnused(*deleted.functions))
    assert gone[0].wait(DEADLINE_S)
    proxy.call(3, client, 1)
    assert proxy.receive().message.failure is None
    assert not gone[1].is_set()
    proxy.channel.close()
    assert gone[1].wait(DEADLINE_S)


def test_calls_that_wait_for_one_another_run_at_a_time(proxy: Proxy) -> None:
    together = threading.Barrier(5)
    callbacks = Callbacks(lambda: proxy.target)
    callbacks.take([lambda: (together.wait(DEADLINE_S) and ()) or ()])
    client = proxy.accept()
    for _ in range(3):
        for call in range(5):
            proxy.call(call, client, 0)
        messages = [proxy.receive().message for _ in range(5)]
        assert sorted(message.call for message in messages) == [0, 1, 2, 3, 4]
        assert [message.failure for message in messages] == [None] * 5


def test_a_lost_connection_is_made_again(proxy: Proxy) -> None:
    callbacks = Callbacks(lambda: proxy.target)
    callbacks.take([len])
    first = proxy.accept()
    proxy.channel.close()
    deadline = threading.Event()
    for _ in range(2000):
        client = callbacks.take([len]).functions.client
        if client != first:
            break
        deadline.wait(0.01)
    assert proxy.accept() == client


def test_where_nobody_listens_it_says_what_is_wrong(tmp_path: Path) -> None:
    folder = tmp_path / "nothing"
    folder.mkdir()
    for target in ("grpc://10.0.0.1:80", f"grpc://unix:{folder}/{'x' * 200}.sock"):
        with pytest.raises(CallbacksError, match=r"jax\.debug\.print.*cannot be reached for such calls"):
            Callbacks(lambda target=target: target).take([len])


def lowered(function: Any, *arguments: Any) -> Any:
    return jax.jit(function).lower(*arguments).compiler_ir()


def test_tokens_do_not_leave_programs() -> None:
    def program(x: Any) -> Any:
        io_callback(lambda v: None, None, x, ordered=True)
        return x + 1

    module = lowered(program, jnp.float32(1))
    rewritten = str(jax_programs._without_tokens(module))
    main = next(line for line in rewritten.splitlines() if "@main" in line)
    assert "token" not in main
    assert main.count("tensor<0xi1>") == 2
    assert main.count("tensor<f32>") == 2
    assert "stablehlo.create_token" in rewritten
    # The original is JAX's, which may lower it for other devices.
    assert "!stablehlo.token" in next(line for line in str(module).splitlines() if "@main" in line)


def test_programs_without_outputs_get_one() -> None:
    silent = jax_programs._without_tokens(lowered(lambda x: jax.debug.print("{}", x), jnp.float32(1)), must_give=True)
    assert "-> (tensor<0xi1> {mhlo.sharding" in str(silent)
    assert len(jax_programs._main(silent).type.results) == 1
