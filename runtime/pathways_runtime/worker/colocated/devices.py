"""The JAX of a Python process: CPU devices of all hosts, of which this host's are its own.

A function sees what a process of a JAX program over several hosts sees: arrays over all devices, and the shards that
are here. No such program is there, so the client's coordination is made up: a service of this process is told what the
others would tell it. Computations on arrays over several hosts work as far as no device needs another host's values.

With ``pjrt``, the only module that touches JAX's private parts here. Checked with jax 0.10.2.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge
from jax.experimental.colocated_python import serialization
from jaxlib import _jax, xla_client

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.worker.protobuf import bytes_field, int_field

#: XLA numbers CPU devices ``rank * this + place``, and computes the rank of a number.
_IDS_PER_HOST = 2048
# Keys of the coordination service under which CPU clients tell of their devices, and the first of all devices.
_LOCAL_KEY = "cpu:local_topology/cpu/{}"
_GLOBAL_KEY = "cpu:global_topology/cpu"
_TIMEOUT_S = 60

#: How pickle takes an object apart.
Reduce = Callable[[Any], tuple[Any, Any]]


class HostDevices:
    """This process's JAX.

    Attributes:
        by_id: a device of JAX by the number that the client of the runtime knows it by; of all hosts.
    """

    def __init__(self, by_id: Mapping[DeviceId, Any]) -> None:
        self.by_id = by_id

    def install(self) -> None:
        """Have JAX use these devices, and pickle them by the numbers that the client knows."""
        client = next(iter(self.by_id.values())).client
        xla_bridge.register_backend_factory("cpu", lambda: client, priority=0, fail_quietly=False)
        jax.config.update("jax_platforms", "cpu")
        _pickle_by_ids(self.by_id)


def make(
    host: int,
    num_hosts: int,
    devices_per_host: int,
    socket_path: Path,
    collectives_host: str = "127.0.0.1",
    first_id: int = 0,
) -> HostDevices:
    """Make the devices as host number ``host`` sees them.

    Args:
        socket_path: where the made-up coordination listens, as long as the process lives.
        collectives_host: where devices of this host meet to compute together.
        first_id: the client's number of the first of all CPU devices.

    Raises:
        jax.errors.JaxRuntimeError: this jaxlib does not take what it is told.
    """
    if num_hosts == 1:
        client = xla_client.make_cpu_client(asynchronous=True, num_devices=devices_per_host)
    else:
        client = _make_client(host, num_hosts, devices_per_host, f"unix:{socket_path}", collectives_host)
    found = {
        DeviceId(first_id + device.process_index * devices_per_host + device.id % _IDS_PER_HOST): device
        for device in client.devices()
    }
    if sorted(found) != list(range(first_id, first_id + num_hosts * devices_per_host)):
        raise jax.errors.JaxRuntimeError(
            f"jaxlib {jax.lib.__version__} numbers the CPU devices of several hosts in an unknown way"
        )
    return HostDevices(found)


def _make_client(host: int, num_hosts: int, devices_per_host: int, address: str, collectives_host: str) -> Any:
    service = _jax.get_distributed_runtime_service(address, 1)
    runtime = _jax.get_distributed_runtime_client(
        address,
        0,
        init_timeout=_TIMEOUT_S,
        shutdown_timeout=5,
        heartbeat_timeout=10_000_000,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    # jaxlib ends the process when the service does: it is never let go of.
    _kept.append(service)
    runtime.connect()
    if host == 0:
        # The first host puts all together.
        for other in range(1, num_hosts):
            runtime.key_value_set_bytes(_LOCAL_KEY.format(other), _described(other, devices_per_host))
    else:
        nodes = (_described(other, devices_per_host) for other in range(num_hosts))
        runtime.key_value_set_bytes(_GLOBAL_KEY, b"".join(bytes_field(1, node) for node in nodes))
    # Without collectives XLA takes no program over several hosts, whatever it does. These serve devices of this host;
    # where another one would have to answer, they give up after half a minute.
    collectives = _jax.make_gloo_tcp_collectives(distributed_client=runtime, hostname=collectives_host)
    return xla_client.make_cpu_client(
        asynchronous=True,
        distributed_client=runtime,
        node_id=host,
        num_nodes=num_hosts,
        collectives=collectives,
        num_devices=devices_per_host,
        get_local_topology_timeout_minutes=1,
        get_global_topology_timeout_minutes=1,
    )


_kept: list[Any] = []


def _described(host: int, num_devices: int) -> bytes:
    """XLA's LocalTopologyProto of a host of CPU devices: node_id, boot_id, devices."""
    devices = []
    for place in range(num_devices):
        number = host * _IDS_PER_HOST + place
        # local_device_ordinal, global_device_id, vendor, and two names for people.
        fields = int_field(1, place) + int_field(4, number)
        names = (
            bytes_field(8, b"cpu"),
            bytes_field(9, b"CpuDevice(id=%d)" % number),
            bytes_field(10, b"cpu:%d" % number),
        )
        devices.append(bytes_field(3, fields + b"".join(names)))
    return int_field(1, host) + bytes_field(2, b"colocated") + b"".join(devices)


def _pickle_by_ids(by_id: Mapping[DeviceId, Any]) -> None:
    """Have ``jax.experimental.colocated_python`` name devices as the client does, in both directions."""
    ids = {device: int(number) for number, device in by_id.items()}
    shared: Callable[[Reduce], Reduce] = serialization._make_reduce_func_with_common_obj
    devices = {int(number): device for number, device in by_id.items()}

    @shared
    def reduce_mesh(mesh: Any) -> tuple[Any, Any]:
        numbers = np.vectorize(ids.__getitem__, otypes=[int])(mesh.devices)
        return serialization._unreduce_mesh, (numbers, mesh.axis_names, mesh.axis_types)

    @shared
    def reduce_device_list(listed: Any) -> tuple[Any, Any]:
        return serialization._unreduce_device_list, ([ids[device] for device in listed],)

    @shared
    def reduce_single_device_sharding(sharding: Any) -> tuple[Any, Any]:
        (device,) = sharding.device_set
        return serialization._unreduce_single_device_sharding, (ids[device], sharding.memory_kind)

    serialization._get_cpu_device_map = lambda: devices
    serialization._reduce_mesh = reduce_mesh
    serialization._reduce_device_list = reduce_device_list
    serialization._reduce_single_device_sharding = reduce_single_device_sharding
