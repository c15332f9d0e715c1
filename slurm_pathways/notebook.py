"""Jupyter as the program of a run: at a Unix socket in the runtime's private folder, with what to type to reach it.

Run by ``slurm-pathways notebook`` on the first node: ``python -m slurm_pathways.notebook``. Each kernel is a client of
the runtime of its own. Jupyter asks for a token although nobody else can open the socket: at the other end of the ssh
forwarding, where the browser is, others may reach the port.
"""

import getpass
import importlib.util
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from slurm_pathways.launch.client_environment import JAX_BACKEND_TARGET

#: Where the browser is; any free port does.
BROWSER_PORT = 8888
TOKEN_VARIABLE = "JUPYTER_TOKEN"
_UNIX_TARGET = "grpc://unix:"


def private_folder(environ: Mapping[str, str]) -> Path:
    """The folder of the proxy that we are a client of: only its user can enter it, and it goes with the runtime.

    Raises:
        RuntimeError: this is no program of a run.
    """
    target = environ.get(JAX_BACKEND_TARGET, "")
    if not target.startswith(_UNIX_TARGET):
        raise RuntimeError(f"{JAX_BACKEND_TARGET}={target}: this is started by slurm-pathways notebook, not by hand")
    return Path(target.removeprefix(_UNIX_TARGET)).parent


def server_argv(folder: Path, pid: int) -> list[str]:
    """The command of the best Jupyter that is installed: lab, notebook, or the bare server."""
    module, page = next(
        (module, page)
        for module, page in (("jupyterlab", "/lab"), ("notebook", "/tree"), ("jupyter_server", "/tree"))
        if importlib.util.find_spec(module) is not None
    )
    return [
        *(sys.executable, "-m", module, "--no-browser"),
        f"--ServerApp.sock={folder / f'jupyter-{pid}.sock'}",
        "--ServerApp.sock_mode=0600",
        f"--ServerApp.default_url={page}",
        # Jupyter refuses to be root's because others could reach it; here they cannot.
        *(("--allow-root",) if os.getuid() == 0 else ()),
        # Kernels would listen on TCP ports of a machine that others use too.
        "--KernelManager.transport=ipc",
    ]


def how_to_reach(user: str, node: str, folder: Path, pid: int, token: str | None) -> str:
    """What to type and to open. Without ``token``, where it is written down."""
    query = f"?token={token}" if token else f"   (token: in {token_file(folder, pid)})"
    return "\n".join(
        [
            "Jupyter is ready. On the machine with your browser:",
            f"  ssh -N -L {BROWSER_PORT}:{folder / f'jupyter-{pid}.sock'} {user}@{node}",
            f"and open  http://localhost:{BROWSER_PORT}/{query}",
            "(where a login node is between: ssh -J LOGIN_NODE …). Ctrl-C, or the end of the job, ends it.",
        ]
    )


def token_file(folder: Path, pid: int) -> Path:
    """Where the token is written down, for its user alone."""
    return folder / f"jupyter-{pid}.token"


def main() -> int:
    """Becomes Jupyter."""
    folder, pid = private_folder(os.environ), os.getpid()
    token = secrets.token_urlsafe(24)
    fd = os.open(token_file(folder, pid), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(token + "\n")
    # The output of a batch job is a file that others may read.
    shown = token if os.isatty(2) else None
    print(how_to_reach(getpass.getuser(), os.uname().nodename, folder, pid, shown), file=sys.stderr, flush=True)
    os.environ[TOKEN_VARIABLE] = token
    # Connection files and kernels' sockets. By default they lie, and stay, in the home folder.
    os.environ["JUPYTER_RUNTIME_DIR"] = str(folder)
    argv = server_argv(folder, pid)
    os.execve(argv[0], argv, os.environ)


if __name__ == "__main__":
    sys.exit(main())
