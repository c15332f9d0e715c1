"""Sets the job's comment. What cannot be set is logged, and harms nothing."""

import logging
from collections.abc import Mapping

from slurm_pathways.launch.steps import step_environment
from slurm_pathways.slurm import job_comment
from slurm_pathways.slurm.commands import CommandError, CommandFailed, CommandMissing, Slurm

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0


class JobComment:
    """The comment of one job, or of one task of a job array (``9_3``: the number alone may mean the whole array)."""

    def __init__(self, environ: Mapping[str, str], job: str) -> None:
        self._slurm: Slurm | None = Slurm(step_environment(environ), _TIMEOUT_S)
        self._job = job

    def set(self, summary: str) -> None:
        """Put ``summary`` behind the user's own words, in place of an earlier one. Takes two calls to slurmctld."""
        if self._slurm is None:
            return
        try:
            self._slurm.set_comment(self._job, job_comment.merge(self._slurm.comment(self._job), summary))
        except CommandMissing as failure:
            logger.info("the job's comment is not set: %s", failure)
            self._slurm = None
        except CommandError as failure:
            # A job that was cancelled is over before its run is.
            is_over = isinstance(failure, CommandFailed) and "already finished" in failure.stderr
            logger.log(logging.INFO if is_over else logging.WARNING, "the job's comment is not set: %s", failure)
