#include "options.h"

#include "check.h"

static struct pathways_options options;
static char message[PATHWAYS_MESSAGE_SIZE];

static int parse(const char *text)
{
	return pathways_options_parse(text, &options, message, sizeof(message));
}

static void test_alone(void)
{
	CHECK(parse(NULL) == 0 && options.is_enabled && options.num_settings == 0);
	CHECK(parse("") == 0 && options.is_enabled && options.num_settings == 0);
	CHECK(parse("(null)") == 0 && options.is_enabled && options.num_settings == 0);
	CHECK_TEXT(message, "");
}

static void test_off_undoes_what_came_before(void)
{
	CHECK(parse("slices=2") == 0 && options.is_enabled);
	CHECK(parse("off") == 0 && !options.is_enabled && options.num_settings == 0);
}

static void test_values_in_order(void)
{
	CHECK(parse("slices=2,hosts-per-slice=16,startup-timeout-s=2.5,keep-logs=yes,compile-cache=/a b/c=d") == 0);
	CHECK(options.is_enabled && options.num_settings == 5);
	CHECK_TEXT(options.settings[0].key->variable, "SLURM_PATHWAYS_SLICES");
	CHECK_TEXT(options.settings[0].value, "2");
	CHECK_TEXT(options.settings[1].key->variable, "SLURM_PATHWAYS_HOSTS_PER_SLICE");
	CHECK_TEXT(options.settings[1].value, "16");
	CHECK_TEXT(options.settings[2].value, "2.5");
	CHECK_TEXT(options.settings[3].value, "yes");
	CHECK_TEXT(options.settings[4].value, "/a b/c=d");
}

static void test_the_last_call_counts(void)
{
	CHECK(parse("slices=2,spares=1") == 0);
	CHECK(parse("slices=3") == 0);
	CHECK(options.num_settings == 1);
	CHECK_TEXT(options.settings[0].value, "3");
}

static void refused(const char *text, const char *wanted)
{
	CHECK(parse(text) == -1);
	CHECK(!options.is_enabled && options.num_settings == 0);
	CHECK_TEXT(message, wanted);
}

static void refused_key(const char *text, const char *quoted)
{
	char wanted[1024];

	snprintf(wanted, sizeof(wanted), "unknown key '%s'; allowed are ", quoted);
	for (size_t i = 0; i < pathways_num_keys; i++) {
		strcat(wanted, i ? ", " : "");
		strcat(wanted, pathways_keys[i].name);
	}
	strcat(wanted, ", and 'off' alone");
	refused(text, wanted);
}

static void test_messages(void)
{
	refused_key("slice=2", "slice");
	refused_key("=1", "");
	refused_key("a\nb", "a?b");
	refused("slices=two", "slices must be a whole number from 1 to 65536, not 'two'");
	refused("slices=", "slices must be a whole number from 1 to 65536, not ''");
	refused("slices=-1", "slices must be a whole number from 1 to 65536, not '-1'");
	refused("slices= 2", "slices must be a whole number from 1 to 65536, not ' 2'");
	refused("slices=0x2", "slices must be a whole number from 1 to 65536, not '0x2'");
	refused("slices=65537", "slices must be a whole number from 1 to 65536, not '65537'");
	refused("slices=99999999999999999999999", "slices must be a whole number from 1 to 65536, not '99999999999999999999999'");
	refused("slices", "slices has no value; write slices= and a whole number from 1 to 65536");
	refused("kill-after-s=nan", "kill-after-s must be a number of seconds from 0 to 86400, not 'nan'");
	refused("kill-after-s=1.2.3", "kill-after-s must be a number of seconds from 0 to 86400, not '1.2.3'");
	refused("keep-logs=maybe", "keep-logs must be true or false, not 'maybe'");
	refused("platform=", "platform must be a text without control characters of 1 to 1023 bytes, not ''");
	refused("platform=a\033[2J", "platform must be a text without control characters of 1 to 1023 bytes, not 'a?[2J'");
	refused("slices=1,slices=2", "slices is given twice");
	refused("slices=1,", "there is a comma too many; write key=value,key=value");
	refused(",", "there is a comma too many; write key=value,key=value");
	refused("slices=1,,spares=1", "there is a comma too many; write key=value,key=value");
}

static void test_every_key_at_once(void)
{
	char text[1024] = "";

	for (size_t i = 0; i < pathways_num_keys; i++) {
		if (i)
			strcat(text, ",");
		strcat(text, pathways_keys[i].name);
		strcat(text, pathways_keys[i].kind == PATHWAYS_FLAG ? "=1" : "=2");
	}
	CHECK(parse(text) == 0 && options.num_settings == pathways_num_keys);
}

/* Room for the value, not one byte more; and a message that is cut stays terminated. */
static void test_sizes(void)
{
	static char text[16 + 2 * PATHWAYS_VALUE_SIZE];
	char small[8];

	strcpy(text, "platform=");
	memset(text + 9, 'x', PATHWAYS_VALUE_SIZE - 1);
	CHECK(parse(text) == 0 && strlen(options.settings[0].value) == PATHWAYS_VALUE_SIZE - 1);
	memset(text + 9, 'x', PATHWAYS_VALUE_SIZE);
	CHECK(parse(text) == -1 && strlen(message) < sizeof(message));
	for (size_t size = 0; size <= sizeof(small); size++) {
		memset(small, 'z', sizeof(small));
		CHECK(pathways_options_parse("slice=2", &options, small, size) == -1);
		CHECK(size == 0 || memchr(small, '\0', size));
		CHECK(size == sizeof(small) || small[size] == 'z');
	}
}

/* A fixed seed: every text of these pieces either parses or is explained, and ASan sees all of it. */
static void test_any_text(void)
{
	static const char *const pieces[] = {"slices", "=", ",", "2", "off", "keep-logs", "\n", "x", "-", "spares=1"};
	unsigned state = 1;

	for (int round = 0; round < 20000; round++) {
		char text[256] = "";
		int count;

		state = state * 1103515245U + 12345U;
		count = (int)(state >> 16) % 12;
		for (int i = 0; i < count; i++) {
			state = state * 1103515245U + 12345U;
			strcat(text, pieces[(state >> 16) % (sizeof(pieces) / sizeof(pieces[0]))]);
		}
		if (parse(text))
			CHECK(!options.is_enabled && message[0]);
		else
			CHECK(options.is_enabled == (strcmp(text, "off") != 0) && !message[0]);
	}
}

int main(void)
{
	test_alone();
	test_off_undoes_what_came_before();
	test_values_in_order();
	test_the_last_call_counts();
	test_messages();
	test_every_key_at_once();
	test_sizes();
	test_any_text();
	puts("options: ok");
	return 0;
}
