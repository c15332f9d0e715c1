from pathlib import Path

import pytest

from slurm_pathways.config import ConfigurationError
from slurm_pathways.launch.client_environment import (
    check_client_environment,
    client_environment,
    component_environment,
)

ADDRESS, RUN_DIR = "unix:/run/proxy-0.sock", Path("/run")


def test_what_a_client_needs_is_set_and_the_rest_is_kept() -> None:
    environ = {"PATH": "/bin", "XLA_FLAGS": "--xla_dump_to=/tmp/d", "JAX_ENABLE_X64": "1"}
    assert client_environment(environ, ADDRESS, RUN_DIR) == {
        **environ,
        "JAX_PLATFORMS": "proxy",
        "JAX_BACKEND_TARGET": "grpc://unix:/run/proxy-0.sock",
        "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
        "SLURM_PATHWAYS_RUN_DIR": "/run",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"
        ":glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=1073741824",
        "IFRT_PROXY_GRPC_MAX_ONGOING_HOST_BUFFER_STORES": "64",
    }


@pytest.mark.parametrize("platforms", ["proxy", "proxy,cpu", "proxy, cpu"])
def test_what_the_user_has_chosen_is_kept(platforms: str) -> None:
    users = {
        "JAX_PLATFORMS": platforms,
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "GLIBC_TUNABLES": "glibc.malloc.arena_max=2",
        "IFRT_PROXY_GRPC_MAX_ONGOING_HOST_BUFFER_STORES": "0",
    }
    environ = dict(users)
    check_client_environment(environ)
    result = client_environment(environ, ADDRESS, RUN_DIR)
    assert {name: result[name] for name in users} == users


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"JAX_PLATFORMS": "cpu"}, "JAX_PLATFORMS=cpu is set.*Allowed are proxy and lists with proxy.*Unset it"),
        ({"JAX_BACKEND_TARGET": "grpc://other:1"}, "JAX_BACKEND_TARGET=grpc://other:1 is set.*Unset it"),
        ({"IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "1"}, "CREDENTIALS=1 is set.*Allowed is true"),
        ({"SLURM_PATHWAYS_RUN_DIR": "/r"}, "the program of a run already"),
    ],
)
def test_what_contradicts_a_run_is_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_client_environment(environ)


def test_empty_variables_are_as_good_as_none() -> None:
    check_client_environment({"JAX_PLATFORMS": "", "JAX_BACKEND_TARGET": ""})


def test_components_get_nothing_that_is_the_programs() -> None:
    environ = {
        "HOME": "/root",
        "XLA_FLAGS": "--no_such_flag",
        "JAX_PLATFORMS": "proxy",
        "JAX_DEBUG_NANS": "1",
        "PYTHONWARNINGS": "error",
        "PYTHONPATH": "/lib",
    }
    assert component_environment(environ) == {"HOME": "/root", "PYTHONPATH": "/lib", "PYTHONSAFEPATH": "1"}
