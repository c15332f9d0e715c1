"""Named checks in plain JAX whose values are compared between a plain 8-device CPU process and the runtime.

``python -m value_checks --output FILE.json`` runs them and writes what they return. A check is a function without
arguments that returns a tree of arrays, numbers and strings; of every ``jax.Array`` its placement and all shards
are kept too.
"""

from value_checks import (
    collectives,
    control,
    devices,
    elements,
    errors,
    in_the_client,
    linear_algebra,
    placement,
    randomness,
    transformations,
)
from value_checks.registry import CHECKS, Check

__all__ = [
    "CHECKS",
    "Check",
    "collectives",
    "control",
    "devices",
    "elements",
    "errors",
    "in_the_client",
    "linear_algebra",
    "placement",
    "randomness",
    "transformations",
]
