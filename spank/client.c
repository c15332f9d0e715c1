/*
 * In srun, sbatch and salloc: offer --pathways and say at once what is wrong with its value.
 */
#include <stdbool.h>
#include <stdlib.h>

#include "config.h"
#include "contexts.h"
#include "options.h"
#include "version.h"

static struct {
	bool is_asked; /* by the last value that Slurm gave us */
	/* Not reported before someone asks: a line in every srun of the cluster would be worse. */
	int config_failed;
	char config_message[PATHWAYS_MESSAGE_SIZE];
} client;

static int check(int val, const char *value, int remote)
{
	struct pathways_options options;
	char message[PATHWAYS_MESSAGE_SIZE];

	(void)val;
	(void)remote;
	if (pathways_options_parse(value, &options, message, sizeof(message))) {
		slurm_error("pathways: --pathways: %s", message);
		return -1;
	}
	client.is_asked = options.is_enabled;
	if (options.is_enabled && client.config_failed) {
		slurm_error("pathways: the administrator's plugstack.conf: %s", client.config_message);
		return -1;
	}
	return 0;
}

/* Slurm copies what it needs of it. */
static struct spank_option option = {
	.name = "pathways",
	.arginfo = "[KEY=VALUE,...]",
	.usage = "[pathways] run the program as the client of all nodes' devices; keys: slices, hosts-per-slice, "
	         "devices-per-host, spares, ...; off to undo (built for Slurm " PATHWAYS_SLURM_VERSION ")",
	.has_arg = 2,
	.cb = check,
};

int pathways_client_init(spank_t spank, int argc, char *argv[])
{
	struct pathways_config config;

	client.config_failed =
		pathways_config_parse(argc, argv, &config, client.config_message, sizeof(client.config_message));
	if (spank_option_register(spank, &option) != ESPANK_SUCCESS)
		slurm_error("pathways: init: couldn't register --pathways; it is not available here");
	return 0;
}

/* In srun only, where the environment of the tasks is made. */
int pathways_srun_init_post_opt(spank_t spank, int argc, char *argv[])
{
	(void)spank;
	(void)argc;
	(void)argv;
	/*
	 * A node that lacks the plugin runs the program as it is. With this a JAX program fails there, for want of a runtime;
	 * without it, each node's copy would compute on its own devices, and the user would take that for the result.
	 */
	if (client.is_asked && setenv("JAX_PLATFORMS", "proxy", 0))
		slurm_error("pathways: couldn't set JAX_PLATFORMS: %m");
	return 0;
}
