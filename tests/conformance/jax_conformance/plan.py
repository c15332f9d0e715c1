"""Which files of JAX's tests run where."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Target(enum.Enum):
    """What tests run against; the value is its name in files and tables."""

    PLAIN = "plain"
    ONE_SLICE = "1x4x2"
    TWO_SLICES = "2x2x2"

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Slices, hosts per slice, devices per host; None without a runtime."""
        return None if self is Target.PLAIN else tuple(int(n) for n in self.value.split("x"))  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class TestFile:
    """A file of JAX's tests.

    Attributes:
        name: without ``_test.py``.
        sample: how many of its tests run, chosen by a hash of their names; 0: all.
        makes_own_meshes: from explicit devices; ``jax.make_mesh`` refuses devices of several slices.
    """

    __test__ = False

    name: str
    sample: int = 0
    makes_own_meshes: bool = False

    @property
    def file_name(self) -> str:
        """Its name in JAX's folder of tests."""
        return f"{self.name}_test.py"

    @property
    def targets(self) -> tuple[Target, ...]:
        """Where it runs, plain JAX first."""
        return (Target.PLAIN, Target.ONE_SLICE, *((Target.TWO_SLICES,) if self.makes_own_meshes else ()))


#: In order of value. The large ones are mostly about tracing, and of those about numbers a sample says enough.
FILES: tuple[TestFile, ...] = (
    TestFile("array"),
    TestFile("multi_device", makes_own_meshes=True),
    TestFile("memories"),
    TestFile("layout"),
    TestFile("colocated_python", makes_own_meshes=True),
    TestFile("aot"),
    TestFile("string_array"),
    TestFile("error_check"),
    TestFile("pjit"),
    TestFile("shard_map"),
    TestFile("mutable_array"),
    TestFile("pmap", makes_own_meshes=True),
    TestFile("jaxpr_effects"),
    TestFile("api", sample=300),
    TestFile("lax_control_flow", sample=150),
    TestFile("random", sample=150),
    TestFile("export"),
    TestFile("python_callback"),
    TestFile("debugging_primitives"),
    TestFile("profiler"),
    TestFile("clear_backends"),
    TestFile("custom_partitioning"),
    TestFile("custom_partitioning_sharding_rule"),
    TestFile("shard_alike"),
    TestFile("linalg_sharding"),
    TestFile("multibackend"),
    TestFile("async_collectives"),
    TestFile("ffi"),
    TestFile("debug_nans"),
    TestFile("checkify"),
    TestFile("transfer_guard"),
    TestFile("pickle"),
    TestFile("array_interoperability"),
    TestFile("linalg", sample=100),
    TestFile("lax_numpy", sample=150),
    TestFile("lax", sample=150),
    TestFile("hijax", sample=100),
    TestFile("custom_api", sample=100),
    TestFile("batching", sample=60),
    TestFile("debugger"),
    TestFile("device"),
    TestFile("extend"),
    TestFile("heap_profiler"),
    TestFile("jax_jit"),
    TestFile("x64_context"),
    TestFile("xla_metadata"),
    TestFile("scheduling_groups"),
    TestFile("garbage_collection_guard"),
    TestFile("key_reuse", sample=60),
    TestFile("stateful_rng", sample=60),
    TestFile("random_lax", sample=60),
    TestFile("lax_numpy_indexing", sample=60),
    TestFile("lax_numpy_reducers", sample=60),
    TestFile("lax_scipy", sample=60),
    TestFile("nn", sample=60),
    TestFile("fft", sample=60),
    TestFile("shape_poly", sample=60),
)

#: Files that one might look for among these, and why they are not there; the page says so.
LEFT_OUT: dict[str, str] = {
    "state": "imports a module of JAX that installed ones do not have; references are in `mutable_array`, too",
    "compilation_cache": "is about a cache of the client's, which the plugin turns off: workers have one",
    "sparse_bcoo_bcsr": "needs gigabytes of memory",
    "buffer_callback": "is about calls that are refused ([troubleshooting](troubleshooting.md#while-it-runs))",
}


class UnknownFileError(Exception):
    """A name that no file of the plan has."""


def chosen(names: Sequence[str]) -> tuple[TestFile, ...]:
    """The files of these names (``pjit`` or ``pjit_test.py``) in the order given; all of them when there are none.

    Raises:
        UnknownFileError: a name is unknown; the message lists those that are not.
    """
    by_name = {file.name: file for file in FILES}
    wanted = [name.removesuffix("_test.py") for name in names]
    for name in wanted:
        if name not in by_name:
            raise UnknownFileError(f"{name} is not a file of the plan; it has {', '.join(by_name)}")
    return tuple(by_name[name] for name in wanted) or FILES


def steps(files: Sequence[TestFile], targets: Sequence[Target]) -> list[tuple[TestFile, Target]]:
    """File by file, so that an interrupted run has whole files to compare."""
    return [(file, target) for file in files for target in file.targets if target in targets]
