"""The environment of a client: what makes an unmodified JAX program speak to a proxy.

What the user has set is kept or refused, never replaced in silence. The workers' environment has none of the client's
JAX and XLA settings: those belong to the program, and reach the workers inside what it compiles.
"""

from collections.abc import Mapping
from pathlib import Path

from slurm_pathways.config import RUN_DIR_VARIABLE, ConfigurationError

JAX_PLATFORMS = "JAX_PLATFORMS"
JAX_BACKEND_TARGET = "JAX_BACKEND_TARGET"

#: jaxlib's client speaks plaintext gRPC only when this says "true"; without it, it tries ALTS once a second for ever.
_INSECURE_CREDENTIALS = "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"
#: jaxlib logs a warning with a stack trace when the connection is closed at exit. 2 leaves errors.
_CPP_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_CPP_LOG_LEVEL_ERRORS = "2"

#: jaxlib's client puts every fetched value together in fresh memory, twice, and most of a fetch is page faults then.
#: With huge pages, and memory that is used again (up to 1 GiB stays with the process; larger pieces are mapped),
#: a fetch takes a quarter. One arena: only there can any thread use pieces of more than 64 MiB again.
_GLIBC_TUNABLES = "GLIBC_TUNABLES"
_GLIBC_REUSES_MEMORY = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        "glibc.malloc.arena_max=1",
        f"glibc.malloc.mmap_threshold={1 << 30}",
        f"glibc.malloc.trim_threshold={1 << 30}",
    )
)
#: Later jaxlibs have this by default: a program that makes arrays of host values faster than they travel then waits in
#: ``device_put``, while by default it goes on and its memory grows.
_MAX_UPLOADS = "IFRT_PROXY_GRPC_MAX_ONGOING_HOST_BUFFER_STORES"
_MAX_UPLOADS_DEFAULT = "64"

#: Settings of the client that must not act on our processes: they would change what runs there or how it prints.
_NOT_FOR_COMPONENTS = frozenset(
    {"XLA_FLAGS", "PYTHONWARNINGS", "PYTHONINSPECT", "PYTHONOPTIMIZE", "PYTHONSTARTUP", _INSECURE_CREDENTIALS}
)


def check_client_environment(environ: Mapping[str, str]) -> None:
    """Refuse what the user has set and what contradicts a run.

    Raises:
        ConfigurationError: a variable names another backend or another server.
    """
    if RUN_DIR_VARIABLE in environ:
        raise ConfigurationError(
            f"this is the program of a run already ({RUN_DIR_VARIABLE}={environ[RUN_DIR_VARIABLE]}): "
            "a run inside a run is not supported; start programs here directly"
        )
    platforms = environ.get(JAX_PLATFORMS, "")
    if platforms and "proxy" not in [name.strip() for name in platforms.split(",")]:
        raise ConfigurationError(
            f"{JAX_PLATFORMS}={platforms} is set: with it the program would not use the devices of the run. Allowed "
            f"are proxy and lists with proxy in them, like proxy,cpu. Unset it (the run sets {JAX_PLATFORMS}=proxy)"
        )
    if environ.get(JAX_BACKEND_TARGET):
        raise ConfigurationError(
            f"{JAX_BACKEND_TARGET}={environ[JAX_BACKEND_TARGET]} is set: the program would connect there and not to "
            "this run. Unset it"
        )
    credentials = environ.get(_INSECURE_CREDENTIALS, "true")
    if credentials != "true":
        raise ConfigurationError(
            f"{_INSECURE_CREDENTIALS}={credentials} is set: the program could not connect to the run's Unix socket. "
            "Allowed is true. Unset it"
        )


def backend_target(proxy_address: str) -> str:
    """What ``JAX_BACKEND_TARGET`` says of a proxy."""
    return f"grpc://{proxy_address}"


def client_environment(environ: Mapping[str, str], proxy_address: str, run_dir: Path) -> dict[str, str]:
    """The whole environment of a client of the proxy that listens at ``proxy_address`` (``unix:/path``).

    ``environ`` is taken to have passed ``check_client_environment``; where it has not, the run's values win.
    """
    result = dict(environ)
    platforms = [name.strip() for name in environ.get(JAX_PLATFORMS, "").split(",")]
    if "proxy" not in platforms:
        result[JAX_PLATFORMS] = "proxy"
    result[JAX_BACKEND_TARGET] = backend_target(proxy_address)
    result[_INSECURE_CREDENTIALS] = "true"
    result[RUN_DIR_VARIABLE] = str(run_dir)
    result.setdefault(_CPP_LOG_LEVEL, _CPP_LOG_LEVEL_ERRORS)
    result.setdefault(_GLIBC_TUNABLES, _GLIBC_REUSES_MEMORY)
    result.setdefault(_MAX_UPLOADS, _MAX_UPLOADS_DEFAULT)
    return result


def component_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the runtime's own processes."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith("JAX_") and name not in _NOT_FOR_COMPONENTS
    }
    # A file in the user's folder that is called like a module must not be imported in place of it.
    return {**kept, "PYTHONSAFEPATH": "1"}
