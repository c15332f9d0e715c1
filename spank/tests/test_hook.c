#include "hook.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

static struct pathways_hook_result shell(const char *script, int timeout_s)
{
	char *const argv[] = {"/bin/sh", "-c", (char *)script, NULL};
	char *const environment[] = {"GIVEN=x y", NULL};

	return pathways_hook_run(argv, environment, timeout_s);
}

static void test_ends(void)
{
	struct pathways_hook_result result = shell("echo out; echo err >&2; exit 3", 10);
	char *const missing[] = {"/nonexistent/hook", NULL};
	char text[128];

	CHECK(result.end == PATHWAYS_HOOK_EXITED && result.value == 3);
	CHECK_TEXT(result.output, "out\nerr");
	pathways_hook_describe(&result, text, sizeof(text));
	CHECK_TEXT(text, "ended with exit code 3");

	result = shell("kill -TERM $$", 10);
	CHECK(result.end == PATHWAYS_HOOK_SIGNALLED && result.value == SIGTERM);

	result = pathways_hook_run(missing, NULL, 10);
	CHECK(result.end == PATHWAYS_HOOK_NOT_STARTED && result.value == ENOENT);
	pathways_hook_describe(&result, text, sizeof(text));
	CHECK_TEXT(text, "could not be started: No such file or directory");
}

/* What a user sets must not act on a program that root runs; no file of the daemon may leak into it. */
static void test_what_it_inherits(void)
{
	struct pathways_hook_result result;
	int fd = open("/dev/null", O_RDONLY);

	setenv("LD_PRELOAD_PROBE", "1", 1);
	signal(SIGPIPE, SIG_IGN);
	/* sh adds PWD, and _ in some shells. */
	result = shell("env | grep -v -e ^PWD= -e ^_= -e ^SHLVL= -e ^OLDPWD= | sort | tr '\\n' ' '", 10);
	CHECK_TEXT(result.output, "GIVEN=x y LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin ");
	result = shell("cat; for fd in /proc/self/fd/*; do n=${fd##*/}; [ $n -gt 2 ] && readlink $fd; done; true", 10);
	CHECK(fd > 2 && !strstr(result.output, "/dev/null"));
	result = shell("kill -PIPE $$; echo ignored", 10);
	CHECK(result.end == PATHWAYS_HOOK_SIGNALLED && result.value == SIGPIPE);
	signal(SIGPIPE, SIG_DFL);
	close(fd);
}

static long elapsed_ms(const struct timespec *start)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (now.tv_sec - start->tv_sec) * 1000L + (now.tv_nsec - start->tv_nsec) / 1000000L;
}

static void test_deadline(void)
{
	struct timespec start;
	struct pathways_hook_result result;
	char text[128];

	clock_gettime(CLOCK_MONOTONIC, &start);
	/* The grandchild holds the pipe: both must be killed for it to close. */
	result = shell("echo begun; sleep 60 & wait", 1);
	CHECK(result.end == PATHWAYS_HOOK_TIMED_OUT && elapsed_ms(&start) < 20000);
	CHECK_TEXT(result.output, "begun\n");
	pathways_hook_describe(&result, text, sizeof(text));
	CHECK_TEXT(text, "did not end in 1 s and was killed");
	/* Its output is closed, and it runs on. */
	result = shell("exec >/dev/null 2>&1; sleep 60", 1);
	CHECK(result.end == PATHWAYS_HOOK_TIMED_OUT && elapsed_ms(&start) < 40000);
}

static void test_long_output(void)
{
	struct pathways_hook_result result = shell("head -c 300000 /dev/zero | tr '\\0' x", 10);

	CHECK(result.end == PATHWAYS_HOOK_EXITED && result.value == 0);
	CHECK(strlen(result.output) == sizeof(result.output) - 1 && result.output[0] == 'x');
}

int main(void)
{
	test_ends();
	test_what_it_inherits();
	test_deadline();
	test_long_output();
	puts("hook: ok");
	return 0;
}
