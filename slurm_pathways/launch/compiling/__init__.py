"""``slurm-pathways compile``: a program's compilations without the devices that it is for."""
