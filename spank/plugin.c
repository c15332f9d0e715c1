/*
 * The entry points of the SPANK plugin. Each only chooses the file of the context in which Slurm has called it.
 */
#include "contexts.h"
#include "version.h"

SPANK_PLUGIN(pathways, 1);

/* `strings` finds it in the installed file: the plugin loads only into this major version of Slurm. */
__attribute__((used)) static const char identity[] = "slurm-pathways SPANK plugin for Slurm " PATHWAYS_SLURM_VERSION;

int slurm_spank_init(spank_t spank, int argc, char *argv[])
{
	switch (spank_context()) {
	case S_CTX_LOCAL:
	case S_CTX_ALLOCATOR:
		return pathways_client_init(spank, argc, argv);
	case S_CTX_REMOTE:
		return pathways_stepd_init(spank, argc, argv);
	default:
		return 0;
	}
}

int slurm_spank_init_post_opt(spank_t spank, int argc, char *argv[])
{
	switch (spank_context()) {
	case S_CTX_LOCAL:
		return pathways_srun_init_post_opt(spank, argc, argv);
	case S_CTX_REMOTE:
		return pathways_stepd_init_post_opt(spank, argc, argv);
	default:
		return 0;
	}
}

int slurm_spank_task_init(spank_t spank, int argc, char *argv[])
{
	switch (spank_context()) {
	case S_CTX_REMOTE:
		return pathways_stepd_task_init(spank, argc, argv);
	default:
		return 0;
	}
}

int slurm_spank_job_epilog(spank_t spank, int argc, char *argv[])
{
	switch (spank_context()) {
	case S_CTX_JOB_SCRIPT:
		return pathways_job_epilog(spank, argc, argv);
	default:
		return 0;
	}
}
