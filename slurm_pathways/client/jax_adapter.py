"""The place that touches JAX's private parts: what a new version of JAX may break is here and in the modules beside
this one whose names begin with ``jax_``.

Checked against the versions of JAX that the tests run with. Where a private name is gone, ``load`` says which one by
raising, and the program goes on without what needed it.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.extend import backend as jax_backend
from jax.extend.backend import ifrt_proxy

#: What jaxlib puts before the runtime type of a server that is reached by the IFRT proxy protocol.
PROXY_RUNTIME_PREFIX = "proxy/"

#: ``(arrays, shardings, layouts, copy_semantics) -> arrays``: how JAX puts the arguments of one type where they belong.
ShardArgHandler = Callable[[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]


#: Of what stands in the place of something of JAX's: what that was.
_MARK = "_slurm_pathways_original"

_Replacement = TypeVar("_Replacement", bound=Callable[..., Any])


class PrivateNamesChangedError(Exception):
    """This version of JAX lacks something private that a part of the plugin needs."""


@contextlib.contextmanager
def private_names() -> Iterator[None]:
    """Private names are looked up in here.

    Raises:
        PrivateNamesChangedError: one is missing, or is not what it was; the message names it.
    """
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        raise PrivateNamesChangedError(str(error)) from error


def replacing(original: Any) -> Callable[[_Replacement], _Replacement]:
    """A decorator of what is put in the place of ``original``, by which ``is_replaced`` knows it."""

    def mark(replacement: _Replacement) -> _Replacement:
        setattr(replacement, _MARK, original)
        return replacement

    return mark


def is_replaced(found: Any) -> bool:
    """Whether something was put in the place of JAX's own here already: a second call then changes nothing."""
    return hasattr(found, _MARK)


def original_of(replacement: Any) -> Any:
    """What of JAX's own it stands in the place of."""
    return getattr(replacement, _MARK)


@dataclasses.dataclass(frozen=True)
class JaxInternals:
    """JAX's private names, looked up once.

    Attributes:
        array_type: the class of every concrete ``jax.Array``.
        handlers: JAX's registry of ``ShardArgHandler`` by argument type; ``device_put``, ``jit`` and ``pmap`` use it.
        dispatch: the module of ``device_put``'s rules.
        xla_client: the module through which JAX calls ``batched_device_put``.
        holds_the_same: ``(source sharding, target sharding, rank) -> bool``: equal parts on as many devices.
        transfer: ``(arrays, shardings, donate) -> arrays``: the server moves the values (IFRT's ReshardArrays).
        donate: the copy semantics under which the source is given up.
    """

    array_type: type[Any]
    handlers: dict[Any, ShardArgHandler]
    dispatch: Any
    xla_client: Any
    holds_the_same: Callable[[Any, Any, int], bool]
    transfer: Callable[[Sequence[Any], Sequence[Any], bool], list[Any]]
    donate: Any

    def host_value(self, array: Any) -> Any:
        """The whole array in the client's memory, ``numpy.ndarray``; waits for it."""
        return array._value

    def client_of(self, sharding: Any) -> Any:
        """The client of a sharding's devices; all of them have the same."""
        return sharding._internal_device_list[0].client

    def device_list(self, sharding: Any) -> Any:
        """A sharding's devices in order, hashable and hashed once."""
        return sharding._internal_device_list


def load() -> JaxInternals:
    """Look the private names up.

    Raises:
        PrivateNamesChangedError: one is missing; the message names it.
    """
    with private_names():
        from jax._src import array as array_module
        from jax._src import dispatch
        from jax._src.interpreters import pxla
        from jax._src.lib import xla_client
        from jaxlib import _pathways

        for module, name in (
            (dispatch, "_different_device_order_reshard"),
            (xla_client, "batched_device_put"),
            (array_module.ArrayImpl, "_value"),
        ):
            getattr(module, name)
        return JaxInternals(
            array_type=array_module.ArrayImpl,
            handlers=pxla.shard_arg_handlers,
            dispatch=dispatch,
            xla_client=xla_client,
            holds_the_same=array_module._sharding_indices_and_eq,
            transfer=_pathways._transfer_to_shardings,
            donate=xla_client.ArrayCopySemantics.DONATE_INPUT,
        )


def have_own_cpu() -> None:
    """See to it that JAX has CPU devices of the program's own process, behind the proxy's: callbacks run on them.

    Must come before backends exist.
    """
    platforms = (jax.config.jax_platforms or "").split(",")
    if "cpu" not in platforms:
        jax.config.update("jax_platforms", ",".join((*platforms, "cpu")))


def own_cpu_device() -> Any:
    """The first CPU device of the program's own process; see ``have_own_cpu``."""
    return jax.devices("cpu")[0]


def is_proxy(client: Any) -> bool:
    """Whether a client's devices are reached by the IFRT proxy protocol."""
    return bool(client.runtime_type.startswith(PROXY_RUNTIME_PREFIX))


def connect(target: str, timeout_s: int) -> Any:
    """A client of the runtime at ``target``.

    No callback of ours is set in the options: jaxlib calls them from its own threads, also while Python ends, which
    aborts the process.

    Raises:
        jax.errors.JaxRuntimeError: no connection within ``timeout_s``.
    """
    options = ifrt_proxy.ClientConnectionOptions()
    options.connection_timeout_in_seconds = timeout_s
    return ifrt_proxy.get_client(target, options)


def register_backend(name: str, factory: Callable[[], Any]) -> None:
    """Register a backend factory. One registered earlier under this name is replaced.

    Once the backend exists, later registrations of the name are left out instead of raising: what
    ``pathwaysutils.initialize()`` would register after a first look at ``jax.devices()`` is there already.
    """
    original = jax_backend.register_backend_factory
    original(name, factory, priority=-1)
    if getattr(original, "_keeps_existing", None) == name:
        return

    def register_backend_factory(platform: str, factory: Callable[[], Any], **options: Any) -> None:
        if platform == name and _is_initialized(name):
            return
        original(platform, factory, **options)

    register_backend_factory._keeps_existing = name  # type: ignore[attr-defined]
    jax_backend.register_backend_factory = register_backend_factory


def _is_initialized(name: str) -> bool:
    from jax._src import xla_bridge

    return name in xla_bridge._backends


def backend_target() -> str | None:
    """``jax.config.jax_backend_target``."""
    return jax.config.read("jax_backend_target") or None


def keep_target_as_it_is_written(target: str | None) -> None:
    """JAX makes what it reads from ``JAX_BACKEND_TARGET`` lower case, which names another socket.

    Args:
        target: the variable. One that the program has chosen instead of it stays.
    """
    if target is not None and backend_target() == target.lower():
        jax.config.update("jax_backend_target", target)


def use_no_client_compile_cache() -> None:
    """Workers compile and cache programs; JAX's own cache would ask the client to serialize executables."""
    jax.config.update("jax_enable_compilation_cache", False)


def hide_cpp_warnings() -> None:
    """Raise the level of jaxlib's C++ log from warnings, JAX's default, to errors.

    The proxy client logs a warning for every connection, and a stack trace for every one that is closed.
    """
    from jax._src.lib import utils

    utils.absl_set_min_log_level(2)
