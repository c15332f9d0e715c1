"""What workers with NVIDIA GPUs need besides: which GPUs are theirs, how memory is taken, how NCCL finds its way.

Nothing here loads JAX or CUDA: the supervisor decides before its executor starts.
"""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The platform's name at PJRT.
PLATFORM = "cuda"

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
#: CUDA numbers GPUs by speed unless told to go by their place on the bus, as the driver's files do.
_DEVICE_ORDER = "CUDA_DEVICE_ORDER"
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
#: What jaxlib reads of how memory is taken; it is about the devices, not about the user's program.
_MEMORY_PREFIXES = ("XLA_PYTHON_CLIENT_", "XLA_CLIENT_MEM_FRACTION")
_PREALLOCATE = "preallocate"
_PREALLOCATE_VARIABLE = "XLA_PYTHON_CLIENT_PREALLOCATE"

#: Of the driver: a folder for each GPU, named after its place on the bus.
DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")


class DevicesMissing(Exception):
    """This process may use fewer GPUs than it should; the message says how many, and who says so."""


def device_names(folder: Path = DRIVER_FOLDER) -> list[str]:
    """The models of the machine's GPUs in bus order, as the driver names them; empty without a driver."""
    try:
        cards = sorted(folder.iterdir())
    except OSError:
        return []
    return [_model(card / "information") for card in cards]


def _model(path: Path) -> str:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "Model":
            return value.strip()
    return PLATFORM


def allowed_devices(environ: Mapping[str, str], folder: Path = DRIVER_FOLDER) -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them: all where it is not set."""
    given = environ.get(VISIBLE_DEVICES)
    if given is None:
        return [str(number) for number in range(len(device_names(folder)))]
    # CUDA ends the list at the first that it does not know, by convention -1 or NoDevFiles.
    devices: list[str] = []
    for name in (part.strip() for part in given.split(",")):
        if not name or name == "-1" or name == "NoDevFiles":
            break
        devices.append(name)
    return devices


def executor_environment(
    environ: Mapping[str, str],
    first_device: int,
    num_devices: int,
    address: str | None,
    folder: Path = DRIVER_FOLDER,
) -> dict[str, str]:
    """Variables of an executor with GPUs.

    Args:
        first_device: its first among those that this process may use; several workers share a machine's.
        address: of this host, for other hosts; None where there are none.

    Raises:
        DevicesMissing: see the class.
    """
    allowed = allowed_devices(environ, folder)
    mine = allowed[first_device : first_device + num_devices]
    if len(mine) < num_devices:
        raise DevicesMissing(
            f"GPUs {first_device} to {first_device + num_devices - 1} are this host's, and "
            f"{_shortage(environ, len(allowed), folder)}"
        )
    variables = {name: value for name, value in environ.items() if name.startswith(_MEMORY_PREFIXES)}
    variables[VISIBLE_DEVICES] = ",".join(mine)
    variables[_DEVICE_ORDER] = environ.get(_DEVICE_ORDER, "PCI_BUS_ID")
    if address is not None and _NCCL_INTERFACE not in environ:
        interface = _interface_with(address)
        if interface is not None:
            # Exactly this one: NCCL takes names for prefixes.
            variables[_NCCL_INTERFACE] = f"={interface}"
    return variables


def _interface_with(address: str) -> str | None:
    """The interface that has an address; None if none of this machine has."""
    # Here: few hosts have GPUs and others to talk to, and every supervisor imports this module.
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family in families and entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def client_options(options: Mapping[str, Any], environ: Mapping[str, str], num_slices: int) -> dict[str, Any]:
    """Options of a PJRT client, from those that jaxlib has made of the environment.

    A client takes three quarters of a GPU's memory when it is made. With several slices an executor may have several
    clients on the same GPUs, one for each world, so there memory is taken as it is needed, unless the user says
    otherwise.
    """
    chosen = dict(options)
    if num_slices > 1 and _PREALLOCATE_VARIABLE not in environ:
        chosen[_PREALLOCATE] = False
    return chosen


def missing(environ: Mapping[str, str], num_devices: int, folder: Path = DRIVER_FOLDER) -> str | None:
    """Why ``num_devices`` GPUs cannot be used on this machine, in words; None if they can."""
    num_allowed = len(allowed_devices(environ, folder))
    if num_allowed >= num_devices:
        return None
    needed = "1 GPU is" if num_devices == 1 else f"{num_devices} GPUs are"
    return f"{needed} needed, and {_shortage(environ, num_allowed, folder)}"


def _shortage(environ: Mapping[str, str], num_allowed: int, folder: Path) -> str:
    num_devices = len(device_names(folder))
    has = f"this machine has {num_devices}" if num_devices else f"this machine has no NVIDIA driver (no {folder})"
    if VISIBLE_DEVICES not in environ:
        return has
    return f"{has}, and {VISIBLE_DEVICES}={environ[VISIBLE_DEVICES]} allows {num_allowed}"
