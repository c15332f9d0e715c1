"""Train a classifier of handwritten digits on all the devices that JAX shows. Plain JAX and optax; it imports no more.

Two ways, chosen by ``--mode``:

* ``data``: every device works on its part of each batch; gradients are summed over all devices, across slices too.
* ``pipeline``: the first layers live on one slice, the last ones on another. Each stage is a program of its own;
  activations and gradients cross from slice to slice by ``jax.device_put``; the microbatches of a step are dispatched
  ahead, so that the stages work at the same time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

NUM_CLASSES = 10
NUM_HELD_OUT = 360
#: Falls to nothing over the training, by a cosine.
LEARNING_RATE = 0.1
MOMENTUM = 0.9
#: Layer widths from the 64 pixels of an image to its class; a pipeline cuts between the two halves.
FIRST_WIDTHS = (64, 128, 128)
SECOND_WIDTHS = (128, 128, NUM_CLASSES)
#: How often each program is run alone, at the end, to know how long it keeps its devices busy.
NUM_TIMED_RUNS = 9

Params = list[dict[str, jax.Array]]


class Digits(NamedTuple):
    """Images are ``(n, 64) float32`` in 0..1, labels ``(n,) int32``."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load(seed: int, num_devices: int) -> Digits:
    """The digits that scikit-learn ships, shuffled; the held-out part is cut to a multiple of ``num_devices``."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    images = (images[order] / 16.0).astype(np.float32)
    labels = labels[order].astype(np.int32)
    num_test = NUM_HELD_OUT - NUM_HELD_OUT % num_devices
    return Digits(images[NUM_HELD_OUT:], labels[NUM_HELD_OUT:], images[:num_test], labels[:num_test])


def init_layers(key: jax.Array, widths: tuple[int, ...]) -> Params:
    """Weights and biases of dense layers."""
    keys = jax.random.split(key, len(widths) - 1)
    return [
        {"w": jax.random.normal(k, (fan_in, fan_out)) / np.sqrt(fan_in), "b": jnp.zeros(fan_out)}
        for k, fan_in, fan_out in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def first_stage(params: Params, images: jax.Array) -> jax.Array:
    """Images to activations. Smooth activations: the last bits of a sum have no say in which units are on."""
    x = images
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def second_stage(params: Params, activations: jax.Array) -> jax.Array:
    """Activations to logits."""
    x = activations
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def make_optimizer(num_steps: int) -> optax.GradientTransformation:
    """Stochastic gradient descent with momentum; every parameter moves on its own, so stages may have one each."""
    return optax.sgd(optax.cosine_decay_schedule(LEARNING_RATE, num_steps), MOMENTUM)


def mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Busy:
    """How long the programs of a slice keep it busy, for the utilisation that is printed at the end.

    Each program is timed alone after the training (median of blocking runs, less the round trip of an empty program on
    the same devices) and multiplied by how often it ran. This counts what the devices compute; time in which a program
    waits for its input, or the client for an answer, is not in it.
    """

    def __init__(self, sharding: NamedSharding) -> None:
        self._sharding = sharding
        self._runs: dict[str, int] = {}
        self._seconds: dict[str, float] = {}

    def ran(self, program: str, times: int = 1) -> None:
        """Count executions of a program."""
        self._runs[program] = self._runs.get(program, 0) + times

    def measure(self, program: str, run: Callable[[], Any]) -> None:
        """Time a program alone. ``run`` starts it and returns its outputs."""
        self._seconds[program] = max(0.0, _median_seconds(run) - self._round_trip_s())

    def utilisation(self, wall_s: float) -> float:
        """Busy seconds by wall-clock seconds, at most 1: alone, a program may take longer than behind others."""
        busy_s = sum(times * self._seconds[program] for program, times in self._runs.items())
        return min(1.0, busy_s / wall_s)

    def _round_trip_s(self) -> float:
        empty = jax.jit(lambda x: x + 1, out_shardings=self._sharding)
        one = jax.device_put(np.float32(1), self._sharding)
        return _median_seconds(lambda: empty(one))


def _median_seconds(run: Callable[[], Any]) -> float:
    jax.block_until_ready(run())
    durations = []
    for _ in range(NUM_TIMED_RUNS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)


class DataParallel:
    """One program over all devices: the batch is split, the parameters are everywhere."""

    def __init__(self, key: jax.Array, devices: list[Any], num_steps: int) -> None:
        mesh = Mesh(np.array(devices), ("data",))
        self._split = NamedSharding(mesh, P("data"))
        everywhere = NamedSharding(mesh, P())
        first_key, second_key = jax.random.split(key)
        params = init_layers(first_key, FIRST_WIDTHS), init_layers(second_key, SECOND_WIDTHS)
        self._optimizer = make_optimizer(num_steps)
        self._state = jax.device_put((params, self._optimizer.init(params)), everywhere)
        self._step = jax.jit(
            self._step_fn,
            in_shardings=(everywhere, self._split, self._split),
            out_shardings=(everywhere, everywhere),
            donate_argnums=0,
        )
        self._predict = jax.jit(self._predict_fn, in_shardings=(everywhere, self._split), out_shardings=everywhere)
        self._busy = Busy(everywhere)
        self._num_slices = len({getattr(d, "slice_index", 0) for d in devices})

    def _step_fn(self, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(params: tuple[Params, Params]) -> jax.Array:
            return mean_loss(second_stage(params[1], first_stage(params[0], images)), labels)

        params, optimizer_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, optimizer_state = self._optimizer.update(grads, optimizer_state)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    def _predict_fn(self, params: tuple[Params, Params], images: jax.Array) -> jax.Array:
        return second_stage(params[1], first_stage(params[0], images)).argmax(-1)

    def step(self, images: np.ndarray, labels: np.ndarray) -> list[jax.Array]:
        """One step. Returns the losses of its parts as soon as it is dispatched; their mean is the loss of the step."""
        self._busy.ran("step")
        images, labels = jax.device_put((images, labels), self._split)
        self._state, loss = self._step(self._state, images, labels)
        return [loss]

    def predict(self, images: np.ndarray) -> np.ndarray:
        """The classes of a batch."""
        return np.asarray(self._predict(self._state[0], jax.device_put(images, self._split)))

    def utilisation(self, images: np.ndarray, labels: np.ndarray, wall_s: float) -> list[float]:
        """Per slice. The one program runs on all of them."""
        on_devices = jax.device_put((images, labels), self._split)

        def run() -> jax.Array:
            self._state, loss = self._step(self._state, *on_devices)
            return loss

        self._busy.measure("step", run)
        return [self._busy.utilisation(wall_s)] * self._num_slices


class Stage:
    """The devices of one pipeline stage, its parameters and its optimizer."""

    def __init__(self, params: Params, devices: list[Any], num_steps: int) -> None:
        mesh = Mesh(np.array(devices), ("data",))
        self.split = NamedSharding(mesh, P("data"))
        self.everywhere = NamedSharding(mesh, P())
        self.optimizer = make_optimizer(num_steps)
        self.params = jax.device_put(params, self.everywhere)
        self.optimizer_state = jax.device_put(self.optimizer.init(params), self.everywhere)
        self.busy = Busy(self.everywhere)
        self._update = jax.jit(self._update_fn, out_shardings=self.everywhere, donate_argnums=(0, 1))

    def _update_fn(self, params: Params, optimizer_state: Any, grads: list[Params]) -> tuple[Params, Any]:
        mean = jax.tree.map(lambda *parts: sum(parts) / len(parts), *grads)
        updates, optimizer_state = self.optimizer.update(mean, optimizer_state)
        return optax.apply_updates(params, updates), optimizer_state

    def update(self, grads: list[Params]) -> None:
        """Apply the mean of the microbatches' gradients."""
        self.busy.ran("update")
        self.params, self.optimizer_state = self._update(self.params, self.optimizer_state, grads)

    def measure_update(self, grads: list[Params]) -> None:
        """Time the update alone; the parameters do not matter any more afterwards."""

        def run() -> Params:
            self.params, self.optimizer_state = self._update(self.params, self.optimizer_state, grads)
            return self.params

        self.busy.measure("update", run)


class Pipeline:
    """Two stages on two slices (or on two halves of the devices), several microbatches in flight."""

    def __init__(self, key: jax.Array, devices: list[Any], num_steps: int, num_microbatches: int) -> None:
        first_devices, second_devices = two_groups(devices)
        first_key, second_key = jax.random.split(key)
        self._num_microbatches = num_microbatches
        self._first = Stage(init_layers(first_key, FIRST_WIDTHS), first_devices, num_steps)
        self._second = Stage(init_layers(second_key, SECOND_WIDTHS), second_devices, num_steps)
        first, second = self._first, self._second
        self._forward = jax.jit(first_stage, in_shardings=(first.everywhere, first.split), out_shardings=first.split)
        self._loss_and_grads = jax.jit(
            self._loss_and_grads_fn,
            in_shardings=(second.everywhere, second.split, second.split),
            out_shardings=(second.everywhere, second.everywhere, second.split),
        )
        self._backward = jax.jit(
            self._backward_fn,
            in_shardings=(first.everywhere, first.split, first.split),
            out_shardings=first.everywhere,
        )
        self._predict = jax.jit(
            lambda params, activations: second_stage(params, activations).argmax(-1),
            in_shardings=(second.everywhere, second.split),
            out_shardings=second.everywhere,
        )

    @staticmethod
    def _loss_and_grads_fn(params: Params, activations: jax.Array, labels: jax.Array) -> tuple[Any, ...]:
        def loss_fn(params: Params, activations: jax.Array) -> jax.Array:
            return mean_loss(second_stage(params, activations), labels)

        loss, (grads, activation_grads) = jax.value_and_grad(loss_fn, argnums=(0, 1))(params, activations)
        return loss, grads, activation_grads

    @staticmethod
    def _backward_fn(params: Params, images: jax.Array, activation_grads: jax.Array) -> Params:
        _, pull_back = jax.vjp(lambda p: first_stage(p, images), params)
        return pull_back(activation_grads)[0]

    def _microbatches(self, images: np.ndarray, labels: np.ndarray) -> list[tuple[jax.Array, jax.Array]]:
        parts = zip(np.split(images, self._num_microbatches), np.split(labels, self._num_microbatches), strict=True)
        return [(jax.device_put(x, self._first.split), jax.device_put(y, self._second.split)) for x, y in parts]

    def step(self, images: np.ndarray, labels: np.ndarray) -> list[jax.Array]:
        """One step, all of it dispatched before any of it has run: nothing here waits for a value."""
        first, second = self._first, self._second
        batches = self._microbatches(images, labels)
        activations = [jax.device_put(self._forward(first.params, x), second.split) for x, _ in batches]
        losses, first_grads, second_grads = [], [], []
        for (x, y), a in zip(batches, activations, strict=True):
            loss, grads, activation_grads = self._loss_and_grads(second.params, a, y)
            losses.append(loss)
            second_grads.append(grads)
            first_grads.append(self._backward(first.params, x, jax.device_put(activation_grads, first.split)))
        first.update(first_grads)
        second.update(second_grads)
        first.busy.ran("forward", self._num_microbatches)
        first.busy.ran("backward", self._num_microbatches)
        second.busy.ran("loss_and_grads", self._num_microbatches)
        return losses

    def predict(self, images: np.ndarray) -> np.ndarray:
        """The classes of a batch."""
        activations = self._forward(self._first.params, jax.device_put(images, self._first.split))
        return np.asarray(self._predict(self._second.params, jax.device_put(activations, self._second.split)))

    def utilisation(self, images: np.ndarray, labels: np.ndarray, wall_s: float) -> list[float]:
        """Per slice, in the order of the stages."""
        first, second = self._first, self._second
        x, y = self._microbatches(images, labels)[0]
        a = jax.device_put(self._forward(first.params, x), second.split)
        _, second_grads, activation_grads = self._loss_and_grads(second.params, a, y)
        back = jax.device_put(activation_grads, first.split)
        first.busy.measure("forward", lambda: self._forward(first.params, x))
        first.busy.measure("backward", lambda: self._backward(first.params, x, back))
        second.busy.measure("loss_and_grads", lambda: self._loss_and_grads(second.params, a, y))
        first.measure_update([self._backward(first.params, x, back)] * self._num_microbatches)
        second.measure_update([second_grads] * self._num_microbatches)
        return [first.busy.utilisation(wall_s), second.busy.utilisation(wall_s)]


def two_groups(devices: list[Any]) -> tuple[list[Any], list[Any]]:
    """The devices of the first two slices; two halves when there is one slice only."""
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
    if len(slices) >= 2:
        first, second = sorted(slices)[:2]
        return slices[first], slices[second]
    half = len(devices) // 2
    if half == 0:
        raise SystemExit("--mode pipeline needs at least two devices")
    return devices[:half], devices[half : 2 * half]


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("data", "pipeline"), default="data")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step, over all devices (default: 32)")
    parser.add_argument("--microbatches", type=int, default=4, help="per step, in a pipeline (default: 4)")
    parser.add_argument("--losses", type=Path, metavar="FILE.json", help="write the loss of every step here")
    args = parser.parse_args()
    for name in ("epochs", "batch_size", "microbatches"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    num_devices = len(jax.devices())
    parts = num_devices if args.mode == "data" else args.microbatches * len(two_groups(jax.devices())[0])
    if args.batch_size % parts:
        parser.error(f"--batch-size must be a multiple of {parts} with these devices and microbatches")
    return args


def main() -> None:
    """Train, print what happens, write the losses."""
    args = parse_args()
    devices = jax.devices()
    digits = load(args.seed, len(devices))
    key = jax.random.key(args.seed)
    steps_per_epoch = len(digits.train_images) // args.batch_size
    num_steps = args.epochs * steps_per_epoch
    trainer: DataParallel | Pipeline
    if args.mode == "data":
        trainer = DataParallel(key, devices, num_steps)
    else:
        trainer = Pipeline(key, devices, num_steps, args.microbatches)
    num_slices = len({getattr(d, "slice_index", 0) or 0 for d in devices})
    print(f"{len(devices)} {devices[0].platform} devices in {num_slices} slice(s), mode {args.mode}", flush=True)

    rng = np.random.default_rng(args.seed + 1)
    step_losses: list[float] = []
    accuracies: list[float] = []
    # The first epoch compiles; the others are what speed and utilisation are about.
    timed_steps, timed_wall_s = 0, 0.0
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        order = rng.permutation(len(digits.train_images))[: steps_per_epoch * args.batch_size]
        parts: list[list[jax.Array]] = []
        for batch in np.split(order, steps_per_epoch):
            parts.append(trainer.step(digits.train_images[batch], digits.train_labels[batch]))
        losses = [float(np.mean(values)) for values in jax.device_get(parts)]
        wall_s = time.perf_counter() - start
        if epoch > 1 or args.epochs == 1:
            timed_steps, timed_wall_s = timed_steps + steps_per_epoch, timed_wall_s + wall_s
        step_losses += losses
        accuracies.append(float(np.mean(trainer.predict(digits.test_images) == digits.test_labels)))
        print(
            f"epoch {epoch:3d}  loss {np.mean(losses):.5f}  held-out accuracy {accuracies[-1]:6.1%}  "
            f"{steps_per_epoch / wall_s:6.1f} steps/s",
            flush=True,
        )

    print(f"{timed_steps / timed_wall_s:.1f} steps/s{' (compilation included)' if args.epochs == 1 else ''}")
    all_steps_wall_s = timed_wall_s * len(step_losses) / timed_steps
    batch = slice(0, args.batch_size)
    shares = trainer.utilisation(digits.train_images[batch], digits.train_labels[batch], all_steps_wall_s)
    for index, share in enumerate(shares):
        name = f"slice {index}" if num_slices > 1 or args.mode == "data" else f"half {index}"
        print(f"{name}: about {share:.0%} of the time at work")
    if args.losses:
        args.losses.write_text(json.dumps({"mode": args.mode, "losses": step_losses, "accuracies": accuracies}))


if __name__ == "__main__":
    main()
