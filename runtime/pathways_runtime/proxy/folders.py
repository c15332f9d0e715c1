"""Where the folders lie that clients name: ``gs://bucket/…`` is a folder of the cluster's file system here."""

import time
from pathlib import PurePosixPath

import msgspec

from pathways_runtime.core.session import plugin_programs
from pathways_runtime.core.status import Code, error
from pathways_runtime.core.stored import StoredArray

_GS = "gs://"


class Folders:
    """Finds folders.

    Args:
        gs_directory: ``gs://bucket/path`` is ``<gs_directory>/bucket/path``; None: there is no such thing.
    """

    def __init__(self, gs_directory: str | None = None) -> None:
        self._gs_directory = gs_directory

    def path_of(self, location: str) -> str:
        """The absolute path of what a client calls ``location``.

        Raises:
            StatusError: it cannot be told, or leads out of where it should lie.
        """
        if not location.startswith(_GS):
            if not location.startswith("/"):
                raise error(
                    Code.INVALID_ARGUMENT, f"{location!r}: a folder must be an absolute path, or gs://bucket/path"
                )
            return location
        if self._gs_directory is None:
            raise error(
                Code.FAILED_PRECONDITION,
                f"{location}: this runtime has no directory for gs:// locations. Name one that all hosts see: "
                "slurm-pathways run --gs-directory DIR, or SLURM_PATHWAYS_GS_DIRECTORY=DIR; gs://bucket/path is then "
                "DIR/bucket/path. An absolute path works where the client allows it",
            )
        parts = PurePosixPath(location.removeprefix(_GS)).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise error(Code.INVALID_ARGUMENT, f"{location} does not name a bucket, or leads out of it")
        return str(PurePosixPath(self._gs_directory, *parts))

    def found(self, request: plugin_programs.CompilePlugin) -> plugin_programs.CompilePlugin:
        """The same request with absolute paths, and a name for a trace that has none.

        Raises:
            StatusError: see ``path_of``.
        """
        plugin = request.plugin
        match plugin:
            case plugin_programs.Trace() | plugin_programs.HostTrace() if plugin.folder:
                run = plugin.run or time.strftime("%Y_%m_%d_%H_%M_%S")
                if "/" in run:
                    raise error(Code.INVALID_ARGUMENT, f"{run!r} is no name for a trace: it must be one folder's name")
                found: plugin_programs.Plugin = msgspec.structs.replace(
                    plugin, folder=self.path_of(plugin.folder), run=run
                )
            case plugin_programs.Write():
                found = msgspec.structs.replace(plugin, targets=tuple(map(self._stored, plugin.targets)))
            case plugin_programs.Read():
                found = msgspec.structs.replace(plugin, sources=tuple(map(self._stored, plugin.sources)))
            case _:
                return request
        return msgspec.structs.replace(request, plugin=found)

    def _stored(self, array: StoredArray) -> StoredArray:
        return msgspec.structs.replace(array, folder=self.path_of(array.folder))
