/*
 * The value of --pathways: a list of key=value, parsed and checked.
 *
 * Knows nothing of spank.h, so that it can be tested without Slurm.
 */
#ifndef PATHWAYS_OPTIONS_H
#define PATHWAYS_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

/* As many as there are keys; each may be given once. */
#define PATHWAYS_MAX_SETTINGS 24
/* Of one value, with its terminating zero. */
#define PATHWAYS_VALUE_SIZE 1024
/* Enough for a message that quotes the longest value and lists all keys; longer ones are cut. */
#define PATHWAYS_MESSAGE_SIZE 2048

enum pathways_kind {
	PATHWAYS_COUNT,   /* a whole number within bounds */
	PATHWAYS_SECONDS, /* a number of seconds within bounds */
	PATHWAYS_FLAG,    /* true or false, and what else Python reads so */
	PATHWAYS_TEXT,    /* anything but nothing; checked where it is used */
};

/*
 * One key. The table agrees with the settings in slurm_pathways/config.py, as a test of it checks; the bounds here are
 * those of no machine in particular, and the Python side checks again.
 */
struct pathways_key {
	const char *name;     /* as the user writes it */
	const char *variable; /* how the value reaches the runtime: an environment variable of the task */
	enum pathways_kind kind;
	long minimum;
	long maximum;
};

struct pathways_setting {
	const struct pathways_key *key;
	char value[PATHWAYS_VALUE_SIZE];
};

struct pathways_options {
	bool is_enabled; /* the option was given, and its value was not "off" */
	size_t num_settings;
	struct pathways_setting settings[PATHWAYS_MAX_SETTINGS];
};

extern const struct pathways_key pathways_keys[];
extern const size_t pathways_num_keys;

/*
 * Parse what follows "--pathways=".
 *
 * text: NULL, "" or "(null)" for --pathways alone, "off" to undo one from the environment, else "key=value,key=value".
 * options: overwritten as a whole, so that the last of several calls counts (Slurm gives us the value of the environment
 *     first, then that of the command line).
 * message: on failure, what was given, what is allowed; always terminated.
 *
 * Returns 0, or -1 with *options disabled.
 */
int pathways_options_parse(const char *text, struct pathways_options *options, char *message, size_t message_size);

#endif
