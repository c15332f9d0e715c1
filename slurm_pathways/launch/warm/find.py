"""The warm runtime that a user means."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_pathways.config import SETTINGS, ConfigurationError, RuntimeSpec
from slurm_pathways.launch.run_folder import RunRecord, is_live, live_runs, read_record, runs_roots


def find_warm(
    environ: Mapping[str, str], job_id: int | None, run_dir: Path | None = None
) -> tuple[Path, RunRecord] | None:
    """The warm runtime on this machine that belongs to a job, or to none (``job_id`` is None); None if there is none.

    Args:
        run_dir: the folder of the one that is meant.

    Raises:
        ConfigurationError: there are several, or ``run_dir`` is not one's.
    """
    if run_dir is not None:
        record = read_record(run_dir)
        if record is None or record.warm is None or not is_live(run_dir):
            raise ConfigurationError(f"--run {run_dir}: this is not the folder of a warm runtime that runs now")
        return run_dir.absolute(), record
    found = [
        (path, record)
        for path, record in live_runs(*runs_roots(environ))
        if record.warm is not None and record.warm.job_id == job_id
    ]
    if len(found) > 1:
        listed = "\n".join(f"  {path}" for path, _ in found)
        raise ConfigurationError(f"several warm runtimes are here; choose one with --run:\n{listed}")
    return found[0] if found else None


def check_settings(values: Mapping[str, Any], spec: RuntimeSpec, run_dir: Path) -> None:
    """Refuse settings that a warm runtime does not have.

    Args:
        values: what the user asked for, from ``config.gather``.

    Raises:
        ConfigurationError: it names each.
    """
    by_field = {setting.field: setting for setting in SETTINGS}
    others = [
        f"{by_field[field].option} {value} was asked for, and it has {getattr(spec, field)}"
        for field, value in values.items()
        if value != getattr(spec, field)
    ]
    if others:
        raise ConfigurationError(
            f"a warm runtime is here ({run_dir}), and programs run on it as it is: {'; '.join(others)}. Leave the "
            "settings out, or end it with slurm-pathways down"
        )
