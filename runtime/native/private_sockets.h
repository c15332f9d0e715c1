#ifndef PRIVATE_SOCKETS_H
#define PRIVATE_SOCKETS_H

#include <stdint.h>

/* 127.192.0.0, and the bits below it. */
#define PRIVATE_SOCKETS_RANGE 0x7fc00000u
#define PRIVATE_SOCKETS_MAX_MEMBER 0x003fffffu

/*
 * From now on, stand-ins lead to sockets in this folder, an absolute path, and this process is this member.
 *
 * Returns 0, or -1 with errno: EALREADY, it is in use; ENAMETOOLONG, sockets there would have paths that are too long;
 * EINVAL, a path that is not absolute, or a member beyond the last. Not to be called by two threads at once.
 */
int slurm_pathways_private_sockets_use(const char *own_folder, uint32_t member);

#endif
