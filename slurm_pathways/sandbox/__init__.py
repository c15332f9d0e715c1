"""A private, real Slurm on one Linux machine: munge, MariaDB, slurmdbd, slurmctld and as many slurmd as wanted.

``spec``, ``layout``, ``configuration``, ``render``, ``places`` and ``plan`` are pure: values in, text and argument
lists out. ``system`` is the only module that runs programs and looks at processes, ``perform`` has it do what plans
say, and ``cluster`` has ``Sandbox``, which users call.
"""
