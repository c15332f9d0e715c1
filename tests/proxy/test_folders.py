"""Where the folders lie that clients name."""

import re

import pytest

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.session import plugin_programs
from pathways_runtime.core.sharding import Sharding
from pathways_runtime.core.status import Code, StatusError
from pathways_runtime.core.stored import StoredArray
from pathways_runtime.proxy.folders import Folders


@pytest.mark.parametrize(
    ("location", "path"),
    [("gs://bucket", "/gs/bucket"), ("gs://bucket/a//b/", "/gs/bucket/a/b"), ("/tmp/a b", "/tmp/a b")],
)
def test_locations(location: str, path: str) -> None:
    assert Folders("/gs").path_of(location) == path


@pytest.mark.parametrize("location", ["gs://", "gs:///a", "gs://b/../../etc", "traces", "s3://bucket/a", ""])
def test_what_is_no_location(location: str) -> None:
    with pytest.raises(StatusError) as refused:
        Folders("/gs").path_of(location)
    assert refused.value.status.code is Code.INVALID_ARGUMENT


def test_no_directory_for_gs() -> None:
    with pytest.raises(StatusError) as refused:
        Folders().path_of("gs://bucket/a")
    assert refused.value.status.code is Code.FAILED_PRECONDITION
    assert "--gs-directory" in refused.value.status.message


def test_every_folder_of_a_program_is_found() -> None:
    folders = Folders("/gs")

    def found(plugin: plugin_programs.Plugin) -> plugin_programs.Plugin:
        return folders.found(plugin_programs.CompilePlugin(plugin, "name", (), "text", None)).plugin

    trace = found(plugin_programs.Trace("gs://b/t", "", 0, 2, 0, gives_array=True))
    assert isinstance(trace, plugin_programs.Trace) and trace.folder == "/gs/b/t"
    assert re.fullmatch(r"\d{4}(_\d\d){5}", trace.run)
    end = plugin_programs.HostTrace(False, "gs://b/t", "mine", 0, 2, 0)
    assert found(end) == plugin_programs.HostTrace(False, "/gs/b/t", "mine", 0, 2, 0)
    begin = plugin_programs.HostTrace(True, "", "", 0, 2, 0)
    assert found(begin) == begin
    there, here = (StoredArray(at, DType.F32, (2,), Sharding(())) for at in ("gs://b/a", "/gs/b/a"))
    assert found(plugin_programs.Write((there,), 1.0)) == plugin_programs.Write((here,), 1.0)
    assert found(plugin_programs.Read((there,), 1.0)) == plugin_programs.Read((here,), 1.0)


def test_a_trace_is_one_folder() -> None:
    plugin = plugin_programs.HostTrace(False, "/t", "../x", 0, 2, 0)
    with pytest.raises(StatusError, match="no name for a trace"):
        Folders().found(plugin_programs.CompilePlugin(plugin, "name", (), "text", None))
