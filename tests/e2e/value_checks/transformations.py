"""jit, grad, vmap and their relatives; donation; ahead-of-time compilation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from value_checks.meshes import FIRST_SLICE, mesh_1d, mesh_2d, mesh_of, noise, ramp, sharded
from value_checks.registry import EXACT, Returned, check


@check(EXACT)
def jit_add() -> Returned:
    return jax.jit(lambda x: x + 1)(ramp(4, 3))


@check(EXACT)
def eager_operations() -> Returned:
    x = jnp.arange(12.0).reshape(3, 4)
    return x, x.T, x[1], x[:, 2], x.at[0, 1].set(9), x.sum(), x.astype(jnp.int32), -x, x > 3, jnp.where(x > 3, x, 0)


@check()
def matmul_sharded_two_ways() -> Returned:
    mesh = mesh_2d()
    a = jax.device_put(noise(8, 16), sharded(mesh, "x", "y"))
    b = jax.device_put(noise(16, 4, seed=1), sharded(mesh, "y", None))
    return jax.jit(jnp.matmul)(a, b), jax.jit(jnp.matmul, out_shardings=sharded(mesh))(a, b)


@check()
def grad_of_mlp_on_a_2d_mesh() -> Returned:
    mesh = mesh_2d()
    params = {
        "w1": jax.device_put(noise(16, 32), sharded(mesh, None, "y")),
        "w2": jax.device_put(noise(32, 4, seed=1), sharded(mesh, "y", None)),
    }
    x = jax.device_put(noise(8, 16, seed=2), sharded(mesh, "x", None))

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"]) ** 2)

    shardings = jax.tree.map(lambda p: p.sharding, params)
    return jax.jit(jax.value_and_grad(loss), out_shardings=(sharded(mesh), shardings))(params, x)


@check()
def higher_derivatives() -> Returned:
    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x) * x**2)

    x = noise(5)
    return jax.jit(jax.hessian(f))(x), jax.jit(lambda x: jax.jvp(f, (x,), (x * 0 + 1,)))(x), jax.grad(f)(x)


@check()
def vmap_of_a_solver() -> Returned:
    def steps(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 20, lambda _, x: x - 0.1 * (a @ x - b), jnp.zeros_like(b))

    return jax.jit(jax.vmap(steps))(np.eye(3, dtype=np.float32)[None].repeat(4, 0), noise(4, 3))


@check()
def custom_derivatives_and_remat() -> Returned:
    @jax.custom_vjp
    def clip_gradient(x: jax.Array) -> jax.Array:
        return x

    clip_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))

    @jax.checkpoint
    def block(x: jax.Array) -> jax.Array:
        return jnp.sin(jnp.cos(clip_gradient(x)))

    return jax.jit(jax.value_and_grad(lambda x: jnp.sum(block(block(x)) ** 3)))(noise(6))


@check(EXACT)
def trees_in_and_out() -> Returned:
    @jax.jit
    def f(tree: dict[str, object]) -> dict[str, object]:
        return {"doubled": jax.tree.map(lambda x: x * 2, tree), "none": None, "empty": (), "one": 1.5}

    return f({"a": ramp(3), "b": [ramp(2, 2), 7], "c": (np.int8(3), True)})


@check(EXACT)
def weak_types_and_static_arguments() -> Returned:
    f = jax.jit(lambda x, n: x * n, static_argnums=1)
    return f(np.float16(2), 3), f(1, 3), jax.jit(lambda x: x)(2.5), jax.jit(lambda x: x + 1)(jnp.int8(3)), jnp.array(4)


@check(EXACT)
def outputs_without_inputs() -> Returned:
    mesh = mesh_1d()
    iota = jax.jit(lambda: jnp.arange(16) * 3, out_shardings=sharded(mesh, "x"))
    return iota(), jnp.zeros((3, 0)), jnp.eye(3), jax.jit(lambda: ())()


@check(EXACT)
def unused_and_repeated_arguments() -> Returned:
    x = jax.device_put(ramp(8), sharded(mesh_1d(), "x"))
    return jax.jit(lambda a, b, c: (c, a + c, 5))(x, jnp.ones(100), x)


@check(EXACT)
def closed_over_arrays() -> Returned:
    mesh = mesh_1d()
    table = jax.device_put(ramp(8, 2), sharded(mesh, "x"))
    return jax.jit(lambda x: x + table)(jax.device_put(ramp(8, 2), sharded(mesh)))


@check(EXACT)
def a_cached_program_meets_other_shardings() -> Returned:
    """One jitted function, called with arguments that lie in ever other places."""
    f = jax.jit(lambda x: x * 2 + 1)
    x = ramp(8, 8)
    first = mesh_of(FIRST_SLICE)
    return [
        f(jax.device_put(x, s))
        for s in (sharded(mesh_1d(), "x"), sharded(mesh_1d(), None, "x"), sharded(first, "x"), sharded(mesh_1d()))
    ]


@check(EXACT)
def jit_moves_its_arguments_to_in_shardings() -> Returned:
    mesh = mesh_1d()
    f = jax.jit(lambda x, y: (x + y, x - y), in_shardings=(sharded(mesh, "x"), sharded(mesh, None, "x")))
    uncommitted = jnp.asarray(ramp(8, 8))
    return f(uncommitted, ramp(8, 8)), f(uncommitted + 1, uncommitted)


@check(EXACT)
def donation_in_a_chain() -> Returned:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    start = jax.device_put(ramp(8, 4), sharded(mesh_1d(), "x"))
    x = start
    for _ in range(10):
        x = step(x)
    return x, start.is_deleted(), x.is_deleted()


@check(EXACT)
def donation_leaves_aliases_alone() -> Returned:
    """What was made from an array by moving it must survive when the array itself is donated."""
    mesh = mesh_1d()
    source = jax.device_put(ramp(8, 8), sharded(mesh, "x"))
    moved = [
        jax.device_put(source, sharded(mesh_of((0, 1, 2, 3)), "x")),
        jax.device_put(source, sharded(mesh)),
        jax.device_put(source, sharded(mesh_of((7, 6, 5, 4, 3, 2, 1, 0)), "x")),
        source.addressable_shards[3].data + 0,
    ]
    result = jax.jit(lambda x: x * 10, donate_argnums=0)(source)
    return moved, result


@check(EXACT)
def donated_results_that_somebody_holds() -> Returned:
    """Parts of a result of a program over all hosts are in use when the result is donated: it is copied."""
    step = jax.jit(lambda x, same: (x + 1, same), donate_argnums=(0, 1))
    mesh = mesh_1d()
    x, same = jax.device_put((ramp(8, 4), ramp(5)), (sharded(mesh, "x"), sharded(mesh)))
    held, used = [], []
    for _ in range(3):
        # On plain JAX these are gone once their arrays are donated, so that is when they are used last.
        parts = [x.addressable_shards[5].data, same.addressable_shards[2].data]
        used += [part + 0 for part in parts]
        held += parts
        x, same = step(x, same)
    return x, same, used


@check(EXACT)
def some_arguments_donated() -> Returned:
    f = jax.jit(lambda a, b, c: (a + b, b * c, c - a), donate_argnames=("a", "c"))
    arrays = [jax.device_put(ramp(16) + i, sharded(mesh_1d(), "x")) for i in range(3)]
    return f(*arrays), [a.is_deleted() for a in arrays], arrays[1]


@check(EXACT)
def a_deleted_array_is_an_error() -> Returned:
    x = jax.device_put(ramp(4), jax.devices()[3])
    x.delete()
    try:
        jax.block_until_ready(x + 1)
    except RuntimeError as error:
        return "deleted" in str(error)
    return "no error"


@check(EXACT)
def ahead_of_time() -> Returned:
    mesh = mesh_1d()
    x = jax.device_put(ramp(16, 4), sharded(mesh, "x"))
    compiled = jax.jit(lambda x: x @ x.T, out_shardings=sharded(mesh, None, "x")).lower(x).compile()
    memory = compiled.memory_analysis()
    return {
        "value": compiled(x),
        "flops": compiled.cost_analysis()["flops"],
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "is_hlo": "HloModule" in compiled.as_text(),
        "in": str(compiled.input_shardings[0][0].spec),
        "out": str(compiled.output_shardings.spec),
    }


@check(EXACT)
def shapes_without_values() -> Returned:
    shape = jax.eval_shape(functools.partial(jnp.einsum, "ij,jk->ik"), jnp.ones((2, 3)), jnp.ones((3, 5)))
    return str(shape.shape), str(shape.dtype)


@check()
def a_training_loop_with_donated_state() -> Returned:
    mesh = mesh_2d()
    state = jax.device_put(
        {"w": noise(8, 8), "m": np.zeros((8, 8), np.float32)},
        {"w": sharded(mesh, "x", "y"), "m": sharded(mesh, "x", "y")},
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - 1) ** 2))(state["w"])
        m = 0.9 * state["m"] + grad
        return {"w": state["w"] - 0.05 * m, "m": m}, loss

    losses = []
    for i in range(8):
        state, loss = step(state, jax.device_put(noise(16, 8, seed=i), sharded(mesh, "x")))
        losses.append(loss)
    return state, losses


@check()
def exported_programs_are_called() -> Returned:
    place = sharded(mesh_1d(), "x")
    program = jax.jit(lambda x: jnp.cumsum(x) * 2, in_shardings=place, out_shardings=place)
    exported = export.export(program)(jax.device_put(ramp(16), place))
    called = jax.jit(exported.call, in_shardings=place)(jax.device_put(ramp(16) + 1, place))
    return called, exported.nr_devices, exported.platforms[0]
