"""``slurm-pathways sandbox``: a private, real Slurm on this machine. What it does is in ``slurm_pathways.sandbox``."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import click

from slurm_pathways.sandbox.errors import SandboxError
from slurm_pathways.sandbox.layout import DEFAULT_DIR

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def _node_index(text: str) -> int:
    index = text.removeprefix("node")
    if not index.isdecimal():
        raise click.BadParameter(f"{text} is no node: write 3 or node3")
    return int(index)


_dir_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=DEFAULT_DIR,
    show_default=True,
    metavar="DIR",
    help="The sandbox's folder; everything lies below it.",
)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except SandboxError as failure:
        raise click.ClickException(str(failure)) from failure


@click.group(context_settings=_CONTEXT)
def sandbox() -> None:
    """A private, real Slurm on this machine, for trying things out, for tests and for teaching; needs root.

    \b
    Example:
      slurm-pathways sandbox up --nodes 4
      slurm-pathways sandbox exec -- srun -N4 hostname
      slurm-pathways sandbox down
    """


def _command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    return sandbox.command(name, context_settings=_CONTEXT)


@_command("packages")
@click.option("--missing", "is_missing", is_flag=True, help="Only those of which something is not there.")
def packages_(is_missing: bool) -> None:
    """Print the Debian packages that a sandbox needs, in one line, for apt-get install."""
    from slurm_pathways.sandbox import packages, system

    click.echo(" ".join(packages.missing(system.which) if is_missing else packages.DEBIAN_PACKAGES))


@_command("render")
@click.option("--nodes", "num_nodes", type=int, default=4, show_default=True, metavar="N", help="How many nodes.")
@click.argument("target", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
def render(num_nodes: int, target: Path) -> None:
    """Write the configuration files of a Slurm in containers (docker/) to DIR, usually /etc/slurm of an image."""
    from slurm_pathways.sandbox import cluster, spec

    with _errors():
        cluster.render_for_containers(spec.SandboxSpec(num_nodes=num_nodes), target)


@_command("up")
@click.option("--nodes", "num_nodes", type=int, default=8, show_default=True, metavar="N", help="How many nodes.")
@click.option("--netns", "has_netns", is_flag=True, help="Each node has a network of its own, which can be cut.")
@click.option(
    "--slurmd-timeout",
    "slurmd_timeout_s",
    type=int,
    default=10,
    show_default=True,
    metavar="SECONDS",
    help="SlurmdTimeout: a node that is silent for about twice as long is DOWN.",
)
@click.option("--plugin", "plugins", multiple=True, metavar="FILE", help="A SPANK plugin to load; may be repeated.")
@_dir_option
def up(num_nodes: int, has_netns: bool, slurmd_timeout_s: int, plugins: tuple[str, ...], directory: Path) -> None:
    """Bring a sandbox up; it is ready when this returns."""
    from slurm_pathways.sandbox.cluster import Sandbox
    from slurm_pathways.sandbox.spec import SandboxSpec

    # What ends this command must not leave half a sandbox: as Ctrl-C, it unwinds.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _unwind)
    started_s = time.monotonic()
    with _errors():
        spec = SandboxSpec(
            num_nodes=num_nodes,
            has_netns=has_netns,
            slurmd_timeout_s=slurmd_timeout_s,
            plugins=tuple(os.path.abspath(plugin) for plugin in plugins),  # noqa: PTH100 (a link stays a link)
        )
        Sandbox(directory).up(spec)
    took_s = time.monotonic() - started_s
    click.echo(f"{num_nodes} nodes are idle after {took_s:.1f} s; try: {_shown(directory, 'exec -- sinfo')}")


def _unwind(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def _shown(directory: Path, words: str) -> str:
    where = "" if directory == DEFAULT_DIR else f" --dir {directory}"
    verb, _, rest = words.partition(" ")
    return f"slurm-pathways sandbox {verb}{where} {rest}".rstrip()


@_command("down")
@_dir_option
def down(directory: Path) -> None:
    """End everything of a sandbox, whatever state it is in, and remove its folder."""
    from slurm_pathways.sandbox.cluster import Sandbox

    with _errors():
        if not Sandbox(directory).down():
            click.echo(f"there is no sandbox in {directory}", err=True)


@sandbox.command("exec", context_settings={**_CONTEXT, "allow_interspersed_args": False})
@_dir_option
@click.argument("argv", nargs=-1, required=True, metavar="-- COMMAND [ARGUMENTS]...", type=click.UNPROCESSED)
def exec_(directory: Path, argv: tuple[str, ...]) -> None:
    """Run COMMAND on the sandbox's login; its input, output, signals and exit code are its own."""
    from slurm_pathways.sandbox import system
    from slurm_pathways.sandbox.cluster import Sandbox

    with _errors():
        there = Sandbox(directory)
        system.become(there.command(argv), there.environ(os.environ))


@_command("status")
@click.option("--json", "is_json", is_flag=True, help="Print it as JSON.")
@_dir_option
def status(is_json: bool, directory: Path) -> None:
    """Say what runs and what Slurm says of it. Exit code 1 if there is no sandbox."""
    import json

    import msgspec

    from slurm_pathways.sandbox.cluster import Sandbox

    with _errors():
        report = Sandbox(directory).status()
    if is_json:
        click.echo(json.dumps(msgspec.to_builtins(report), indent=2))
        return
    network = "own networks" if report.has_netns else "the machine's network"
    click.echo(f"{report.directory}: {'up' if report.is_up else 'not up'}, {network}")
    for node in report.nodes:
        runs = "runs" if node.is_running else "dead"
        click.echo(
            f"  {node.name:<8} {runs}  {node.slurm_state or '-':<12}{'  cut off' if node.is_cut else ''}".rstrip()
        )


@_command("kill-node")
@click.option("--tell-slurm", "tells_slurm", is_flag=True, help="Set it DOWN at once; else slurmctld has to find out.")
@_dir_option
@click.argument("node", type=_node_index)
def kill_node(tells_slurm: bool, directory: Path, node: int) -> None:
    """End all processes of NODE at once, as a loss of power does."""
    from slurm_pathways.sandbox.cluster import Sandbox

    with _errors():
        Sandbox(directory).kill_node(node, tells_slurm=tells_slurm)


@_command("reboot")
@click.option("--unnoticed", "is_unnoticed", is_flag=True, help="slurmd does not say that its machine has rebooted.")
@_dir_option
@click.argument("node", type=_node_index)
def reboot(is_unnoticed: bool, directory: Path, node: int) -> None:
    """Kill NODE and start it at once, faster than slurmctld looks."""
    from slurm_pathways.sandbox.cluster import Sandbox

    with _errors():
        Sandbox(directory).reboot(node, is_unnoticed=is_unnoticed)


@_command("return-node")
@_dir_option
@click.argument("node", type=_node_index)
def return_node(directory: Path, node: int) -> None:
    """Bring NODE back into service: start it if it is dead, resume it if Slurm has given it up, wait for it."""
    from slurm_pathways.sandbox.cluster import Sandbox

    with _errors():
        Sandbox(directory).return_node(node)


@_command("partition")
@_dir_option
@click.argument("nodes", type=_node_index, nargs=-1, required=True)
def partition(directory: Path, nodes: tuple[int, ...]) -> None:
    """Cut NODES off from all others (up --netns): they reach each other, and nobody else."""
    from slurm_pathways.sandbox.cluster import Sandbox

    with _errors():
        Sandbox(directory).partition(nodes)


@_command("heal")
@_dir_option
@click.argument("nodes", type=_node_index, nargs=-1)
def heal(directory: Path, nodes: tuple[int, ...]) -> None:
    """Connect NODES again, or all."""
    from slurm_pathways.sandbox.cluster import Sandbox

    with _errors():
        Sandbox(directory).heal(nodes or None)
