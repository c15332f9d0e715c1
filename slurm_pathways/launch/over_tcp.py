"""A runtime on this machine whose processes speak to one another as they do between hosts: TCP with TLS.

For tests and benchmarks. Every host has a loopback address of its own. With ``force_sockets`` the executors' data goes
over TCP too, else by shared memory, as they do share this machine.
"""

import threading
from pathlib import Path
from typing import Any

from pathways_runtime.transport.credentials import Credentials
from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch.arguments import controller_arguments, proxy_arguments
from slurm_pathways.launch.components import ComponentEvent, RuntimeEvent
from slurm_pathways.launch.local import CONTROLLER, Client, LocalRuntime, StartupFailed
from slurm_pathways.launch.news import LISTENING_EVENT

_HEAD = "127.0.0.1"


class OverTcp(LocalRuntime):
    """See ``LocalRuntime``."""

    def __init__(self, spec: RuntimeSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        self._controller_listens = threading.Event()
        self._controller_tcp = ""

    @property
    def credentials_folder(self) -> Path:
        """Where the run's credentials are."""
        return self.folder.path / "credentials"

    def _start_processes(self, cache: Path) -> None:
        Credentials.create(self.credentials_folder)
        self._start_component(
            CONTROLLER,
            self._modules.controller,
            *controller_arguments(self.spec, self.controller_address),
            *("--listen", f"tcp:{_HEAD}:0"),
            *self._network_arguments(_HEAD),
        )
        # The port is known only now.
        if not self._controller_listens.wait(self.spec.startup_timeout_s):
            raise StartupFailed(f"the controller did not listen within {self.spec.startup_timeout_s:g} s")
        self._start_workers(cache, self._controller_tcp)
        self._start_proxy()

    def _extra_worker_arguments(self, worker_id: int) -> tuple[object, ...]:
        return self._network_arguments(f"127.0.1.{worker_id + 1}")

    def _network_arguments(self, host: str) -> tuple[object, ...]:
        return ("--credentials", self.credentials_folder, "--advertise", host)

    def _start_proxy(self) -> Client:
        client = self._new_client()
        self._start_component(
            client.proxy,
            self._modules.proxy,
            *("--controller", self._controller_tcp),
            *("--listen", client.address),
            *("--links", f"tcp:{_HEAD}:0"),
            *self._network_arguments(_HEAD),
            *proxy_arguments(self.spec),
        )
        return client

    def _note(self, event: RuntimeEvent) -> None:
        if isinstance(event, ComponentEvent) and (event.component, event.name) == (CONTROLLER, LISTENING_EVENT):
            self._controller_tcp = next(one for one in event.fields["addresses"] if one.startswith("tcp:"))
            self._controller_listens.set()
        super()._note(event)
