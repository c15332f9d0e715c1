"""Where the program's runtime listens, how long to try, and what to say when it does not answer. No JAX here."""

import dataclasses
import math
import os
from collections.abc import MutableMapping

TARGET_VARIABLE = "JAX_BACKEND_TARGET"
RUN_DIR_VARIABLE = "SLURM_PATHWAYS_RUN_DIR"
TIMEOUT_VARIABLE = "SLURM_PATHWAYS_CONNECT_TIMEOUT_S"
#: Read by pathwaysutils; programs written for it keep their meaning.
PATHWAYSUTILS_TIMEOUT_VARIABLE = "PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS"
DEFAULT_TIMEOUT_S = 30
#: Without it jaxlib's client wants ALTS, a protocol of Google's data centers, and retries in silence for ever.
CREDENTIALS_VARIABLE = "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"


class ConnectionSettingsError(RuntimeError):
    """The environment does not say where to connect, or says something that cannot be. The message is for the user."""


@dataclasses.dataclass(frozen=True)
class ConnectionSettings:
    """How to reach the runtime.

    Attributes:
        target: ``grpc://unix:/path`` or ``grpc://host:port``.
        timeout_s: whole seconds, as jaxlib takes them.
        run_dir: the run folder with the logs, when the program was started by ``slurm-pathways run``.
    """

    target: str
    timeout_s: int
    run_dir: str | None

    @property
    def socket_path(self) -> str | None:
        """The Unix socket that the target names, if it names one."""
        address = self.target.removeprefix("grpc://")
        return address.removeprefix("unix:") if address.startswith("unix:") else None


def read_settings(target: str | None, environ: MutableMapping[str, str]) -> ConnectionSettings:
    """The settings that the environment gives.

    Args:
        target: ``jax.config.jax_backend_target``, which JAX has from ``JAX_BACKEND_TARGET``.

    Raises:
        ConnectionSettingsError: no target, or a value that is not allowed.
    """
    if not target:
        raise ConnectionSettingsError(
            f"JAX is asked for the proxy backend, but {TARGET_VARIABLE} is not set: there is no runtime to connect to. "
            f"Start the program with `slurm-pathways run ... -- python program.py`, which sets it"
        )
    if environ.get(CREDENTIALS_VARIABLE) != "true":
        raise ConnectionSettingsError(
            f"{CREDENTIALS_VARIABLE}={environ.get(CREDENTIALS_VARIABLE)!r}: it must be exactly 'true' "
            f"(the connection is a private Unix socket), or not set at all; then it is set for you"
        )
    timeout_s = DEFAULT_TIMEOUT_S
    for variable in (TIMEOUT_VARIABLE, PATHWAYSUTILS_TIMEOUT_VARIABLE):
        if text := environ.get(variable):
            timeout_s = _whole_seconds(variable, text)
            break
    return ConnectionSettings(target, timeout_s, environ.get(RUN_DIR_VARIABLE))


def allow_plaintext(environ: MutableMapping[str, str]) -> None:
    """Let jaxlib's client speak plaintext, all that it can speak over a Unix socket. A user's setting stays."""
    environ.setdefault(CREDENTIALS_VARIABLE, "true")


def explain_failure(settings: ConnectionSettings, cause: str) -> str:
    """What the user should read when the connection was not made in time."""
    lines = [f"No Slurm Pathways runtime answered at {settings.target} within {settings.timeout_s} s."]
    path = settings.socket_path
    if path is not None and not os.path.exists(path):  # noqa: PTH110 - a look at a path that may be malformed
        lines.append(f"There is no socket at {path}: the runtime has ended, or it was never started.")
    if settings.run_dir is not None:
        lines.append(
            f"Look at `slurm-pathways status --run {settings.run_dir}` and at the logs in {settings.run_dir}/logs."
        )
    else:
        lines.append(
            f"`slurm-pathways status` shows the runtimes of this machine; `slurm-pathways run ... -- python program.py`"
            f" starts one and sets {TARGET_VARIABLE} for the program."
        )
    lines.append(f"To wait longer set {TIMEOUT_VARIABLE}. The client said: {cause}")
    return "\n".join(lines)


def _whole_seconds(variable: str, text: str) -> int:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86400:
        raise ConnectionSettingsError(f"{variable}={text}: must be a number of seconds, more than 0 and at most 86400")
    return math.ceil(seconds)
