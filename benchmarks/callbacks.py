"""What a call from within a program to the program's own Python costs."""

from collections.abc import Iterator

from benchmarks.measure import (
    Figure,
    Figures,
    Row,
    local_runtime,
    median_of,
    plain_environment,
    rows,
    run_workload,
    seconds,
    workload,
)


@workload
def callback_round_trip(num_calls: int = 200, num_steps: int = 100) -> Figures:
    """Milliseconds: of a tiny program without a callback, of one with it, and of each call in one long program."""
    import jax
    import numpy as np

    scalar = jax.ShapeDtypeStruct((), np.float32)

    def called(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda value: np.asarray(value) + np.float32(1), scalar, x)

    programs = {
        "without_ms": jax.jit(lambda x: x + 1),
        "with_ms": jax.jit(called),
        "steps_ms": jax.jit(lambda x: jax.lax.fori_loop(0, num_steps, lambda _, carry: called(carry), x)),
    }
    x = jax.device_put(np.float32(0), jax.devices()[0])
    assert [float(program(x)) for program in programs.values()] == [1, 1, num_steps]
    figures = {}
    for name, program in programs.items():
        repeats = max(5, num_calls // num_steps) if name == "steps_ms" else num_calls
        for _ in range(repeats // 10):
            jax.block_until_ready(program(x))
        figures[name] = 1e3 * median_of(
            repeats, lambda program=program: seconds(lambda: jax.block_until_ready(program(x)))
        )
    figures["steps_ms"] /= num_steps
    return figures


@rows(13)
def callbacks() -> Iterator[Row]:
    """One device."""
    with local_runtime(1, 1, 1) as runtime:
        ours = run_workload("callback_round_trip", runtime.environment())
    plain = run_workload("callback_round_trip", plain_environment())
    yield Row(
        "blocking round trip of a program with a pure_callback",
        "ms",
        ours["with_ms"],
        smaller_is_better=True,
        compared=(Figure("JAX in process", plain["with_ms"]), Figure("the program without it", ours["without_ms"])),
    )
    yield Row(
        "each call of a pure_callback in a loop of 100 in one program",
        "ms",
        ours["steps_ms"],
        smaller_is_better=True,
        compared=(Figure("JAX in process", plain["steps_ms"]),),
    )
