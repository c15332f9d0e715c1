"""What pyproject.toml and setup.cfg can't say yet without setuptools calling it experimental: the part in C."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # No module of Python's, and it needs nothing of it: a library for LD_PRELOAD, beside the modules. Where there
        # is no C compiler it is left out, and pathways_runtime.worker.private_sockets says what that means.
        Extension(
            "pathways_runtime.worker._private_sockets",
            sources=["runtime/native/private_sockets.c"],
            depends=["runtime/native/private_sockets.h"],
            extra_compile_args=["-std=gnu11", "-Wall", "-Wextra", "-fvisibility=hidden", "-fstack-protector-strong"],
            extra_link_args=["-Wl,-z,relro,-z,now"],
            py_limited_api=True,
            optional=True,
        )
    ],
)
