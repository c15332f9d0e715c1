"""torchax: a model of PyTorch is trained on the runtime's devices, its data cut over them."""

from typing import Any

import jax
import optax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from checks import mesh

_overload_of = torch._ops.OpOverloadPacket.__getattr__


def _overload_or_name(packet: Any, name: str) -> Any:
    """torchax 0.0.13 names overloads that torch 2.13 has not any more: they were for dimensions with names."""
    try:
        return _overload_of(packet, name)
    except AttributeError:
        if "dimname" in name.lower() or "names" in name:
            return f"{packet}.{name}"
        raise


torch._ops.OpOverloadPacket.__getattr__ = _overload_or_name

import torchax  # noqa: E402
from torchax import interop  # noqa: E402
from torchax.train import make_train_step  # noqa: E402


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.Linear(512, 32)
        )
        self.norm = torch.nn.LayerNorm(32)
        self.head = torch.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.body(x))))


def _data(key: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(key)
    x = torch.randn(16, 1, 8, 8, generator=generator)
    return x, x.sum((1, 2, 3)).gt(0).long() + 2 * x[:, 0, 0, 0].gt(0).long()


def _net() -> _Net:
    torch.manual_seed(0)
    return _Net()


def runs_eagerly() -> Any:
    x, _ = _data(0)
    net = _net()
    with torch.no_grad():
        wanted = net(x)
    with torchax.default_env():
        got = net.to("jax")(x.to("jax"))
        return {
            "here": got.detach().cpu().numpy(),
            "is_torchs": bool(torch.allclose(got.detach().cpu(), wanted, atol=1e-4)),
        }


def trains() -> Any:
    environment = torchax.default_env()
    on = mesh(8)
    rows, everywhere = NamedSharding(on, PartitionSpec("data")), NamedSharding(on, PartitionSpec())
    with environment:
        net = _net().to("jax")
        jitted = interop.JittableModule(net)
        weights, buffers = interop.torch_view(
            jax.device_put(interop.jax_view((jitted.params, jitted.buffers)), everywhere)
        )
        optimizer = optax.adam(1e-2)
        state = interop.call_jax(optimizer.init, weights)

        def model(weights: Any, buffers: Any, x: Any) -> Any:
            return jitted.functional_call("forward", weights, buffers, x)

        step = interop.jax_jit(make_train_step(model, torch.nn.functional.cross_entropy, optimizer))
        losses = []
        for key in range(6):
            x, y = (interop.torch_view(jax.device_put(each.numpy(), rows)) for each in _data(key))
            loss, weights, state = step(weights, buffers, state, x, y)
            losses.append(float(interop.jax_view(loss)))
    return losses


CHECKS = (runs_eagerly, trains)
