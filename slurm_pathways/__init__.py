"""What a person uses: the command line, launchers, and the plugin that registers the ``proxy`` backend with JAX."""

from importlib.metadata import version

__version__ = version("slurm-pathways")
