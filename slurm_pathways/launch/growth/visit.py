"""Go to a run on its launcher's machine, say what is wanted, and pass on what it answers, as JSON lines on stdout.

``python -m slurm_pathways.launch.growth.visit``, as a step on the first node of the run's job: a companion's script is
on another node, where the run's socket is not.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from slurm_pathways.launch.growth.messages import Answer, Await, Facts, Joined, Lend, Over, Refused, Request, StillThere
from slurm_pathways.launch.run_folder import RunRecord, is_live, live_runs, read_record, runs_roots
from slurm_pathways.launch.warm.messages import Lines

#: For a run of the job to begin, and to be ready.
WAIT_TIMEOUT_S = 600.0
_POLL_INTERVAL_S = 0.2
#: How often a companion hears that the run's node is there.
STILL_THERE_INTERVAL_S = 5.0


class Visit(msgspec.Struct, frozen=True):
    """What is wanted of which run.

    Attributes:
        job_id, run_dir: of the run; one of them may be None.
        wait_s: how long the run may take until it is ready.
    """

    job_id: int | None
    run_dir: str | None
    request: Request
    wait_s: float = 0.0


class NotGrowing(Exception):
    """There is no run that takes nodes; the message says why and what to do."""


def find(visit: Visit, environ: Mapping[str, str]) -> tuple[Path, RunRecord]:
    """The run that is meant, which is ready; waits for it.

    Raises:
        NotGrowing: there is none within ``wait_s``, there are several, or it takes no nodes.
    """
    deadline_s = time.monotonic() + visit.wait_s
    roots = runs_roots(environ)
    while True:
        if visit.run_dir is not None:
            path = Path(visit.run_dir)
            record = read_record(path)
            runs = [(path, record)] if record is not None and is_live(path) else []
            whose = f"{path} is not the folder of a run that runs now"
        else:
            runs = [run for run in live_runs(*roots) if run[1].job_id == visit.job_id]
            looked = " and ".join(map(str, roots))
            whose = (
                f"no run of slurm-pathways runs in job {visit.job_id} on its first node (looked in {looked}); a run of "
                "another folder is named by --run"
            )
        if len(runs) > 1:
            listed = "\n".join(f"  {path}  {' '.join(record.program_argv)}" for path, record in runs)
            raise NotGrowing(f"several runs run in job {visit.job_id}; choose one with --run:\n{listed}")
        problem = whose
        if runs:
            path, record = runs[0]
            if record.growth is None:
                raise NotGrowing(
                    f"the run {path} takes no nodes of other jobs: it was started by srun --pathways; slurm-pathways "
                    "run and up start such that do"
                )
            if record.growth:
                return path, record
            problem = f"the run {path} is not ready yet"
        if time.monotonic() >= deadline_s:
            raise NotGrowing(problem if not visit.wait_s else f"{problem}, after {visit.wait_s:g} s")
        time.sleep(_POLL_INTERVAL_S)


def go(visit: Visit, environ: Mapping[str, str], tell: Callable[[Answer], None]) -> None:
    """Say what is wanted, and pass on all answers; ends with the last one.

    ``Refused`` is told where there is no such run; the last word of a run that took nodes is ``Over``.
    """
    try:
        _, record = find(visit, environ)
        assert record.growth is not None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        lines: Lines[Answer] = Lines(sock, Answer)
        try:
            sock.connect(record.growth)
            lines.send(visit.request)
        except OSError as failure:
            sock.close()
            raise NotGrowing(f"the launcher of run {record.run_id} does not answer: {failure}") from failure
    except NotGrowing as failure:
        tell(Refused(str(failure)))
        return
    timer = None
    if isinstance(visit.request, Await):
        timer = threading.Timer(visit.request.timeout_s, lines.close)
        timer.start()
    answer: Answer | None = None
    for answer in lines.receive():
        tell(answer)
        if isinstance(answer, Facts | Joined | Refused | Over):
            break
    if timer is not None:
        timer.cancel()
    lines.close()
    if isinstance(visit.request, Lend) and not isinstance(answer, Refused | Over):
        tell(Over("the run's launcher is gone"))


def main() -> int:
    """The process: a ``Visit`` as JSON is its argument."""
    visit = msgspec.json.decode(sys.argv[1], type=Visit)
    is_over = threading.Event()
    lock = threading.Lock()

    def tell(answer: Answer) -> None:
        # Who listens may be gone, and this process ends with its step.
        with lock, contextlib.suppress(BrokenPipeError):
            os.write(1, msgspec.json.encode(answer) + b"\n")

    def still_there() -> None:
        while not is_over.wait(STILL_THERE_INTERVAL_S):
            tell(StillThere())

    threading.Thread(target=still_there, name="still-there", daemon=True).start()
    go(visit, os.environ, tell)
    is_over.set()
    return 0


if __name__ == "__main__":
    sys.exit(main())
