/*
 * In slurmstepd: for a step that asks, have the node set up, then start the task script in place of each task's program.
 *
 * What goes wrong before the tasks exist is kept and said by the tasks, whose stderr is the user's.
 */
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config.h"
#include "contexts.h"
#include "hook.h"
#include "options.h"

/* Exit codes of a task that does not get as far as its program. */
enum { EXIT_WRONG_USE = 2, EXIT_NOT_FOUND = 127 };

static struct {
	struct pathways_config config;
	struct pathways_options options;
	bool has_failed;
	char failure[PATHWAYS_MESSAGE_SIZE];
	char node_dir[PATH_MAX]; /* what the hook made; "" for none */
} stepd;

/* Whether this step's tasks are ours to start. The batch script, salloc's shell and the extern step are not. */
static bool is_ours(spank_t spank)
{
	uint32_t step_id;

	return stepd.options.is_enabled && spank_get_item(spank, S_JOB_STEPID, &step_id) == ESPANK_SUCCESS &&
	       step_id < PATHWAYS_MAX_STEP_ID;
}

/* The first failure counts; what of it is too long is cut. */
__attribute__((format(printf, 1, 2))) static void keep_failure(const char *format, ...)
{
	va_list arguments;

	if (stepd.has_failed)
		return;
	va_start(arguments, format);
	vsnprintf(stepd.failure, sizeof(stepd.failure), format, arguments);
	va_end(arguments);
	stepd.has_failed = true;
}

/*
 * The client has checked the value, unless it has an older plugin or the value came by the environment. Not to answer with
 * a failure: Slurm would then run the step as if the option had not been given.
 */
static int receive(int val, const char *value, int remote)
{
	char message[PATHWAYS_MESSAGE_SIZE];

	(void)val;
	(void)remote;
	stepd.has_failed = false;
	if (pathways_options_parse(value, &stepd.options, message, sizeof(message))) {
		keep_failure("--pathways: %s", message);
		stepd.options.is_enabled = true;
	}
	return 0;
}

static struct spank_option option = {
	.name = "pathways",
	.arginfo = "[KEY=VALUE,...]",
	.usage = "[pathways] run the program as the client of all nodes' devices",
	.has_arg = 2,
	.cb = receive,
};

static void set_up_node(spank_t spank)
{
	char *node = getenv("SLURMD_NODENAME");
	char job_text[32], uid_text[32], gid_text[32], end[128];
	char *const argv[] = {stepd.config.hook, "setup", "--state", stepd.config.state, "--job-id", job_text, "--uid",
	                      uid_text, "--gid", gid_text, "--node", node, NULL};
	struct pathways_hook_result result;
	const char *last_line;
	uint32_t job_id;
	uid_t uid;
	gid_t gid;

	if (!node || spank_get_item(spank, S_JOB_ID, &job_id) || spank_get_item(spank, S_JOB_UID, &uid) ||
	    spank_get_item(spank, S_JOB_GID, &gid)) {
		keep_failure("node setup: couldn't find the job's id, owner or node; is the plugin built for this Slurm?");
		return;
	}
	snprintf(job_text, sizeof(job_text), "%u", job_id);
	snprintf(uid_text, sizeof(uid_text), "%u", (unsigned)uid);
	snprintf(gid_text, sizeof(gid_text), "%u", (unsigned)gid);
	result = pathways_hook_run(argv, NULL, stepd.config.hook_timeout_s);

	/* The last line is the folder; what it says before is for the log. */
	last_line = strrchr(result.output, '\n');
	last_line = last_line ? last_line + 1 : result.output;
	if (result.end != PATHWAYS_HOOK_EXITED || result.value != 0) {
		pathways_hook_describe(&result, end, sizeof(end));
		keep_failure("node setup: %s %s%s%s", stepd.config.hook, end, result.output[0] ? ": " : "", result.output);
	} else if (*last_line != '/') {
		keep_failure("node setup: %s did not name the node's folder, but said: %s", stepd.config.hook, result.output);
	} else {
		snprintf(stepd.node_dir, sizeof(stepd.node_dir), "%s", last_line);
		return;
	}
	slurm_error("pathways: job %u: %s", job_id, stepd.failure);
}

int pathways_stepd_init(spank_t spank, int argc, char *argv[])
{
	(void)argc;
	(void)argv;
	if (spank_option_register(spank, &option) != ESPANK_SUCCESS)
		slurm_error("pathways: init: couldn't register --pathways; steps that ask for it start without it");
	return 0;
}

int pathways_stepd_init_post_opt(spank_t spank, int argc, char *argv[])
{
	char message[PATHWAYS_MESSAGE_SIZE];

	if (!is_ours(spank))
		return 0;
	if (pathways_config_parse(argc, argv, &stepd.config, message, sizeof(message)))
		keep_failure("the administrator's plugstack.conf: %s", message);
	if (!stepd.has_failed && stepd.config.hook[0])
		set_up_node(spank);
	return 0;
}

/* The end of a task that must not run its program: Slurm would run it after a failure of an optional plugin. */
__attribute__((noreturn)) static void refuse(int exit_code, const char *text)
{
	const char *node = getenv("SLURMD_NODENAME");

	slurm_spank_log("pathways: node %s: %s", node ? node : "(unknown)", text);
	_exit(exit_code);
}

static void set_variable(spank_t spank, const char *name, const char *value)
{
	char text[256];
	spank_err_t failed = spank_setenv(spank, name, value, 1);

	if (failed) {
		snprintf(text, sizeof(text), "task start: couldn't set %s: %s", name, spank_strerror(failed));
		refuse(EXIT_WRONG_USE, text);
	}
}

/* In the child that becomes the task, as the job's user, just before its program is looked up in PATH and executed. */
int pathways_stepd_task_init(spank_t spank, int argc, char *argv[])
{
	char text[PATH_MAX + 128];
	uint32_t num_tasks;
	char **task_argv;
	int task_argc;

	(void)argc;
	(void)argv;
	if (!is_ours(spank))
		return 0;
	if (stepd.has_failed)
		refuse(EXIT_WRONG_USE, stepd.failure);
	if (spank_get_item(spank, S_JOB_LOCAL_TASK_COUNT, &num_tasks) ||
	    spank_get_item(spank, S_JOB_ARGV, &task_argc, &task_argv) || task_argc < 1)
		refuse(EXIT_WRONG_USE, "task start: couldn't read the step's tasks; is the plugin built for this Slurm?");
	if (num_tasks != 1) {
		snprintf(text, sizeof(text),
		         "--pathways starts one task on each node, which is the node's worker, and this step has %u here; "
		         "give --ntasks-per-node=1, and --cpus-per-task for its CPUs",
		         num_tasks);
		refuse(EXIT_WRONG_USE, text);
	}
	if (access(stepd.config.task, X_OK)) {
		snprintf(text, sizeof(text), "task start: couldn't execute %s: %m", stepd.config.task);
		refuse(EXIT_NOT_FOUND, text);
	}
	for (size_t i = 0; i < stepd.options.num_settings; i++)
		set_variable(spank, stepd.options.settings[i].key->variable, stepd.options.settings[i].value);
	/* The program may call srun itself, and its steps are its own. */
	spank_unsetenv(spank, "SLURM_SPANK__SLURM_SPANK_OPTION_pathways_pathways");
	set_variable(spank, "SLURM_PATHWAYS_TASK_COMMAND", stepd.config.command);
	set_variable(spank, "SLURM_PATHWAYS_TASK_PROGRAM", task_argv[0]);
	set_variable(spank, "SLURM_PATHWAYS_TASK_NODE_DIR", stepd.node_dir);
	/*
	 * spank.h says not to modify the vector. It offers nothing else that replaces a program and keeps what Slurm does
	 * between here and exec (TaskProlog, limits, TMPDIR); executing the script from here would skip all that. The vector
	 * is the task's own, in a process that is about to become the task: nobody else reads it. Looked up in Slurm's
	 * sources from 22.05 to 26.11, where task->argv is this vector in every one (docs/spank.md).
	 */
	task_argv[0] = stepd.config.task;
	return 0;
}
