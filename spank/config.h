/*
 * What the administrator wrote behind the plugin's path in plugstack.conf: key=value arguments.
 *
 * Knows nothing of spank.h, so that it can be tested without Slurm.
 */
#ifndef PATHWAYS_CONFIG_H
#define PATHWAYS_CONFIG_H

#include <limits.h>
#include <stddef.h>

struct pathways_config {
	char task[PATH_MAX];    /* the script that starts a task: absolute */
	char command[PATH_MAX]; /* slurm-pathways: absolute, or a name that is looked up in the job's PATH */
	char hook[PATH_MAX];    /* slurm-pathways-hook: absolute, as root runs it; "" for none */
	char state[PATH_MAX];   /* where the hook makes a folder for each job: absolute */
	int hook_timeout_s;
};

/*
 * Read the arguments; those that are absent have their defaults.
 *
 * Returns 0, or -1 with a message: unknown key (with those that are allowed), a value that cannot be.
 */
int pathways_config_parse(int argc, char *const argv[], struct pathways_config *config, char *message,
                          size_t message_size);

#endif
