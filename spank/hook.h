/*
 * Running the hook helper: a program with a deadline, whose output is kept.
 *
 * Knows nothing of spank.h, so that it can be tested without Slurm.
 */
#ifndef PATHWAYS_HOOK_H
#define PATHWAYS_HOOK_H

#include <stddef.h>

enum pathways_hook_end {
	PATHWAYS_HOOK_EXITED,     /* value: its exit code */
	PATHWAYS_HOOK_SIGNALLED,  /* value: the signal */
	PATHWAYS_HOOK_TIMED_OUT,  /* it was killed; value: the deadline in seconds */
	PATHWAYS_HOOK_NOT_STARTED /* value: errno */
};

struct pathways_hook_result {
	enum pathways_hook_end end;
	int value;
	char output[2048]; /* the start of stdout and stderr together, without newlines at its end */
};

/*
 * Run argv[0], an absolute path, and wait for it no longer than timeout_s.
 *
 * It runs in a process group of its own, which is killed at the deadline; with an empty environment but for PATH, LANG and
 * what `environment` (NULL-terminated "NAME=value") has, since it may run as root beside variables that a user chose;
 * with stdin from /dev/null and no other open file.
 */
struct pathways_hook_result pathways_hook_run(char *const argv[], char *const environment[], int timeout_s);

/* One line that says how it ended, for people; nothing of its output. */
void pathways_hook_describe(const struct pathways_hook_result *result, char *text, size_t text_size);

#endif
