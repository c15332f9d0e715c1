"""A GPT of 10 million parameters, cut over every device: `fsdp` and `tensor` axes, across slices.

The model learns, byte by byte, the English of the help texts of Python itself. Parameters and optimizer state are cut
along both axes of the mesh, batches along `fsdp`; `jit` does the rest. Plain JAX and optax; it imports no more.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

VOCABULARY = 256
Params = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """Sizes: 8 layers of width 320 have 10 million parameters."""

    num_layers: int = 8
    num_heads: int = 8
    width: int = 320
    context: int = 64

    def shapes(self) -> dict[str, tuple[tuple[int, ...], P]]:
        """Each parameter's shape, and how it is cut; layers are one array, with the layer as its first dimension."""
        layers, width = self.num_layers, self.width
        return {
            "embed": ((VOCABULARY, width), P("tensor", "fsdp")),
            "place": ((self.context, width), P(None, "fsdp")),
            "qkv": ((layers, width, 3 * width), P(None, "fsdp", "tensor")),
            "attended": ((layers, width, width), P(None, "tensor", "fsdp")),
            "up": ((layers, width, 4 * width), P(None, "fsdp", "tensor")),
            "down": ((layers, 4 * width, width), P(None, "tensor", "fsdp")),
            "norms": ((layers, 2, width), P(None, None, "fsdp")),
            "last_norm": ((width,), P("fsdp")),
        }

    def init(self, key: jax.Array) -> Params:
        """Random matrices, and norms that change nothing yet."""
        shapes = self.shapes()
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        return {
            name: jnp.ones(shape) if "norm" in name else 0.02 * jax.random.normal(keys[name], shape)
            for name, (shape, _) in shapes.items()
        }

    def logits(self, params: Params, tokens: jax.Array) -> jax.Array:
        """``(batch, context) int32`` to ``(batch, context, VOCABULARY)``: what may come after each."""
        x = params["embed"][tokens] + params["place"]
        layers = {name: params[name] for name in ("qkv", "attended", "up", "down", "norms")}
        x, _ = jax.lax.scan(jax.checkpoint(self._layer), x, layers)
        return _normed(x, params["last_norm"]) @ params["embed"].T

    def _layer(self, x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        batch, context, width = x.shape
        qkv = _normed(x, layer["norms"][0]) @ layer["qkv"]
        q, k, v = qkv.reshape(batch, context, 3, self.num_heads, -1).transpose(2, 0, 1, 3, 4)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, context, width)
        x = x + attended @ layer["attended"]
        return x + jax.nn.gelu(_normed(x, layer["norms"][1]) @ layer["up"]) @ layer["down"], None


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def batches(model: Model, batch_size: int, sharding: NamedSharding) -> Iterator[jax.Array]:
    """``(batch_size, context + 1)`` bytes from anywhere in the text, the same ones in every run."""
    text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace"), np.uint8)
    random = np.random.default_rng(0)
    while True:
        starts = random.integers(0, len(text) - model.context, batch_size)
        rows = text[starts[:, None] + np.arange(model.context + 1)]
        yield jax.device_put(rows.astype(np.int32), sharding)


def make_mesh(tensor: int) -> Mesh:
    """All devices: `tensor` stays within a host where it can, `fsdp` spans hosts and slices."""
    devices = jax.devices()
    if len(devices) % tensor:
        raise SystemExit(f"--tensor {tensor} does not divide the {len(devices)} devices")
    return Mesh(np.array(devices).reshape(-1, tensor), ("fsdp", "tensor"))


def train(model: Model, num_steps: int, batch_size: int, tensor: int) -> list[float]:
    """The loss of every step."""
    mesh = make_mesh(tensor)
    laid = {name: NamedSharding(mesh, spec) for name, (_, spec) in model.shapes().items()}
    optimizer = optax.adamw(optax.warmup_constant_schedule(0.0, 1e-3, 10), weight_decay=0.01)

    params = jax.jit(model.init, out_shardings=laid)(jax.random.key(0))
    # Moments lie as their parameters do, all else of the optimizer everywhere.
    state_laid = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        laid,
        transform_non_params=lambda _: NamedSharding(mesh, P()),
    )
    state = jax.jit(optimizer.init, out_shardings=state_laid)(params)
    print(f"{sum(p.size for p in params.values()) / 1e6:.1f} million parameters on {dict(mesh.shape)}", flush=True)

    def loss_of(params: Params, rows: jax.Array) -> jax.Array:
        logits = model.logits(params, rows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    def step(params: Params, state: Any, rows: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, rows)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(laid, state_laid, NamedSharding(mesh, P())))
    losses = []
    for number, rows in zip(range(num_steps), batches(model, batch_size, NamedSharding(mesh, P("fsdp"))), strict=False):
        began_s = time.perf_counter()
        params, state, loss = jitted(params, state, rows)
        losses.append(float(loss))
        print(f"step {number}: loss {losses[-1]:.4f} ({time.perf_counter() - began_s:.2f} s)", flush=True)
    return losses


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, metavar="N")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="rows in each step; what fsdp has divides it")
    parser.add_argument("--tensor", type=int, default=2, metavar="N", help="devices that share each matrix")
    parser.add_argument("--layers", type=int, default=Model.num_layers, metavar="N")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write the losses here, as JSON")
    arguments = parser.parse_args()
    losses = train(Model(num_layers=arguments.layers), arguments.steps, arguments.batch, arguments.tensor)
    if arguments.losses is not None:
        arguments.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
