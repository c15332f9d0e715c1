"""The private part of JAX that makes programs of functions (colocated Python); a part of ``jax_adapter``."""

from collections.abc import Callable
from typing import Any

import jax

from slurm_pathways.client.jax_adapter import is_replaced, private_names, replacing


def version() -> str:
    """JAX's."""
    return str(jax.__version__)


def has_x64() -> bool:
    """Whether JAX computes with 64 bits here and now."""
    return bool(jax.config.jax_enable_x64)


def replace_pickles(replace: Callable[[bytes], bytes]) -> None:
    """Have ``replace`` say what is sent in the place of each pickled function. Again does nothing.

    ``jax.experimental.colocated_python`` itself, which most programs do without, is not imported for it.

    Raises:
        PrivateNamesChangedError: this version of JAX does it in another way.
    """
    with private_names():
        from jax._src.lib import _jax

        programs = _jax.ifrt_programs
        original = programs.make_colocated_python_program
    if is_replaced(original):
        return

    @replacing(original)
    def make_colocated_python_program(name: str, pickled: bytes, *specialization: Any) -> Any:
        return original(name, replace(pickled), *specialization)

    programs.make_colocated_python_program = make_colocated_python_program
