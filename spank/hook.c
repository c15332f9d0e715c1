#define _GNU_SOURCE

#include "hook.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_ENVIRONMENT 16

static long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000L + now.tv_nsec / 1000000L;
}

/* In the child: only async-signal-safe calls from here, as slurmstepd has threads. */
__attribute__((noreturn)) static void become_hook(char *const argv[], char *const environment[], int output, int failure)
{
	struct sigaction by_default = {.sa_handler = SIG_DFL};
	sigset_t none;
	int null = open("/dev/null", O_RDONLY);
	int error;

	setpgid(0, 0);
	/* slurmstepd ignores SIGPIPE and blocks signals; a program expects neither. */
	sigaction(SIGPIPE, &by_default, NULL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	if (null < 0 || dup2(null, STDIN_FILENO) < 0 || dup2(output, STDOUT_FILENO) < 0 || dup2(output, STDERR_FILENO) < 0)
		goto fail;
	/* `failure` closes itself on exec; everything else must not leak into the hook. */
	for (int fd = STDERR_FILENO + 1; fd < 1024; fd++) {
		if (fd != failure)
			close(fd);
	}
	execve(argv[0], argv, environment);
fail:
	error = errno;
	if (write(failure, &error, sizeof(error)) < 0)
		_exit(126);
	_exit(127);
}

/* Read output until its end or the deadline; what does not fit is read and dropped, so that the hook never blocks. */
static bool read_output(int fd, long deadline_ms, char *output, size_t size)
{
	size_t length = 0;

	for (;;) {
		struct pollfd readable = {.fd = fd, .events = POLLIN};
		long left_ms = deadline_ms - now_ms();
		char chunk[512];
		ssize_t num_read;

		if (left_ms <= 0)
			return false;
		if (poll(&readable, 1, (int)left_ms) < 0 && errno != EINTR)
			return true;
		if (!readable.revents)
			continue;
		num_read = read(fd, chunk, sizeof(chunk));
		if (num_read < 0 && errno == EINTR)
			continue;
		if (num_read <= 0)
			break;
		for (ssize_t i = 0; i < num_read && length + 1 < size; i++) {
			if (chunk[i] != '\0')
				output[length++] = chunk[i];
		}
		output[length] = '\0';
	}
	while (length > 0 && output[length - 1] == '\n')
		output[--length] = '\0';
	return true;
}

/* Wait for the end until the deadline. The hook may close its output and run on, hence not a plain waitpid. */
static bool wait_until(pid_t pid, long deadline_ms, int *status)
{
	const struct timespec pause = {.tv_nsec = 2000000};

	for (;;) {
		pid_t ended = waitpid(pid, status, WNOHANG);

		if (ended == pid)
			return true;
		if (ended < 0 && errno != EINTR)
			return false;
		if (now_ms() >= deadline_ms)
			return false;
		nanosleep(&pause, NULL);
	}
}

struct pathways_hook_result pathways_hook_run(char *const argv[], char *const environment[], int timeout_s)
{
	static char path[] = "PATH=/usr/sbin:/usr/bin:/sbin:/bin";
	static char language[] = "LANG=C.UTF-8";
	struct pathways_hook_result result = {.end = PATHWAYS_HOOK_NOT_STARTED};
	char *whole_environment[MAX_ENVIRONMENT + 3] = {path, language};
	int output[2] = {-1, -1};
	int failure[2] = {-1, -1};
	long deadline_ms = now_ms() + timeout_s * 1000L;
	int status = 0;
	int error;
	pid_t pid;

	for (int i = 0; environment && environment[i] && i < MAX_ENVIRONMENT; i++)
		whole_environment[i + 2] = environment[i];
	if (pipe2(output, O_CLOEXEC) || pipe2(failure, O_CLOEXEC)) {
		result.value = errno;
		goto done;
	}
	pid = fork();
	if (pid < 0) {
		result.value = errno;
		goto done;
	}
	if (pid == 0)
		become_hook(argv, whole_environment, output[1], failure[1]);
	/* Also here, so that the group exists when it has to be killed. It fails once the child has called exec. */
	setpgid(pid, pid);
	close(output[1]);
	close(failure[1]);
	output[1] = failure[1] = -1;

	if (read(failure[0], &error, sizeof(error)) == (ssize_t)sizeof(error)) {
		waitpid(pid, &status, 0);
		result.value = error;
		goto done;
	}
	if (!read_output(output[0], deadline_ms, result.output, sizeof(result.output)) ||
	    !wait_until(pid, deadline_ms, &status)) {
		kill(-pid, SIGKILL);
		waitpid(pid, &status, 0);
		result.end = PATHWAYS_HOOK_TIMED_OUT;
		result.value = timeout_s;
	} else if (WIFSIGNALED(status)) {
		result.end = PATHWAYS_HOOK_SIGNALLED;
		result.value = WTERMSIG(status);
	} else {
		result.end = PATHWAYS_HOOK_EXITED;
		result.value = WEXITSTATUS(status);
	}

done:
	for (int i = 0; i < 2; i++) {
		if (output[i] >= 0)
			close(output[i]);
		if (failure[i] >= 0)
			close(failure[i]);
	}
	return result;
}

void pathways_hook_describe(const struct pathways_hook_result *result, char *text, size_t text_size)
{
	switch (result->end) {
	case PATHWAYS_HOOK_EXITED:
		snprintf(text, text_size, "ended with exit code %d", result->value);
		return;
	case PATHWAYS_HOOK_SIGNALLED:
		snprintf(text, text_size, "was killed by signal %d", result->value);
		return;
	case PATHWAYS_HOOK_TIMED_OUT:
		snprintf(text, text_size, "did not end in %d s and was killed", result->value);
		return;
	case PATHWAYS_HOOK_NOT_STARTED:
		snprintf(text, text_size, "could not be started: %s", strerror(result->value));
		return;
	}
}
