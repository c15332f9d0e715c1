"""Programs for the runtime itself; a part of ``jax_adapter``."""

import base64
from collections.abc import Callable, Sequence
from typing import Any

import jax

from slurm_pathways.client.jax_adapter import is_proxy, private_names

#: What the runtime answers a failed request with.
RuntimeFailure = jax.errors.JaxRuntimeError


def client_of(device: jax.Device) -> Any:
    """The client through which the runtime of a device is reached.

    Raises:
        ValueError: it is none of a run of ours.
    """
    client = device.client
    if not is_proxy(client):
        raise ValueError(f"{device} belongs to no run: start the program by slurm-pathways run")
    return client


def devices_of(sharding: Any) -> tuple[jax.Device, ...]:
    """The devices of a sharding, in its order.

    Raises:
        PrivateNamesChangedError: this version of JAX says it in another way.
    """
    with private_names():
        return tuple(sharding._device_assignment)


def encode_sharding(sharding: Any, rank: int) -> str:
    """How an array of so many dimensions is partitioned over ``devices_of``: XLA's ``OpSharding``, in base 64.

    Raises:
        PrivateNamesChangedError: this version of JAX says it in another way.
    """
    with private_names():
        op_sharding = sharding._to_xla_hlo_sharding(rank).to_proto()
        return base64.b64encode(op_sharding.SerializeToString()).decode()


def start_plugin_program(
    client: Any, text: str, arguments: Sequence[jax.Array] = (), results: Sequence[jax.ShapeDtypeStruct] = ()
) -> tuple[list[jax.Array], Callable[[], None]]:
    """Compile and dispatch a program.

    Args:
        arguments: all on the same devices, in one order.
        results: what the program gives, with shardings.

    Returns:
        The results, and what waits until all is done and raises RuntimeFailure if something went wrong.

    Raises:
        RuntimeFailure: the runtime refuses. PrivateNamesChangedError: this version of JAX does it in
            another way.
    """
    with private_names():
        from jax._src.interpreters import pxla

        executable = _compile(client, text)
        avals = [jax.core.ShapedArray(result.shape, result.dtype) for result in results]
        shardings = [result.sharding for result in results]
        handlers = pxla.global_avals_to_results_handler(avals, shardings, True).handlers
        executed = executable.execute_sharded(list(arguments), with_tokens=True)
        made = list(executed.consume_with_handlers(handlers)) if results else []
        token = executed.consume_token()
    return made, token.block_until_ready


def run_plugin_program(text: str) -> str:
    """Compile and execute a program, and wait until it is done.

    Returns:
        What the runtime says of it when it is compiled: its fingerprint.

    Raises:
        RuntimeFailure: it refuses or fails.
    """
    executable = _compile(jax.local_devices()[0].client, text)
    executable.execute_sharded((), with_tokens=True).consume_token().block_until_ready()
    return bytes(executable.fingerprint or b"").decode()


def _compile(client: Any, text: str) -> Any:
    from jax.extend import ifrt_programs

    programs = ifrt_programs.ifrt_programs
    return client.compile_ifrt_program(programs.make_plugin_program(text), programs.make_plugin_compile_options())
