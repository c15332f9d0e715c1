#include "config.h"

#include "check.h"

static struct pathways_config config;
static char message[512];

static int parse(const char *argument)
{
	char *argv[] = {(char *)argument, NULL};

	return pathways_config_parse(argument ? 1 : 0, argv, &config, message, sizeof(message));
}

int main(void)
{
	static char too_long[PATH_MAX + 16] = "hook=/";

	CHECK(parse(NULL) == 0);
	CHECK_TEXT(config.command, "slurm-pathways");
	CHECK_TEXT(config.hook, "");
	CHECK_TEXT(config.state, "/run/slurm-pathways");
	CHECK(config.task[0] == '/' && config.hook_timeout_s == 5);

	{
		char *argv[] = {"task=/t", "command=/c", "hook=/h", "state=/s", "hook_timeout_s=300"};

		CHECK(pathways_config_parse(5, argv, &config, message, sizeof(message)) == 0);
	}
	CHECK_TEXT(config.task, "/t");
	CHECK_TEXT(config.command, "/c");
	CHECK_TEXT(config.hook, "/h");
	CHECK_TEXT(config.state, "/s");
	CHECK(config.hook_timeout_s == 300);

	CHECK(parse("command=pathways-beta") == 0);
	CHECK_TEXT(config.command, "pathways-beta");
	/* Defaults again: nothing of an earlier call stays. */
	CHECK(parse(NULL) == 0);
	CHECK_TEXT(config.command, "slurm-pathways");

	CHECK(parse("hooks=/h") == -1);
	CHECK_TEXT(message, "unknown argument 'hooks=/h'; allowed are task=, command=, hook=, state=, hook_timeout_s=");
	/* root runs it: never by a name that somebody's PATH decides. */
	CHECK(parse("hook=slurm-pathways-hook") == -1);
	CHECK_TEXT(message, "hook=slurm-pathways-hook: hook must be an absolute path");
	CHECK(parse("hook") == -1);
	CHECK_TEXT(message, "hook=: hook must be an absolute path");
	CHECK(parse("command=./here") == -1);
	CHECK_TEXT(message, "command=./here: command must be an absolute path or a name");
	CHECK(parse("hook_timeout_s=0") == -1);
	CHECK_TEXT(message, "hook_timeout_s=0: hook_timeout_s must be a whole number from 1 to 300");
	CHECK(parse("hook_timeout_s=5s") == -1);
	CHECK(parse("hook_timeout_s=") == -1);
	CHECK(parse("hook_timeout_s=99999999999999999999") == -1);

	memset(too_long + 6, 'x', PATH_MAX);
	CHECK(parse(too_long) == -1);
	CHECK_TEXT(message, "hook is longer than 4095 bytes");
	puts("config: ok");
	return 0;
}
