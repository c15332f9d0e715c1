"""The one place that touches JAX's private parts: everything that a new version of JAX may break is here.

Checked against the versions of JAX that the tests run with. Where a private name is gone, ``load`` says which one by
raising, and the program goes on without what needed it.
"""

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import backend as jax_backend
from jax.extend.backend import ifrt_proxy

#: What jaxlib puts before the runtime type of a server that is reached by the IFRT proxy protocol.
PROXY_RUNTIME_PREFIX = "proxy/"

#: ``(arrays, shardings, layouts, copy_semantics) -> arrays``: how JAX puts the arguments of one type where they belong.
ShardArgHandler = Callable[[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]


class PrivateNamesChangedError(Exception):
    """This version of JAX lacks something private that array moves without a detour need."""


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
    try:
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
    except (ImportError, AttributeError) as error:
        raise PrivateNamesChangedError(str(error)) from error


#: A Python function that a program calls, as JAX lowers it: takes and gives arrays, after a token where there is one.
HostCallback = Callable[..., Sequence[Any]]
#: ``(functions) -> attributes``: takes functions in, and gives what a module with them must say: ``serve_callbacks``.
TakeCallbacks = Callable[[Sequence[HostCallback]], Mapping[str, str | Sequence[int]]]


def serve_callbacks(take: TakeCallbacks) -> None:
    """Let programs for the proxy have callbacks. Again does nothing.

    JAX lowers them as for the platform that the devices say they are of: to custom calls with an index into a list of
    functions, which it hands to jaxlib with the module. The proxy's client refuses such a list. In the place of it, the
    module gets attributes that say whose functions these are, and which.

    Raises:
        PrivateNamesChangedError: this version of JAX does it in another way.
    """
    try:
        from jax._src import compiler
        from jax._src.lib.mlir import ir

        original = compiler.backend_compile_and_load
    except (ImportError, AttributeError) as error:
        raise PrivateNamesChangedError(str(error)) from error
    if hasattr(original, "_slurm_pathways_original"):
        return

    def backend_compile_and_load(
        backend: Any, module: Any, executable_devices: Any, options: Any, host_callbacks: Any
    ) -> Any:
        wrap = None
        if host_callbacks and is_proxy(backend):
            module = _without_tokens(module)
            if _add_output_if_none(module):
                options.executable_build_options.allow_spmd_sharding_propagation_to_output = [False]
                wrap = _WithoutOutputs
            with module.context:
                for name, value in take(host_callbacks).items():
                    module.operation.attributes[name] = (
                        ir.StringAttr.get(value) if isinstance(value, str) else ir.DenseI64ArrayAttr.get(list(value))
                    )
            host_callbacks = ()
        executable = original(backend, module, executable_devices, options, host_callbacks)
        return executable if wrap is None else wrap(executable)

    backend_compile_and_load._slurm_pathways_original = original  # type: ignore[attr-defined]
    compiler.backend_compile_and_load = backend_compile_and_load


class _WithoutOutputs:
    """An executable whose one output JAX must not see: the server tells by outputs when an execution is over."""

    def __init__(self, executable: Any) -> None:
        self._executable = executable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)

    def execute_sharded(self, arguments: Any, with_tokens: bool = False) -> Any:
        return _NoResults(self._executable.execute_sharded(arguments, with_tokens=with_tokens))

    def get_output_shardings(self) -> Any:
        shardings = self._executable.get_output_shardings()
        return shardings and shardings[:-1]

    def get_output_layouts(self) -> Any:
        return self._executable.get_output_layouts()[:-1]

    def get_output_memory_kinds(self) -> Any:
        return [kinds[:-1] for kinds in self._executable.get_output_memory_kinds()]


class _NoResults:
    """Of an execution of ``_WithoutOutputs``."""

    def __init__(self, results: Any) -> None:
        self._results = results

    def consume_token(self) -> Any:
        return self._results.consume_token()

    def consume_with_handlers(self, handlers: Sequence[Any], strict: bool = True) -> list[Any]:
        return []

    def disassemble_into_single_device_arrays(self) -> list[Any]:
        return []


def _add_output_if_none(module: Any) -> bool:
    """Let ``main`` give an empty array if it gives nothing; whether it was so."""
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import func, hlo

    main = next(f for f in module.body.operations if isinstance(f, func.FuncOp) and f.name.value == "main")
    if main.type.results:
        return False
    with module.context, ir.Location.unknown():
        empty = ir.RankedTensorType.get((0,), ir.IntegerType.get_signless(1))
        end = main.entry_block.operations[len(main.entry_block.operations) - 1]
        with ir.InsertionPoint(end):
            func.ReturnOp([hlo.constant(ir.DenseElementsAttr.get_splat(empty, ir.BoolAttr.get(False)))])
        end.erase()
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(main.type.inputs, [empty]))
        replicated = ir.DictAttr.get({"mhlo.sharding": ir.StringAttr.get("{replicated}")})
        main.attributes["res_attrs"] = ir.ArrayAttr.get([replicated])
        module.operation.verify()
    return True


def _without_tokens(module: Any) -> Any:
    """A copy of a module whose ``main`` takes and gives an empty array where it did a token.

    Such arrays are what JAX passes for tokens between programs; one is there when the program that gives it has ended.
    Only jaxlib's own clients take them for tokens.
    """
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import func, hlo

    written = io.BytesIO()
    module.operation.write_bytecode(written)
    with module.context, ir.Location.unknown():
        copied = ir.Module.parse(written.getvalue())
        main = next(f for f in copied.body.operations if isinstance(f, func.FuncOp) and f.name.value == "main")
        token, empty = hlo.TokenType.get(), ir.RankedTensorType.get((0,), ir.IntegerType.get_signless(1))
        inputs, outputs = main.type.inputs, main.type.results
        if token not in (*inputs, *outputs):
            return copied
        block = main.entry_block
        for argument in block.arguments:
            if argument.type == token:
                with ir.InsertionPoint.at_block_begin(block):
                    argument.replace_all_uses_with(hlo.create_token())
                argument.set_type(empty)
        end = block.operations[len(block.operations) - 1]
        with ir.InsertionPoint(end):
            nothing = hlo.constant(ir.DenseElementsAttr.get_splat(empty, ir.BoolAttr.get(False)))
            func.ReturnOp([nothing if value.type == token else value for value in end.operands])
        end.erase()
        types = [[empty if each == token else each for each in side] for side in (inputs, outputs)]
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(*types))
        # What the tokens' attributes say (that they are tokens, shardings of rank 0) would be wrong of arrays.
        nothing_said = ir.DictAttr.get({"mhlo.sharding": ir.StringAttr.get("{replicated}")})
        for name, side in (("arg_attrs", inputs), ("res_attrs", outputs)):
            if name in main.attributes:
                said = ir.ArrayAttr(main.attributes[name])
                main.attributes[name] = ir.ArrayAttr.get(
                    [nothing_said if kind == token else each for kind, each in zip(side, said, strict=True)]
                )
        copied.operation.verify()
        return copied


def have_own_cpu() -> None:
    """See to it that JAX has CPU devices of the program's own process, behind the proxy's: callbacks run on them.

    Must come before backends exist.
    """
    platforms = (jax.config.jax_platforms or "").split(",")
    if "cpu" not in platforms:
        jax.config.update("jax_platforms", ",".join((*platforms, "cpu")))


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
