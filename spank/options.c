#include "options.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VARIABLE(name) "SLURM_PATHWAYS_" name

const struct pathways_key pathways_keys[] = {
	{"slices", VARIABLE("SLICES"), PATHWAYS_COUNT, 1, 65536},
	{"hosts-per-slice", VARIABLE("HOSTS_PER_SLICE"), PATHWAYS_COUNT, 1, 65536},
	{"devices-per-host", VARIABLE("DEVICES_PER_HOST"), PATHWAYS_COUNT, 1, 65536},
	{"platform", VARIABLE("PLATFORM"), PATHWAYS_TEXT, 0, 0},
	{"spares", VARIABLE("SPARES"), PATHWAYS_COUNT, 0, 65536},
	{"absent-slices", VARIABLE("ABSENT_SLICES"), PATHWAYS_COUNT, 0, 65536},
	{"compile-cache", VARIABLE("COMPILE_CACHE"), PATHWAYS_TEXT, 0, 0},
	{"force-sockets", VARIABLE("FORCE_SOCKETS"), PATHWAYS_FLAG, 0, 0},
	{"relay-fanout", VARIABLE("RELAY_FANOUT"), PATHWAYS_COUNT, 2, 65536},
	{"keep-logs", VARIABLE("KEEP_LOGS"), PATHWAYS_FLAG, 0, 0},
	{"log-dir", VARIABLE("LOG_DIR"), PATHWAYS_TEXT, 0, 0},
	{"gs-directory", VARIABLE("GS_DIRECTORY"), PATHWAYS_TEXT, 0, 0},
	{"job-comment", VARIABLE("JOB_COMMENT"), PATHWAYS_FLAG, 0, 0},
	{"startup-timeout-s", VARIABLE("STARTUP_TIMEOUT_S"), PATHWAYS_SECONDS, 1, 86400},
	{"failure-grace-s", VARIABLE("FAILURE_GRACE_S"), PATHWAYS_SECONDS, 0, 86400},
	{"heartbeat-timeout-s", VARIABLE("HEARTBEAT_TIMEOUT_S"), PATHWAYS_SECONDS, 2, 86400},
	{"slice-by", VARIABLE("SLICE_BY"), PATHWAYS_TEXT, 0, 0},
	{"interface", VARIABLE("INTERFACE"), PATHWAYS_TEXT, 0, 0},
	{"data-plane-encryption", VARIABLE("DATA_PLANE_ENCRYPTION"), PATHWAYS_TEXT, 0, 0},
	{"on-head-loss", VARIABLE("ON_HEAD_LOSS"), PATHWAYS_TEXT, 0, 0},
	{"kill-after-s", VARIABLE("KILL_AFTER_S"), PATHWAYS_SECONDS, 0, 86400},
};
const size_t pathways_num_keys = sizeof(pathways_keys) / sizeof(pathways_keys[0]);

_Static_assert(sizeof(pathways_keys) / sizeof(pathways_keys[0]) <= PATHWAYS_MAX_SETTINGS, "room for every key");

/* Text that grows until its buffer is full; what does not fit is cut. */
struct writer {
	char *text;
	size_t size;
	size_t length;
};

__attribute__((format(printf, 2, 3))) static void put(struct writer *writer, const char *format, ...)
{
	va_list arguments;
	int wanted;

	if (writer->length + 1 >= writer->size)
		return;
	va_start(arguments, format);
	wanted = vsnprintf(writer->text + writer->length, writer->size - writer->length, format, arguments);
	va_end(arguments);
	if (wanted < 0)
		return;
	writer->length += (size_t)wanted;
	if (writer->length >= writer->size)
		writer->length = writer->size - 1;
}

/* Messages go to terminals and logs: a control character in what the user gave must not act there. */
static void put_quoted(struct writer *writer, const char *text, size_t length)
{
	put(writer, "'");
	for (size_t i = 0; i < length; i++)
		put(writer, "%c", iscntrl((unsigned char)text[i]) ? '?' : text[i]);
	put(writer, "'");
}

static void put_allowed(struct writer *writer, const struct pathways_key *key)
{
	switch (key->kind) {
	case PATHWAYS_COUNT:
		put(writer, "a whole number from %ld to %ld", key->minimum, key->maximum);
		break;
	case PATHWAYS_SECONDS:
		put(writer, "a number of seconds from %ld to %ld", key->minimum, key->maximum);
		break;
	case PATHWAYS_FLAG:
		put(writer, "true or false");
		break;
	case PATHWAYS_TEXT:
		put(writer, "a text without control characters of 1 to %d bytes", PATHWAYS_VALUE_SIZE - 1);
		break;
	}
}

static void put_keys(struct writer *writer)
{
	for (size_t i = 0; i < pathways_num_keys; i++)
		put(writer, "%s%s", i ? ", " : "", pathways_keys[i].name);
}

static const struct pathways_key *find_key(const char *name, size_t length)
{
	for (size_t i = 0; i < pathways_num_keys; i++) {
		if (strlen(pathways_keys[i].name) == length && strncmp(pathways_keys[i].name, name, length) == 0)
			return &pathways_keys[i];
	}
	return NULL;
}

static bool is_flag(const char *value)
{
	static const char *const flags[] = {"true", "false", "1", "0", "yes", "no", "on", "off"};

	for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
		if (strcmp(flags[i], value) == 0)
			return true;
	}
	return false;
}

static bool is_allowed(const struct pathways_key *key, const char *value)
{
	const char *digits = key->kind == PATHWAYS_COUNT ? "0123456789" : "0123456789.";
	char *end;
	double number;

	switch (key->kind) {
	case PATHWAYS_COUNT:
	case PATHWAYS_SECONDS:
		/* strtod alone would take signs, spaces, hexadecimal, inf and nan. */
		if (*value == '\0' || strspn(value, digits) != strlen(value))
			return false;
		number = strtod(value, &end);
		return *end == '\0' && number >= (double)key->minimum && number <= (double)key->maximum;
	case PATHWAYS_FLAG:
		return is_flag(value);
	case PATHWAYS_TEXT:
		for (const char *byte = value; *byte; byte++) {
			if (iscntrl((unsigned char)*byte))
				return false;
		}
		return *value != '\0';
	}
	return false;
}

/* One "key=value" of `length` bytes; -1 with the rest of the message written. */
static int parse_item(const char *item, size_t length, struct pathways_options *options, struct writer *writer)
{
	const char *equals = memchr(item, '=', length);
	size_t name_length = equals ? (size_t)(equals - item) : length;
	const struct pathways_key *key = find_key(item, name_length);
	struct pathways_setting *setting;
	size_t value_length;

	if (!key) {
		put(writer, "unknown key ");
		put_quoted(writer, item, name_length);
		put(writer, "; allowed are ");
		put_keys(writer);
		put(writer, ", and 'off' alone");
		return -1;
	}
	for (size_t i = 0; i < options->num_settings; i++) {
		if (options->settings[i].key == key) {
			put(writer, "%s is given twice", key->name);
			return -1;
		}
	}
	if (!equals) {
		put(writer, "%s has no value; write %s= and ", key->name, key->name);
		put_allowed(writer, key);
		return -1;
	}
	setting = &options->settings[options->num_settings];
	value_length = length - name_length - 1;
	if (value_length < sizeof(setting->value)) {
		setting->key = key;
		memcpy(setting->value, equals + 1, value_length);
		setting->value[value_length] = '\0';
		if (is_allowed(key, setting->value)) {
			options->num_settings++;
			return 0;
		}
	}
	put(writer, "%s must be ", key->name);
	put_allowed(writer, key);
	put(writer, ", not ");
	put_quoted(writer, equals + 1, value_length);
	return -1;
}

int pathways_options_parse(const char *text, struct pathways_options *options, char *message, size_t message_size)
{
	struct writer writer = {message, message_size, 0};
	/* Slurm's own writing of an option without a value, in the environment of a job that was submitted with it. */
	const char *item = text && strcmp(text, "(null)") == 0 ? NULL : text;

	memset(options, 0, sizeof(*options));
	if (message_size)
		message[0] = '\0';
	if (text && strcmp(text, "off") == 0)
		return 0;
	while (item && *item) {
		size_t length = strcspn(item, ",");

		if (length == 0 || (item[length] == ',' && item[length + 1] == '\0')) {
			put(&writer, "there is a comma too many; write key=value,key=value");
			goto fail;
		}
		if (parse_item(item, length, options, &writer))
			goto fail;
		item += length + (item[length] == ',');
	}
	options->is_enabled = true;
	return 0;

fail:
	memset(options, 0, sizeof(*options));
	return -1;
}
