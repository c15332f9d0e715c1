#ifndef PATHWAYS_VERSION_H
#define PATHWAYS_VERSION_H

/* "22.05.8", from the headers that the plugin is built against; the Makefile sets it. */
#ifndef PATHWAYS_SLURM_VERSION
#error "PATHWAYS_SLURM_VERSION is not set: build with make"
#endif

#endif
