"""Every element type that JAX has on CPU, there and back and through a program; scalars, empty arrays, odd layouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jaxlib import xla_client

from value_checks.meshes import FIRST_SLICE, NUM_DEVICES, mesh_1d, mesh_of, ramp, sharded
from value_checks.registry import EXACT, Returned, add, check

_NARROW = [
    "bool",
    "int8",
    "int16",
    "int32",
    "uint8",
    "uint16",
    "uint32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "int4",
    "uint4",
    "int2",
    "uint2",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e4m3b11fnuz",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "float8_e4m3",
    "float8_e3m4",
    "float8_e8m0fnu",
    "float4_e2m1fn",
]
#: XLA has them from jaxlib 0.12 on, and on CPU cannot compute with them.
_STORED_ONLY = ["float6_e2m3fn", "float6_e3m2fn"] if hasattr(xla_client.PrimitiveType, "F6E2M3FN") else []
_WIDE = ["int64", "uint64", "float64", "complex128"]


def _moves(name: str) -> dict[str, Returned]:
    """There and back over each way that an array takes: sharded, copied, moved."""
    highest = 2 if name in ("bool", "int2", "uint2") else 4
    host = (np.arange(NUM_DEVICES * 4) % highest).reshape(NUM_DEVICES, 4).astype(jnp.dtype(name))
    mesh = mesh_1d()
    placed = jax.device_put(host, sharded(mesh, "x"))
    return {
        "there_and_back": placed,
        "on_one_device": jax.device_put(host, jax.devices()[5]),
        "moved": jax.device_put(placed, sharded(mesh_of(FIRST_SLICE), None, "x")),
        "gathered": jax.device_put(placed, sharded(mesh)),
    }


def _one_type(name: str) -> Returned:
    """``_moves``, and through programs."""
    dtype = jnp.dtype(name)
    moves = _moves(name)
    placed = moves["there_and_back"]
    wide = jnp.complex64 if dtype.kind == "c" else jnp.float32
    return moves | {
        "computed": jax.jit(lambda x: x.astype(wide) * 2)(placed),
        "made": jax.jit(lambda x: x[::-1].T)(placed),
        "narrowed": jax.jit(lambda x: (x.astype(wide) + 1).astype(dtype))(placed) if dtype.kind != "b" else None,
    }


for _name in (*_NARROW, *_WIDE):
    add(f"element_type_{_name}", functools.partial(_one_type, _name), EXACT, needs_x64=_name in _WIDE)
for _name in _STORED_ONLY:
    add(f"element_type_{_name}", functools.partial(_moves, _name), EXACT)


@check(EXACT)
def wide_types_follow_the_mode() -> Returned:
    """With 64-bit types off JAX narrows; with them on nothing does."""
    return [
        jnp.asarray(np.arange(4)),
        jnp.asarray(np.linspace(0, 1, 4)),
        jax.jit(lambda x: x + 2**30)(2**30 - 1),
        jax.device_put(np.array([1.5 + 2j]), sharded(mesh_1d())),
        jnp.arange(3) + jnp.float32(1),
    ]


@check(EXACT, needs_x64=True)
def wide_values_keep_every_bit() -> Returned:
    big = np.array([2**62 + 1, -(2**62) - 3, 2**53 + 1], np.int64)
    fine = np.array([1 + 2**-50, np.pi, 1e300], np.float64)
    mesh = mesh_1d()
    return [
        jax.jit(lambda a, b: (a + 1, b * 3))(jax.device_put(big, sharded(mesh)), jax.device_put(fine, sharded(mesh))),
        jax.device_put(np.uint64(2**64 - 1), jax.devices()[7]),
    ]


@check(EXACT)
def scalars() -> Returned:
    mesh = mesh_1d()
    return [
        jax.device_put(3.5, sharded(mesh)),
        jax.device_put(np.int8(-3), jax.devices()[4]),
        jax.jit(lambda x: x + 1)(2),
        float(jnp.float32(1.25)),
        int(jnp.int32(7)),
        bool(jnp.bool_(True)),
        jnp.array(5).item(),
    ]


@check(EXACT)
def arrays_without_elements() -> Returned:
    mesh = mesh_1d()
    empty = np.zeros((8, 0, 3), np.float32)
    placed = jax.device_put(empty, sharded(mesh, "x"))
    return [
        placed,
        jax.device_put(placed, sharded(mesh)),
        jax.device_put(placed, sharded(mesh_of(FIRST_SLICE), "x")),
        jax.jit(lambda x: x + 1)(placed),
        jax.jit(lambda x: x.sum(1))(placed),
        jnp.zeros(0, jnp.int8),
    ]


@check(EXACT)
def strided_and_read_only_hosts() -> Returned:
    base = ramp(6, 8)
    frozen = base.copy()
    frozen.flags.writeable = False
    mesh = mesh_1d()
    arrays = [base.T, base[::2, 1::3], base[::-1], np.asfortranarray(base), frozen, np.broadcast_to(base[0], (3, 8))]
    return [jax.device_put(a, sharded(mesh)) for a in arrays] + [jax.device_put(base.T, sharded(mesh, "x"))]


@check(EXACT)
def hosts_of_odd_strides_as_arguments() -> Returned:
    base = ramp(3, 8)
    f = jax.jit(lambda x: x + 1)
    return [f(a) for a in (base[::-1], base[:, ::-2], np.broadcast_to(base[0], (4, 8)), base.T, base[:0])]


@check(EXACT)
def uneven_inside_a_program() -> Returned:
    mesh = mesh_1d()

    @jax.jit
    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        y = jax.lax.with_sharding_constraint(x * 2, sharded(mesh, "x"))
        return y.sum(0), jax.lax.with_sharding_constraint(y, sharded(mesh))

    return f(jax.device_put(ramp(11, 3), sharded(mesh)))


@check(EXACT)
def layouts() -> Returned:
    mesh = mesh_1d()
    column_major = Format(Layout((1, 0)), sharded(mesh, "x"))
    x = jax.device_put(ramp(8, 6), sharded(mesh, "x"))
    turned = jax.device_put(x, column_major)
    computed = jax.jit(lambda x: x + 1, out_shardings=column_major)(x)
    return turned, computed, str(turned.format.layout), str(computed.format.layout), jax.jit(lambda x: x * 2)(turned)


@check(EXACT)
def many_dimensions() -> Returned:
    mesh = mesh_of(tuple(range(NUM_DEVICES)), (2, 2, 2), ("a", "b", "c"))
    x = jax.device_put(ramp(2, 4, 2, 3, 4), sharded(mesh, "a", ("b",), None, None, "c"))
    return x, jax.jit(lambda x: x.transpose(4, 0, 2, 1, 3) + 1)(x), jax.device_put(x, sharded(mesh, None, ("c", "a")))
