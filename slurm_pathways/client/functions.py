"""Functions of colocated Python: each says where it was pickled, so that hosts of other versions refuse it by name."""

import platform
import sys
from pathlib import Path

from pathways_runtime.wire.colocated import Origin, with_origin
from slurm_pathways.client import jax_functions


def with_this_origin(pickled: bytes) -> bytes:
    """What is sent in the place of a pickled function."""
    # The folder of the program, which "" stands for, is where hosts look too.
    folders = tuple(str(Path(folder).absolute()) for folder in sys.path)
    origin = Origin(platform.python_version(), jax_functions.version(), folders, jax_functions.has_x64())
    return with_origin(pickled, origin)
