"""Functions on hosts, for what plain JAX has nothing to compare with: where they run, and what happens when they die.

Prints JSON: ``{check: value}``, or an error in its place.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import colocated_python as cp

from programs import beside
from programs.colocated import DEVICES, EVERYWHERE, ROWS, add_one, failure_of, same, values

CHECKS: dict[str, Callable[[], Any]] = {}
#: A number for each device, so that each host's part can be seen.
PLACES = jax.device_put(np.zeros(len(DEVICES), np.int32), ROWS)


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


@cp.colocated_python
def process_ids(x: Any) -> Any:
    shards = [jax.device_put(np.array([os.getpid()], np.int32), shard.device) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


@check
def each_host_has_a_process() -> Any:
    first, again = jax.device_get(process_ids(PLACES)), jax.device_get(process_ids(PLACES))
    distinct = len(set(first.tolist()))
    return {"distinct": distinct, "same again": bool((first == again).all()), "not here": os.getpid() not in first}


@check
def a_process_sees_the_shards_of_its_host() -> Any:
    @cp.colocated_python
    def view(x: Any) -> Any:
        seen = [len(x.addressable_shards), len(jax.local_devices()), len(jax.devices()), jax.process_index()]
        shards = [jax.device_put(np.array([seen], np.int32), shard.device) for shard in x.addressable_shards]
        sharding = jax.NamedSharding(x.sharding.mesh, jax.P("x", None))
        return jax.make_array_from_single_device_arrays((x.shape[0], 4), sharding, shards)

    return jax.device_get(view(PLACES)).tolist()


@check
def devices_of_one_host_compute_together() -> Any:
    """Over the sockets of this user alone: nothing of a process listens at a port."""

    @cp.colocated_python
    def total(x: Any) -> Any:
        import psutil

        mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("here",))
        here = jax.device_put(np.arange(4.0), jax.NamedSharding(mesh, jax.P("here")))
        listening = [c for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
        value = np.array([float(here.sum()) + 100 * len(listening)], np.float32)
        shards = [jax.device_put(value, shard.device) for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    return jax.device_get(total(PLACES)).tolist()


@check
def modules_beside_the_program_are_found() -> Any:
    x = jax.device_put(np.int32(1), DEVICES[-1])
    return values(cp.colocated_python(beside.add_thousand)(x))


@check
def what_crashes_is_named_and_the_next_call_works() -> Any:
    @cp.colocated_python
    def leave(x: Any) -> Any:
        os._exit(3)

    @cp.colocated_python
    def be_killed(x: Any) -> Any:
        os.kill(os.getpid(), 9)

    here, elsewhere = (jax.device_put(np.int32(5), device) for device in (DEVICES[0], DEVICES[-1]))
    before = values(process_ids(PLACES))[1]
    known = leave.specialize(out_specs_fn=lambda x: x)
    of_exit, of_signal = failure_of(lambda: known(here)), failure_of(lambda: be_killed(here))
    poisoned = failure_of(lambda: jax.jit(lambda a: a + 1)(known(here)))
    works = [values(add_one(here)), values(add_one(elsewhere))]
    after = values(process_ids(PLACES))[1]
    return {
        "exit": re.findall(r"Python process of host-0 .* while it was to run leave: exit code 3", of_exit),
        "signal": re.findall(
            r"Python process of host-0 .* while it was to run be_killed: killed by SIGKILL", of_signal
        ),
        "poisoned": re.findall(r"host-0 .* exit code 3", poisoned) != [],
        "works": works,
        "new processes": [one != other for one, other in zip(before, after, strict=True)],
    }


@check
def what_a_function_starts_ends_with_its_process() -> Any:
    """A child that ignores signals and holds whatever it inherits; the crash must not wait for it."""

    @cp.colocated_python
    def start_and_die(x: Any) -> Any:
        if not os.fork():
            import signal
            import time

            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1)
        os._exit(4)

    @cp.colocated_python
    def start(x: Any) -> Any:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        return x * 0 + child.pid

    x = jax.device_put(np.int32(0), DEVICES[0])
    text = failure_of(lambda: start_and_die(x))
    return {"exit": re.findall(r"exit code 4", text), "child": int(start(x))}


@check
def other_versions_are_refused() -> Any:
    import platform

    original = platform.python_version
    try:
        platform.python_version = lambda: "3.99.1"
        text = failure_of(lambda: cp.colocated_python(lambda x: x)(jax.device_put(np.int32(0), DEVICES[0])))
    finally:
        platform.python_version = original
    return re.findall(r"the client has Python (\S+) and jax \S+, but host (\S+) has Python \d", text)


@check
def wrong_results_are_explained() -> Any:
    @cp.colocated_python
    def wrong(x: Any) -> Any:
        return x[:2]

    @cp.colocated_python
    def no_array(x: Any) -> Any:
        return np.zeros(3)

    @cp.colocated_python
    def unfit() -> Any:
        import a_module_that_no_host_has

        return a_module_that_no_host_has

    x = jax.device_put(np.zeros(4, np.float32), DEVICES[0])
    like_argument = [f.specialize(out_specs_fn=lambda x: x) for f in (wrong, no_array)]
    texts = [failure_of(lambda f=f: f(x)) for f in like_argument]
    texts.append(failure_of(unfit.specialize(devices=DEVICES[:1])))
    found = [
        re.search(r"result 0 of wrong is float32\[2\], but it was specialized to give float32\[4\]", texts[0]),
        re.search(r"result 0 of no_array must be a jax.Array, and is <class 'numpy.ndarray'>", texts[1]),
        re.search(r"ModuleNotFoundError: No module named 'a_module_that_no_host_has'", texts[2]),
    ]
    return [text for match, text in zip(found, texts, strict=True) if match is None]


@check
def values_stay_as_they_were_given() -> Any:
    """What a function keeps does not change when a program takes the memory over, nor when the client lets go."""
    size = 1 << 18

    @cp.colocated_python
    def keep(x: Any) -> Any:
        cp._kept = x
        return x

    @cp.colocated_python
    def kept(y: Any) -> Any:
        return cp._kept + y[:1]

    overwrite = jax.jit(lambda a: a * 0 - 5, donate_argnums=0)
    x = jax.device_put(np.arange(size, dtype=np.float32), DEVICES[0])
    y = keep(x)
    overwritten = overwrite(y)
    again = jax.device_get(kept(overwritten))
    del x, y
    churn = [same(jax.device_put(np.full(size, i, np.float32), DEVICES[0])) for i in range(8)]
    jax.block_until_ready(churn)
    later = jax.device_get(kept(overwritten))
    expected = np.arange(size, dtype=np.float32) - 5
    return [bool((again == expected).all()), bool((later == expected).all()), float(churn[3][17])]


@check
def large_values_pass_over_all_hosts() -> Any:
    x = jax.device_put(np.arange(1 << 20, dtype=np.float32), ROWS)
    for _ in range(5):
        x = add_one(x)
    whole = add_one(jax.device_put(x, EVERYWHERE))
    return bool((jax.device_get(whole) == np.arange(1 << 20, dtype=np.float32) + 6).all())


def main() -> None:
    outcome = {}
    for name, function in CHECKS.items():
        try:
            outcome[name] = function()
        except Exception as failure:
            outcome[name] = f"{type(failure).__name__}: {failure}"
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
