#include "config.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef PATHWAYS_LIBEXECDIR
#define PATHWAYS_LIBEXECDIR "/usr/libexec/slurm-pathways"
#endif

#define MAX_HOOK_TIMEOUT_S 300

static const struct pathways_config defaults = {
	.task = PATHWAYS_LIBEXECDIR "/slurm-pathways-task",
	.command = "slurm-pathways",
	.hook = "",
	.state = "/run/slurm-pathways",
	/* The step's launch waits for the hook, and srun gives a launch MessageTimeout (10 s by default). */
	.hook_timeout_s = 5,
};

static int set_path(const char *key, const char *value, bool may_be_name, char *field, char *message, size_t message_size)
{
	bool is_name = may_be_name && *value && !strchr(value, '/');

	if (*value != '/' && !is_name) {
		snprintf(message, message_size, "%s=%s: %s must be an absolute path%s", key, value, key,
		         may_be_name ? " or a name" : "");
		return -1;
	}
	if (snprintf(field, PATH_MAX, "%s", value) >= PATH_MAX) {
		snprintf(message, message_size, "%s is longer than %d bytes", key, PATH_MAX - 1);
		return -1;
	}
	return 0;
}

static int set_seconds(const char *value, int *field, char *message, size_t message_size)
{
	char *end;
	long seconds;

	errno = 0;
	seconds = strtol(value, &end, 10);
	if (errno || end == value || *end || seconds < 1 || seconds > MAX_HOOK_TIMEOUT_S) {
		snprintf(message, message_size, "hook_timeout_s=%s: hook_timeout_s must be a whole number from 1 to %d", value,
		         MAX_HOOK_TIMEOUT_S);
		return -1;
	}
	*field = (int)seconds;
	return 0;
}

int pathways_config_parse(int argc, char *const argv[], struct pathways_config *config, char *message,
                          size_t message_size)
{
	*config = defaults;
	if (message_size)
		message[0] = '\0';
	for (int i = 0; i < argc; i++) {
		size_t length = strcspn(argv[i], "=");
		const char *value = argv[i] + length + (argv[i][length] == '=');
		int failed;

#define IS(name) (strlen(name) == length && strncmp(argv[i], name, length) == 0)
		if (IS("task")) {
			failed = set_path("task", value, false, config->task, message, message_size);
		} else if (IS("command")) {
			failed = set_path("command", value, true, config->command, message, message_size);
		} else if (IS("hook")) {
			failed = set_path("hook", value, false, config->hook, message, message_size);
		} else if (IS("state")) {
			failed = set_path("state", value, false, config->state, message, message_size);
		} else if (IS("hook_timeout_s")) {
			failed = set_seconds(value, &config->hook_timeout_s, message, message_size);
		} else {
			snprintf(message, message_size,
			         "unknown argument '%s'; allowed are task=, command=, hook=, state=, hook_timeout_s=", argv[i]);
			failed = -1;
		}
#undef IS
		if (failed)
			return -1;
	}
	return 0;
}
