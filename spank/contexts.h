/*
 * What plugin.c calls: one file for each side on which Slurm loads the plugin.
 *
 * Every function returns 0 whatever happens. In plugstack.conf the plugin is `optional`, so that Slurm ignores failures of
 * hooks, and were it `required`, some of them would drain a node. A job is failed where only that job is concerned: in the
 * option's callback (the command that submits says no) and in a task, which ends before its program starts.
 */
#ifndef PATHWAYS_CONTEXTS_H
#define PATHWAYS_CONTEXTS_H

#include <stdint.h>
#include <slurm/spank.h>

/* Step ids above this one are the batch script, the extern step and the like: never a runtime's hosts. */
#define PATHWAYS_MAX_STEP_ID 0xfffffff0U

/* client.c: srun, sbatch, salloc. */
int pathways_client_init(spank_t spank, int argc, char *argv[]);
int pathways_srun_init_post_opt(spank_t spank, int argc, char *argv[]);

/* slurmstepd.c: the daemon that runs one step on one node. */
int pathways_stepd_init(spank_t spank, int argc, char *argv[]);
int pathways_stepd_init_post_opt(spank_t spank, int argc, char *argv[]);
int pathways_stepd_task_init(spank_t spank, int argc, char *argv[]);

/* job_script.c: a process of its own at the end of a job, on each of its nodes. */
int pathways_job_epilog(spank_t spank, int argc, char *argv[]);

#endif
