"""What a person uses: the command line, launchers, and the plugin that registers the ``proxy`` backend with JAX."""

__version__: str


def __getattr__(name: str) -> str:
    # Looking the version up costs more than all else that most processes import from here.
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("slurm-pathways")
