/*
 * At the end of a job, on each of its nodes: have removed what was set up there.
 *
 * Slurm starts this for every job, so it looks for the job's folder first and does nothing without one.
 */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "config.h"
#include "contexts.h"
#include "hook.h"
#include "options.h"

int pathways_job_epilog(spank_t spank, int argc, char *argv[])
{
	char *node = getenv("SLURMD_NODENAME");
	char message[PATHWAYS_MESSAGE_SIZE];
	char job_text[32], uid_text[32], gid_text[32];
	char folder[PATH_MAX + sizeof(job_text)];
	struct pathways_hook_result result;
	struct pathways_config config;
	struct stat status;
	uint32_t job_id;
	uid_t uid;
	gid_t gid;

	if (!node)
		return 0;
	/* A wrong plugstack.conf was said to the jobs that asked; nothing was set up for them. */
	if (pathways_config_parse(argc, argv, &config, message, sizeof(message)) || !config.hook[0])
		return 0;
	if (spank_get_item(spank, S_JOB_ID, &job_id) || spank_get_item(spank, S_JOB_UID, &uid) ||
	    spank_get_item(spank, S_JOB_GID, &gid))
		return 0;
	snprintf(job_text, sizeof(job_text), "%u", job_id);
	snprintf(folder, sizeof(folder), "%s/%s", config.state, job_text);
	if (stat(folder, &status) && errno == ENOENT)
		return 0;
	snprintf(uid_text, sizeof(uid_text), "%u", (unsigned)uid);
	snprintf(gid_text, sizeof(gid_text), "%u", (unsigned)gid);
	{
		char *const hook_argv[] = {config.hook, "cleanup", "--state", config.state, "--job-id",
		                           job_text,    "--uid",   uid_text,  "--gid",      gid_text,
		                           "--node",    node, NULL};
		result = pathways_hook_run(hook_argv, NULL, config.hook_timeout_s);
	}
	if (result.end != PATHWAYS_HOOK_EXITED || result.value != 0) {
		pathways_hook_describe(&result, message, sizeof(message));
		slurm_error("pathways: job %u: node cleanup: %s %s%s%s", job_id, config.hook, message,
		            result.output[0] ? ": " : "", result.output);
	} else if (result.output[0]) {
		slurm_info("pathways: job %u: node cleanup: %s", job_id, result.output);
	}
	return 0;
}
