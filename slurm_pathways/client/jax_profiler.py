"""jaxlib's profiler as JAX's Python uses it; a part of ``jax_adapter``."""

from collections.abc import Callable
from typing import Any

import jax

from slurm_pathways.client.jax_adapter import is_proxy, is_replaced, private_names, replacing

#: ``(make, options) -> session``: in place of ``make(options)``, jaxlib's ``ProfilerSession``.
BeginTrace = Callable[[Callable[[Any], Any], Any], Any]
#: ``(export, data, folder, session id)``: in place of ``export(data, folder, session id)``, which writes what a session
#: has recorded.
Export = Callable[[Callable[[Any, str, str], None], Any, str, str], None]


def replace_profiler(begin: BeginTrace, export: Export) -> None:
    """Let traces of programs that use the proxy be made and written by these. Again does nothing.

    jax 0.10.2 and before write a trace by the session itself, later ones by a function.

    Raises:
        PrivateNamesChangedError: this version of JAX does it in another way.
    """
    with private_names():
        from jax._src.lib import _profiler

        original = _profiler.ProfilerSession
        make_options = _profiler.ProfileOptions
    if is_replaced(original):
        return

    @replacing(original)
    def make_session(options: Any = None) -> Any:
        # JAX makes its backends before it begins a trace.
        if not is_proxy(jax.local_devices()[0].client):
            return original() if options is None else original(options)
        return begin(original, make_options() if options is None else options)

    _profiler.ProfilerSession = make_session
    original_export = getattr(_profiler, "export_to_xprof", None)
    if original_export is None:
        return

    def call_original(data: Any, folder: str, session_id: str) -> None:
        original_export(data, folder, session_id=session_id)

    def export_to_xprof(data: Any, folder: str, *, session_id: str = "") -> None:
        export(call_original, data, folder, session_id)

    _profiler.export_to_xprof = export_to_xprof
