"""What a program sees of its devices."""

import jax

from value_checks.registry import EXACT, Returned, check


@check(EXACT)
def one_process_has_all_devices() -> Returned:
    devices = jax.devices()
    return {
        "ids": str([d.id for d in devices]),
        "count": (jax.device_count(), jax.local_device_count()),
        "process": (jax.process_index(), jax.process_count()),
        "same": jax.local_devices() == devices,
        "platform": devices[0].platform,
        "backend": jax.default_backend(),
        "kind": devices[0].device_kind,
        "memories": str(sorted(m.kind for m in devices[0].addressable_memories())),
        "default_memory": devices[0].default_memory().kind,
        "distinct": len(set(devices)),
    }
