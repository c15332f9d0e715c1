/* What the tests share: a check that says where and what, and ends the test. */
#ifndef PATHWAYS_CHECK_H
#define PATHWAYS_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                               \
	do {                                                                                                               \
		if (!(condition)) {                                                                                            \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
			exit(1);                                                                                                   \
		}                                                                                                              \
	} while (0)

#define CHECK_TEXT(given, wanted)                                                                                      \
	do {                                                                                                               \
		if (strcmp(given, wanted) != 0) {                                                                              \
			fprintf(stderr, "%s:%d: %s is\n  '%s', not\n  '%s'\n", __FILE__, __LINE__, #given, given, wanted);         \
			exit(1);                                                                                                   \
		}                                                                                                              \
	} while (0)

#endif
