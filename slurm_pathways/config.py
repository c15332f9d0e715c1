"""The settings of a run: what each means, what it may be, and where it comes from.

A setting is taken from the command line, else from ``SLURM_PATHWAYS_<KEY>`` in the environment, else from the YAML file
of ``--config``, else its default. Everything is read before anything starts; a wrong value is a ``ConfigurationError``
whose message says what was given where, what is allowed, and what to do.
"""

import dataclasses
import difflib
import enum
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathways_runtime.core.defaults import HEARTBEAT_TIMEOUT_S, RELAY_FANOUT

VARIABLE_PREFIX = "SLURM_PATHWAYS_"

#: Where run folders are made; not a setting of one run.
RUNS_VARIABLE = "SLURM_PATHWAYS_RUNS"
#: Set for the program of a run: its run folder, by which ``status`` finds it.
RUN_DIR_VARIABLE = "SLURM_PATHWAYS_RUN_DIR"
#: Where records of runs are kept, for ``report``.
RECORDS_VARIABLE = "SLURM_PATHWAYS_RECORDS"
#: Set for the program of ``compile``: what it is compiled for. Nothing is executed then.
COMPILE_TOPOLOGY_VARIABLE = "SLURM_PATHWAYS_COMPILE_TOPOLOGY"
#: What ``--config`` says when it is not given.
CONFIG_VARIABLE = "SLURM_PATHWAYS_CONFIG"

#: Variables with our prefix that are not settings, and what reads them. Any other is taken for a misspelt setting.
OTHER_VARIABLES: dict[str, str] = {
    RUNS_VARIABLE: "folder in which run folders are made",
    RUN_DIR_VARIABLE: "set by `run` for the program: the run folder, which `status` reads",
    RECORDS_VARIABLE: "folder in which a record of each run is kept, for `report`; `none` keeps none",
    CONFIG_VARIABLE: "YAML file with settings, like --config",
    COMPILE_TOPOLOGY_VARIABLE: "set by `compile` for the program: the topology that it is compiled for",
    "SLURM_PATHWAYS_TRACE_HOSTS": "how many hosts a trace of jax.profiler covers: all if not set, 0 for none",
    "SLURM_PATHWAYS_CONNECT_TIMEOUT_S": "how long the program tries to connect to its proxy, in seconds",
}
#: Variables of the project's own tests, which slow processes down at chosen places.
TEST_VARIABLE_PREFIX = "SLURM_PATHWAYS_TEST_"

CUDA = "cuda"
PLATFORMS = ("cpu", CUDA)
#: What decides which nodes stand together; the first: their order in the allocation.
SLICINGS = ("order", "topology", "feature", "gres")
ENCRYPTIONS = ("tls", "none")
#: What becomes of a batch job whose first node is gone.
REQUEUE = "requeue"
ON_HEAD_LOSS = ("cancel", REQUEUE)
#: Twice the largest cluster that was simulated: beyond it, a number is mistyped.
MAX_HOSTS = 4096
#: Each host is two processes.
MAX_HOSTS_OF_ONE_MACHINE = 64
#: Virtual CPU devices share the machine's cores; beyond this a host only starves itself.
MAX_DEVICES_PER_HOST = 128


class ConfigurationError(Exception):
    """A setting, file or variable that cannot be used. The message is for the user: given, allowed, what to do."""


class Kind(enum.Enum):
    """How a setting's value is written."""

    COUNT = "a whole number"
    SECONDS = "a number of seconds"
    CHOICE = "a name"
    FOLDER = "a folder"
    FLAG = "true or false"
    NETWORK = "an interface's name, like ib0, or a network, like 10.0.0.0/8"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, as users write it.

    Attributes:
        field: its name in ``RuntimeSpec``.
        key: its name in YAML; ``--key-with-dashes`` on the command line.
        minimum, maximum: bounds of numbers, both allowed.
        choices: what a CHOICE may be.
        has_variable: whether the environment may give it.
    """

    field: str
    key: str
    kind: Kind
    help: str
    minimum: float = 0
    maximum: float = 0
    choices: tuple[str, ...] = ()
    has_variable: bool = True

    @property
    def option(self) -> str:
        """Its name on the command line."""
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str | None:
        """Its name in the environment; None when it cannot come from there."""
        return f"{VARIABLE_PREFIX}{self.key.upper()}" if self.has_variable else None

    @property
    def allowed(self) -> str:
        """What it may be, in words."""
        if self.kind is Kind.CHOICE:
            return "one of " + ", ".join(self.choices)
        words = str(self.kind.value)
        is_number = self.kind in (Kind.COUNT, Kind.SECONDS)
        return f"{words} from {self.minimum:g} to {self.maximum:g}" if is_number else words

    def parse(self, value: object, given: str) -> Any:
        """The value for ``RuntimeSpec``.

        Args:
            value: text from the command line or environment, or what YAML made of it.
            given: how and where the user wrote it, for the message.

        Raises:
            ConfigurationError: it is not allowed.
        """
        match self.kind:
            case Kind.COUNT | Kind.SECONDS:
                return self._number(value, given)
            case Kind.CHOICE:
                if value not in self.choices:
                    raise ConfigurationError(f"{given}: {self.key} must be {self.allowed} in this version")
                return value
            case Kind.FOLDER:
                if not isinstance(value, str | os.PathLike) or not str(value):
                    raise ConfigurationError(f"{given}: {self.key} must be the path of a folder")
                return Path(value).expanduser().absolute()
            case Kind.FLAG:
                if isinstance(value, bool):
                    return value
                text = str(value).lower()
                if text not in _FLAGS:
                    raise ConfigurationError(f"{given}: {self.key} must be true or false (also 1, 0, yes, no, on, off)")
                return _FLAGS[text]
            case Kind.NETWORK:
                text = value if isinstance(value, str) else ""
                if not _is_network(text) if "/" in text else _INTERFACE_NAME.fullmatch(text) is None:
                    raise ConfigurationError(f"{given}: {self.key} must be {self.allowed}")
                return text

    def _number(self, value: object, given: str) -> int | float:
        number: int | float
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ValueError
            number = int(str(value)) if self.kind is Kind.COUNT else float(value)
        except ValueError:
            raise ConfigurationError(f"{given}: {self.key} must be {self.allowed}") from None
        # Written so that a NaN is refused too.
        if not self.minimum <= number <= self.maximum:
            raise ConfigurationError(f"{given}: {self.key} must be {self.allowed}")
        return number


#: IFNAMSIZ is 16, with the terminating zero.
_INTERFACE_NAME = re.compile(r"[^\s/\x00]{1,15}")


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


_FLAGS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class RuntimeSpec:
    """What a runtime is made of. Fields are explained by ``SETTINGS``; folders are absolute.

    Raises:
        ConfigurationError: a value is not allowed, or there are too many hosts.
    """

    num_slices: int = 1
    hosts_per_slice: int = 1
    devices_per_host: int = 1
    platform: str = "cpu"
    num_spares: int = 0
    num_absent_slices: int = 0
    compile_cache_dir: Path | None = None
    run_dir: Path | None = None
    force_sockets: bool = False
    keep_logs: bool = False
    log_dir: Path | None = None
    gs_directory: Path | None = None
    job_comment: bool = True
    startup_timeout_s: float = 120.0
    failure_grace_s: float = 30.0
    kill_after_s: float = 10.0
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    relay_fanout: int = RELAY_FANOUT
    slice_by: str = SLICINGS[0]
    interface: str | None = None
    data_plane_encryption: str = ENCRYPTIONS[0]
    on_head_loss: str = ON_HEAD_LOSS[0]

    def __post_init__(self) -> None:
        for setting in SETTINGS:
            value = getattr(self, setting.field)
            if value is not None:
                setting.parse(value, f"{setting.field}={value}")
        self.check_hosts(MAX_HOSTS, "are allowed")
        num_hosts = (self.num_slices + self.num_absent_slices) * self.hosts_per_slice
        if num_hosts > MAX_HOSTS:
            raise ConfigurationError(
                f"{self.num_slices} slices + {self.num_absent_slices} absent ones x {self.hosts_per_slice} hosts are "
                f"{num_hosts} hosts; at most {MAX_HOSTS} are allowed: ask for fewer absent slices"
            )

    def check_hosts(self, limit: int, what: str) -> None:
        """Refuse more than ``limit`` hosts, that many of which ``what``.

        Raises:
            ConfigurationError: there are more.
        """
        if self.num_hosts > limit:
            raise ConfigurationError(
                f"{self.num_slices} slices x {self.hosts_per_slice} hosts + {self.num_spares} spares are "
                f"{self.num_hosts} hosts; at most {limit} {what}: ask for fewer slices, hosts or spares"
            )

    @property
    def num_hosts(self) -> int:
        """Worker processes, spares included."""
        return self.num_slices * self.hosts_per_slice + self.num_spares

    @property
    def num_devices(self) -> int:
        """Devices of the slices that there are from the start."""
        return self.num_slices * self.hosts_per_slice * self.devices_per_host


SETTINGS: tuple[Setting, ...] = (
    Setting("num_slices", "slices", Kind.COUNT, "Slices: groups of hosts with one fast interconnect.", 1, MAX_HOSTS),
    Setting("hosts_per_slice", "hosts_per_slice", Kind.COUNT, "Hosts in each slice.", 1, MAX_HOSTS),
    Setting("devices_per_host", "devices_per_host", Kind.COUNT, "Devices on each host.", 1, MAX_DEVICES_PER_HOST),
    Setting("platform", "platform", Kind.CHOICE, "What the devices are: `cuda` for NVIDIA GPUs.", choices=PLATFORMS),
    Setting(
        "num_spares",
        "spares",
        Kind.COUNT,
        "Hosts that stand behind no slice until they take the place of a lost one.",
        0,
        MAX_HOSTS,
    ),
    Setting(
        "num_absent_slices",
        "absent_slices",
        Kind.COUNT,
        "Further slices, without hosts until a job lends nodes for them. Programs see their devices as lost till then.",
        0,
        MAX_HOSTS,
    ),
    Setting(
        "compile_cache_dir",
        "compile_cache",
        Kind.FOLDER,
        "Keep compiled programs here, for later runs too. Default: in the run folder, gone with it.",
    ),
    Setting(
        "run_dir",
        "run_dir",
        Kind.FOLDER,
        "The folder of this run: sockets, logs. Must be new or empty. Default: a fresh one.",
        has_variable=False,
    ),
    Setting("force_sockets", "force_sockets", Kind.FLAG, "Move tensors over sockets even where memory can be shared."),
    Setting("keep_logs", "keep_logs", Kind.FLAG, "Keep the logs also when nothing failed."),
    Setting(
        "log_dir",
        "log_dir",
        Kind.FOLDER,
        "Write logs here, one per process and host, and keep them. Default: in the run folder, gone with it.",
    ),
    Setting(
        "gs_directory",
        "gs_directory",
        Kind.FOLDER,
        "Where `gs://bucket/path` lies, `DIR/bucket/path`: for traces and arrays that the hosts write and read.",
    ),
    Setting("job_comment", "job_comment", Kind.FLAG, "In Slurm, say in the job's comment how the run is going."),
    Setting("startup_timeout_s", "startup_timeout_s", Kind.SECONDS, "How long the runtime may take to start.", 1, 3600),
    Setting(
        "failure_grace_s",
        "failure_grace_s",
        Kind.SECONDS,
        "How long the program may go on once the runtime can serve it no more, before it is sent SIGTERM.",
        0,
        86400,
    ),
    Setting("kill_after_s", "kill_after_s", Kind.SECONDS, "From that SIGTERM to SIGKILL.", 0, 3600),
    Setting(
        "heartbeat_timeout_s",
        "heartbeat_timeout_s",
        Kind.SECONDS,
        "A worker that is silent for so long is lost. One whose connection ends is lost at once.",
        2,
        3600,
    ),
    Setting(
        "relay_fanout",
        "relay_fanout",
        Kind.COUNT,
        "With more hosts than this, the controller reaches them through relays, about so many.",
        2,
        1024,
    ),
    Setting(
        "slice_by",
        "slice_by",
        Kind.CHOICE,
        "What makes nodes one slice: their order in the allocation, a switch, features, or the type of gres. On Slurm.",
        choices=SLICINGS,
    ),
    Setting(
        "interface",
        "interface",
        Kind.NETWORK,
        "The network over which nodes speak. Default: that of the node's address in Slurm. On Slurm.",
    ),
    Setting(
        "data_plane_encryption",
        "data_plane_encryption",
        Kind.CHOICE,
        "How tensors travel between nodes: `none` is for trusted fabrics. On Slurm.",
        choices=ENCRYPTIONS,
    ),
    Setting(
        "on_head_loss",
        "on_head_loss",
        Kind.CHOICE,
        "What becomes of a batch job that has lost the node of its script, and would do nothing until its time limit.",
        choices=ON_HEAD_LOSS,
    ),
)
_BY_KEY = {setting.key: setting for setting in SETTINGS}


def resolve(options: Mapping[str, object], environ: Mapping[str, str], config_path: Path | None = None) -> RuntimeSpec:
    """The spec of the runtime on this machine that the user asked for.

    Args:
        options: what the command line gave, by key; absent or None where it gave nothing.
        environ: the environment. ``SLURM_PATHWAYS_CONFIG`` names the file when ``config_path`` is None.

    Raises:
        ConfigurationError: see the class.
    """
    spec = RuntimeSpec(**gather(options, environ, config_path))
    spec.check_hosts(MAX_HOSTS_OF_ONE_MACHINE, "run on one machine")
    return spec


def gather(
    options: Mapping[str, object], environ: Mapping[str, str], config_path: Path | None = None
) -> dict[str, Any]:
    """What the user has said, by the fields of ``RuntimeSpec``; arguments and errors as of ``resolve``."""
    _check_variables(environ)
    values: dict[str, Any] = {}
    if config_path is None and environ.get(CONFIG_VARIABLE):
        config_path = Path(environ[CONFIG_VARIABLE])
    if config_path is not None:
        for key, value in _read_file(config_path).items():
            values[_BY_KEY[key].field] = _BY_KEY[key].parse(value, f"{key}: {value!r} in {config_path}")
    for setting in SETTINGS:
        if setting.variable is not None and setting.variable in environ:
            text = environ[setting.variable]
            values[setting.field] = setting.parse(text, f"{setting.variable}={text}")
        if (value := options.get(setting.key)) is not None:
            values[setting.field] = setting.parse(value, f"{setting.option} {value}")
    return values


def _read_file(path: Path) -> dict[str, object]:
    # Here: few runs have such a file, and every process of a run reads this module.
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"the settings file {path} cannot be read: {reason}") from failure
    except yaml.YAMLError as failure:
        raise ConfigurationError(f"the settings file {path} is not YAML: {failure}") from failure
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"the settings file {path} must hold lines like 'slices: 2'")
    for key in content:
        if key not in _BY_KEY:
            raise ConfigurationError(f"unknown key {key!r} in {path}{_suggest(str(key), _BY_KEY)}")
    return content


def _check_variables(environ: Mapping[str, str]) -> None:
    settings = [setting.variable for setting in SETTINGS if setting.variable is not None]
    known = [*settings, *OTHER_VARIABLES]
    for name in environ:
        if name.startswith(VARIABLE_PREFIX) and name not in known and not name.startswith(TEST_VARIABLE_PREFIX):
            raise ConfigurationError(f"unknown variable {name} in the environment{_suggest(name, known)}")


def _suggest(name: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(valid), n=1)
    return (f" (did you mean {close[0]}?)" if close else "") + "; valid are: " + ", ".join(valid)


def settings_table() -> str:
    """All settings as a Markdown table, for docs/configuration.md; a test compares the two."""
    defaults = {field.name: field.default for field in dataclasses.fields(RuntimeSpec)}
    lines = ["| option and YAML key | variable | default | allowed | meaning |", "|---|---|---|---|---|"]
    for setting in SETTINGS:
        default = defaults[setting.field]
        shown = "none" if default is None else str(default).lower() if isinstance(default, bool) else f"{default}"
        variable = f"`{setting.variable}`" if setting.variable else "none"
        lines.append(
            f"| `{setting.option}`, `{setting.key}` | {variable} | {shown} | {setting.allowed} | {setting.help} |"
        )
    return "\n".join(lines)
