"""What is done to JAX's programs for the proxy before they are sent; a part of ``jax_adapter``.

JAX's entry to the compiler, one function, is replaced: a program's callbacks, and tokens that it takes or gives, are
put in a form in which jaxlib's client for the proxy can send them and the server can run them. Programs for other
clients are passed on as they are.
"""

import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pathways_runtime.wire.callbacks import ATTRIBUTE, Functions, callbacks_attribute
from slurm_pathways.client import jax_partitioning
from slurm_pathways.client.jax_adapter import is_proxy, is_replaced, own_cpu_device, private_names, replacing

#: A Python function that a program calls, as JAX lowers it: takes and gives arrays, after a token where there is one.
HostCallback = Callable[..., Sequence[Any]]


class TakenCallbacks(NamedTuple):
    """Functions that can be called from the runtime.

    Attributes:
        functions: how they are called there.
        forget: to be called if no program with them came into being.
    """

    functions: Functions
    forget: Callable[[], None]


TakeCallbacks = Callable[[Sequence[HostCallback]], TakenCallbacks]


def prepare_programs(take: TakeCallbacks) -> None:
    """Let programs for the proxy have callbacks and tokens, and functions that the compiler asks. Again does nothing.

    JAX lowers callbacks as for the platform that the devices say they are of: to custom calls with an index into a list
    of functions, which it hands to jaxlib with the module. The proxy's client refuses such a list. In the place of it,
    the module gets attributes that say whose functions these are, and which.

    Raises:
        PrivateNamesChangedError: this version of JAX does it in another way.
    """
    with private_names():
        from jax._src import compiler
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import func, hlo  # noqa: F401 - used further down

        original = compiler.backend_compile_and_load
    if is_replaced(original):
        return

    def take_one(function: HostCallback) -> tuple[str, int, Callable[[], None]]:
        taken = take([function])
        return taken.functions.client, taken.functions.numbers[0], taken.forget

    @replacing(original)
    def backend_compile_and_load(
        backend: Any, module: Any, executable_devices: Any, options: Any, host_callbacks: Any
    ) -> Any:
        if not is_proxy(backend):
            return original(backend, module, executable_devices, options, host_callbacks)
        is_asked = jax_partitioning.asks(module)
        if not (host_callbacks or is_asked or _has_tokens(module)):
            return original(backend, module, executable_devices, options, ())
        must_give = bool(host_callbacks) and not _main(module).type.results
        module = _without_tokens(module, must_give)
        if is_asked:
            jax_partitioning.name_functions(module, take_one)
        if not host_callbacks:
            return original(backend, module, executable_devices, options, ())
        if must_give:
            options.executable_build_options.allow_spmd_sharding_propagation_to_output = [False]
        taken = take(host_callbacks)
        with module.context:
            module.operation.attributes[ATTRIBUTE] = ir.StringAttr.get(callbacks_attribute(taken.functions))
        try:
            executable = original(backend, module, executable_devices, options, ())
        except BaseException:
            taken.forget()
            raise
        return _WithoutOutputs(executable) if must_give else executable

    compiler.backend_compile_and_load = backend_compile_and_load


def estimate_costs_here() -> None:
    """Let ``Lowered.cost_analysis`` ask XLA in the program's own process. Again does nothing.

    It counts the operations of a program that is not compiled; whose client does so makes no difference.

    Raises:
        PrivateNamesChangedError: this version of JAX does it in another way.
    """
    with private_names():
        from jaxlib import _jax

        original = _jax.hlo_module_cost_analysis
    if is_replaced(original):
        return

    @replacing(original)
    def hlo_module_cost_analysis(client: Any, module: Any) -> Any:
        return original(own_cpu_device().client if is_proxy(client) else client, module)

    _jax.hlo_module_cost_analysis = hlo_module_cost_analysis


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


def _main(module: Any) -> Any:
    from jax._src.lib.mlir.dialects import func

    return next(f for f in module.body.operations if isinstance(f, func.FuncOp) and f.name.value == "main")


def _has_tokens(module: Any) -> bool:
    from jax._src.lib.mlir.dialects import hlo

    kind = _main(module).type
    with module.context:
        return hlo.TokenType.get() in (*kind.inputs, *kind.results)


def _without_tokens(module: Any, must_give: bool = False) -> Any:
    """A copy of a module whose ``main`` takes and gives an empty array where it did a token.

    Such arrays are what JAX passes for tokens between programs; one is there when the program that gives it has ended.
    Only jaxlib's own clients take them for tokens, and XLA has no layouts for tokens, which the server is asked for.

    Args:
        must_give: ``main``, which gives nothing, shall give an empty array too.
    """
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import func, hlo

    written = io.BytesIO()
    module.operation.write_bytecode(written)
    with module.context, ir.Location.unknown():
        copied = ir.Module.parse(written.getvalue())
        main = _main(copied)
        token, empty = hlo.TokenType.get(), ir.RankedTensorType.get((0,), ir.IntegerType.get_signless(1))
        # As if the program that must give something had given a token.
        inputs, outputs = main.type.inputs, [token] if must_give else main.type.results
        block = main.entry_block
        for argument in block.arguments:
            if argument.type == token:
                with ir.InsertionPoint.at_block_begin(block):
                    argument.replace_all_uses_with(hlo.create_token())
                argument.set_type(empty)
        end = block.operations[len(block.operations) - 1]
        with ir.InsertionPoint(end):
            nothing = hlo.constant(ir.DenseElementsAttr.get_splat(empty, ir.BoolAttr.get(False)))
            given = [nothing if value.type == token else value for value in end.operands]
            func.ReturnOp([nothing] if must_give else given)
        end.erase()
        types = [[empty if each == token else each for each in side] for side in (inputs, outputs)]
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(*types))
        # What the tokens' attributes say (that they are tokens, shardings of rank 0) would be wrong of arrays.
        nothing_said, replicated = (
            ir.DictAttr.get({}),
            ir.DictAttr.get({"mhlo.sharding": ir.StringAttr.get("{replicated}")}),
        )
        for name, side in (("arg_attrs", inputs), ("res_attrs", outputs)):
            said = list(ir.ArrayAttr(main.attributes[name])) if name in main.attributes else [nothing_said] * len(side)
            if must_give and side is outputs:
                said = [nothing_said]
            main.attributes[name] = ir.ArrayAttr.get(
                [replicated if kind == token else each for kind, each in zip(side, said, strict=True)]
            )
        copied.operation.verify()
        return copied
