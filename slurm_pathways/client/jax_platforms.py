"""The names of the proxy's platform; a part of ``jax_adapter``.

JAX knows a backend by the name that it was registered under, ``proxy``, and asks for it in places by what its devices
are: ``gpu`` or ``cuda`` where a callback is lowered, ``tpu`` in ``jax.devices("tpu")``.
"""

from typing import Any

from slurm_pathways.client.jax_adapter import is_proxy, is_replaced, private_names, replacing


def know_by_platform() -> None:
    """Let JAX find the proxy's backend by its platform, where no other backend has that name. Again does nothing.

    Raises:
        PrivateNamesChangedError: this version of JAX does it in another way.
    """
    with private_names():
        from jax._src import xla_bridge

        canonicalize = xla_bridge.canonicalize_platform
        find, aliases = xla_bridge._get_backend_uncached, xla_bridge._alias_to_platforms
    if is_replaced(canonicalize):
        return

    def by_platform(names: Any) -> Any:
        backends = xla_bridge.backends()
        if any(name in backends for name in names):
            return None
        return next((b for b in backends.values() if is_proxy(b) and _platform(b) in names), None)

    @replacing(canonicalize)
    def canonicalize_platform(platform: str) -> str:
        # An alias, gpu, stands for several platforms; other names are what they are.
        backend = by_platform(aliases[platform]) if platform in aliases else None
        return str(canonicalize(platform)) if backend is None else _platform(backend)

    def get_backend(platform: Any = None) -> Any:
        backend = by_platform(aliases.get(platform, [platform])) if isinstance(platform, str) else None
        return find(platform) if backend is None else backend

    xla_bridge.canonicalize_platform = canonicalize_platform
    xla_bridge._get_backend_uncached = get_backend


def _platform(backend: Any) -> str:
    """As it is where programs are lowered: ``platform`` says gpu for each kind of them."""
    return str(getattr(backend, "_raw_platform", backend.platform))
