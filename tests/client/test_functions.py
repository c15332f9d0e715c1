"""Functions say where they were pickled; nothing else of them changes."""

import platform
import types
from pathlib import Path
from typing import Any

import jax
import pytest

from pathways_runtime.wire.colocated import split_origin
from slurm_pathways.client import functions, jax_adapter, jax_functions


def test_a_function_says_versions_folders_and_precision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    origin, pickled = split_origin(functions.with_this_origin(b"pickle"))
    assert pickled == b"pickle" and origin is not None
    assert (origin.python, origin.jax) == (platform.python_version(), jax.__version__)
    assert origin.module_path[0] == str(tmp_path), "the program's folder, by its name"
    assert not origin.enable_x64
    with jax.enable_x64(True):
        wide, _ = split_origin(functions.with_this_origin(b""))
    assert wide is not None and wide.enable_x64


def test_what_is_sent_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.lib import _jax

    made: list[Any] = []
    programs = types.SimpleNamespace(make_colocated_python_program=lambda *arguments: made.append(arguments))
    monkeypatch.setattr(_jax, "ifrt_programs", programs)
    for _ in range(2):
        jax_functions.replace_pickles(lambda pickled: b"<" + pickled + b">")
    programs.make_colocated_python_program("f", b"pickle", "devices", "inputs", "outputs")
    assert made == [("f", b"<pickle>", "devices", "inputs", "outputs")]


def test_a_jax_that_makes_them_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.lib import _jax

    monkeypatch.setattr(_jax, "ifrt_programs", types.SimpleNamespace())
    with pytest.raises(jax_adapter.PrivateNamesChangedError, match="make_colocated_python_program"):
        jax_functions.replace_pickles(lambda pickled: pickled)
