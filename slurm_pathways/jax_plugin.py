"""The ``jax_plugins`` entry point: JAX imports this module and calls ``initialize`` before it makes its backends.

Every JAX program of an environment in which Slurm Pathways is installed comes through here, so nothing is imported or
done unless the program asks for the ``proxy`` backend.
"""

import sys

#: What ``JAX_PLATFORMS`` names, and the name that the backend is registered under.
BACKEND_NAME = "proxy"


def initialize() -> None:
    """Register the ``proxy`` backend if ``JAX_PLATFORMS`` (or ``jax.config.jax_platforms``) names it.

    May be called more than once. ``pathwaysutils.initialize()`` registers a backend of the same name; it may come
    before or after, and either backend connects to the same place.
    """
    platforms = sys.modules["jax"].config.jax_platforms if "jax" in sys.modules else None
    if BACKEND_NAME not in (platforms or "").split(","):
        return
    from slurm_pathways.client import registration

    registration.register(BACKEND_NAME)
