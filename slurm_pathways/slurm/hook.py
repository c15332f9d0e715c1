"""``slurm-pathways-hook``: what the SPANK plugin has root do on a node around a job that asked for ``--pathways``.

``setup`` runs before a step's tasks start: it checks the node and makes the job's folder there, in which everything
that the job leaves on the node belongs. ``cleanup`` runs at the job's end, whatever died before: it kills what of the
job still runs and removes the folder.

The plugin runs this with an empty environment and a deadline of seconds, so it imports the standard library only. Its
output is read by people: the plugin shows it to the user when ``setup`` fails, and writes it to slurmd's log otherwise.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import stat
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

#: The job's folder holds sockets and logs; with less than this a run would fail in the middle instead of here.
MIN_FREE_BYTES = 64 << 20
#: A Unix socket's path has 107 bytes; the run folder's name and a socket's name in it take the rest.
MAX_NODE_DIR_BYTES = 60
#: Longer node names are replaced by a checksum, for the same reason.
_MAX_NODE_NAME_BYTES = 24
#: How long killed processes may take to disappear before the folder is removed under them.
KILL_TIMEOUT_S = 2.0
_POLL_INTERVAL_S = 0.01


class NodeProblem(Exception):
    """The node cannot run the job; the message is for the user and says what, where, and what to do."""


def node_dir(state: Path, job_id: int, node: str) -> Path:
    """The job's folder on a node. It names the node since several nodes may share a machine, in tests and sandboxes."""
    is_short = len(node.encode()) <= _MAX_NODE_NAME_BYTES and re.fullmatch(r"[A-Za-z0-9][\w.-]*", node, re.ASCII)
    return state / str(job_id) / (node if is_short else f"{zlib.crc32(node.encode()):08x}")


def set_up(state: Path, job_id: int, uid: int, gid: int, node: str) -> Path:
    """Check the node and make the job's folder on it, mode 0700, the user's own; a second call finds it there.

    Raises:
        NodeProblem: see the class.
    """
    folder = node_dir(state, job_id, node)
    if len(os.fsencode(folder)) > MAX_NODE_DIR_BYTES:
        raise NodeProblem(
            f"the path {folder} is too long for sockets in it ({len(os.fsencode(folder))} bytes, at most "
            f"{MAX_NODE_DIR_BYTES}): the administrator must give a shorter state= in plugstack.conf"
        )
    _make_trusted(state)
    _make_trusted(folder.parent)
    # Both parents are root's and closed to others, so nobody can put a link here between the two calls.
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        os.chown(folder, uid, gid, follow_symlinks=False)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid:
        raise NodeProblem(
            f"{folder} is there already and not a folder of user id {uid}: the administrator must remove it"
        )
    space = os.statvfs(folder)
    if space.f_bavail * space.f_frsize < MIN_FREE_BYTES:
        raise NodeProblem(
            f"{space.f_bavail * space.f_frsize >> 20} MiB are free in {state}, and {MIN_FREE_BYTES >> 20} MiB are "
            "needed: make room on this node"
        )
    return folder


def _make_trusted(folder: Path) -> None:
    """Make a folder that only we can change and everybody can pass through, or check that it is one."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o711, parents=True)
            folder.chmod(0o711)
        found = folder.lstat()
    except OSError as failure:
        raise NodeProblem(f"the folder {folder} cannot be made: {failure.strerror}") from failure
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise NodeProblem(
            f"{folder} must be a folder of user id {os.geteuid()} that no other may write: the administrator must "
            "remove or mend it, or give another state= in plugstack.conf"
        )


def clean_up(state: Path, job_id: int, uid: int, node: str) -> list[str]:
    """Kill what of the job still runs on the node and remove its folder there; returns what was found, for the log."""
    killed = []
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    # In rounds: a process may start another one just before it is killed.
    while left := dict(_processes(job_id, uid, node)):
        for pid, name in left.items():
            if _kill(pid, job_id, uid, node):
                killed.append(f"killed process {pid} ({name}), which had outlived the job")
        if time.monotonic() > deadline_s:
            killed.append(f"these processes did not end in {KILL_TIMEOUT_S:g} s: {', '.join(map(str, sorted(left)))}")
            break
        time.sleep(_POLL_INTERVAL_S)
    folder = node_dir(state, job_id, node)
    # rmtree follows no links, also not ones that are put in its way; _make_trusted holds for the parents.
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    with contextlib.suppress(OSError):
        # Not empty where another node of the job shares this machine and is not done.
        folder.parent.rmdir()
    return list(dict.fromkeys(killed))


def _processes(job_id: int, uid: int, node: str) -> Iterator[tuple[int, str]]:
    """Pid and name of the living processes that the job's tasks on this node have left."""
    spared = set(_ancestors(os.getpid()))
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in spared and _is_of_job(entry, job_id, uid, node):
            try:
                yield int(entry.name), (entry / "comm").read_text(encoding="utf-8", errors="replace").strip()
            except (FileNotFoundError, ProcessLookupError):
                continue


def _is_of_job(process: Path, job_id: int, uid: int, node: str) -> bool:
    try:
        status = (process / "status").read_text(encoding="utf-8", errors="replace")
        environ = _environment((process / "environ").read_bytes())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if fields["State"].split()[0] in "ZX" or int(fields["Uid"].split()[0]) != uid:
        return False
    # SLURM_PROCID: only tasks have it, and not a site's epilog script, which runs as root with the same job id.
    # In a heterogeneous job SLURM_JOB_ID is the leader's, and each component's stands in SLURM_JOB_ID_HET_GROUP_n.
    ids = {value for name, value in environ.items() if name.startswith("SLURM_JOB_ID")}
    return str(job_id) in ids and "SLURM_PROCID" in environ and environ.get("SLURMD_NODENAME") == node


def _environment(block: bytes) -> Mapping[str, str]:
    text = block.decode("utf-8", "replace")
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 0:
        yield pid
        try:
            # The name, in parentheses, may hold anything.
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return


def _kill(pid: int, job_id: int, uid: int, node: str) -> bool:
    """Kill it, unless the pid has become another's since; returns whether it was killed."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not _is_of_job(Path(f"/proc/{pid}"), job_id, uid, node):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 1 with a message when the node cannot run the job, 2 for wrong use."""
    parser = argparse.ArgumentParser(prog="slurm-pathways-hook", description=__doc__.split("\n")[0])
    parser.add_argument("context", choices=("setup", "cleanup"))
    parser.add_argument("--state", type=Path, required=True, help="where each job has a folder")
    parser.add_argument("--job-id", type=int, required=True)
    parser.add_argument("--uid", type=int, required=True)
    parser.add_argument("--gid", type=int, required=True)
    parser.add_argument("--node", required=True, help="Slurm's name of this node")
    given = parser.parse_args(argv)
    if given.context == "setup":
        try:
            print(set_up(given.state, given.job_id, given.uid, given.gid, given.node))
        except NodeProblem as problem:
            print(problem, file=sys.stderr)
            return 1
        return 0
    for line in clean_up(given.state, given.job_id, given.uid, given.node):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
