"""The command lines of the runtime's processes: what the settings of a run say to each."""

from pathlib import Path

from slurm_pathways.config import CUDA, RuntimeSpec


def controller_arguments(spec: RuntimeSpec, *listen: str) -> tuple[object, ...]:
    """The controller's command line; it listens at all of ``listen``."""
    return (
        *(word for address in listen for word in ("--listen", address)),
        *("--num-slices", spec.num_slices),
        *("--hosts-per-slice", spec.hosts_per_slice),
        *("--devices-per-host", spec.devices_per_host),
        *("--platform", spec.platform),
        *("--spares", spec.num_spares),
        *(("--absent-slices", spec.num_absent_slices) if spec.num_absent_slices else ()),
        *("--relay-fanout", spec.relay_fanout),
        *("--heartbeat-timeout-s", spec.heartbeat_timeout_s),
    )


def worker_arguments(
    spec: RuntimeSpec,
    *,
    worker_id: int,
    host_name: str,
    controller_address: str,
    cache: Path | str,
    run_dir: Path | str,
    log_dir: Path | str,
    first_device: int = 0,
    companion: str = "",
) -> tuple[object, ...]:
    """A supervisor's command line.

    Args:
        first_device: of those that it may use, where hosts share a machine.
        companion: what people call the job that lends the host; empty for the run's own.
    """
    return (
        *("--controller", controller_address),
        *("--worker-id", worker_id),
        *("--name", host_name),
        *("--devices-per-host", spec.devices_per_host),
        *("--platform", spec.platform),
        *("--compile-cache", cache),
        *("--run-dir", run_dir),
        *("--log-dir", log_dir),
        *("--data-plane-encryption", spec.data_plane_encryption),
        *(("--first-device", first_device) if spec.platform == CUDA else ()),
        *(("--companion", companion) if companion else ()),
        *(("--force-sockets",) if spec.force_sockets else ()),
    )


def proxy_arguments(spec: RuntimeSpec) -> tuple[object, ...]:
    """What every proxy of a run is told."""
    return () if spec.gs_directory is None else ("--gs-directory", spec.gs_directory)
