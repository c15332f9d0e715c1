/*
 * Lets a library that only knows TCP, and no authentication, speak through Unix sockets: gloo in jaxlib.
 *
 * Preloaded into a process (LD_PRELOAD), it does nothing until slurm_pathways_private_sockets_use names a folder, which
 * must be its user's alone. From then on the addresses 127.192.0.0/10 stand for members of a job: the low 22 bits are a
 * member's number. A TCP socket that is bound or connected to such a stand-in becomes a Unix socket, on the same
 * descriptor, and only this user can open what it leads to:
 *
 *	<folder>/<port>			where this process listens
 *	<folder>/m<member>/<port>	where another one on this machine does: m<member> is a link to its folder
 *	<folder>/m<member>		leads to a member elsewhere: a listener of this process, which is told member and port
 *
 * Who waits behind the last one answers with a byte: the connection goes on through it; or, with the byte, with the
 * descriptor of a connection to that member, which takes its place. A connection to a listener of this process from a
 * socket that is bound to <folder>/in<anything> begins with such an answer, too: it is from a member elsewhere.
 *
 * getsockname answers with the stand-in, and options of TCP have no effect on Unix sockets. Everything else passes
 * through. No call takes a lock or allocates memory.
 *
 * When a member ends, gloo leaves some waiting for ever who are in collectives with it; two things are in the way.
 *
 * A collective that fails for the end of one connection leaves behind what it was to receive through another. When that
 * comes, gloo reads its head, finds nobody who wants it, and reads no further: it never sees the end of that connection,
 * and whoever else waits for something to come through it is not told. So recv in gloo's loop, when it meets the end of
 * one connection, first ends all that the loop has, and what they hold is gone.
 *
 * And it says nothing to whoever waits for bytes to be sent if the connection turns out to have ended when they are
 * written: it leaves that to its loop, which tells only those who wait for the other side. So writev on such a
 * connection fails in another way, which gloo passes on at once; in its loop, where it would tell nobody either, the
 * bytes count as written. They are lost as if the other side had ended before it read them.
 */
#define _GNU_SOURCE
#include "private_sockets.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

/* The longest name within the folder: "/m4194303/65535". */
#define LONGEST_NAME 15
#define NUM_PORTS 65535
/* How long connecting waits for a listener whose queue is full. */
#define CONNECT_TIMEOUT_S 30
/* How long connecting waits until the member elsewhere is reached; whoever is asked gives up before. */
#define ANSWER_TIMEOUT_S 60
/* The same of accepting, for what is sent at once. */
#define OPENING_TIMEOUT_S 10

static char folder[sizeof(((struct sockaddr_un *)0)->sun_path) - LONGEST_NAME];
static uint32_t own_member;
static atomic_uint ports_given;
/* Set once what is above has its value. */
static atomic_bool is_in_use;
/* Where this thread waits for the readiness of descriptors, as gloo's loop does; 0: it does not. */
static _Thread_local int loop;

/* The next library's functions. Looked up at first use, as a library that is loaded before this one may call us. */
#define NEXT(name) \
	static __typeof__(name) *next_##name(void) \
	{ \
		static _Atomic(void *) found; \
		void *next = atomic_load_explicit(&found, memory_order_relaxed); \
\
		if (!next) { \
			next = dlsym(RTLD_NEXT, #name); \
			if (!next) \
				abort(); \
			atomic_store_explicit(&found, next, memory_order_relaxed); \
		} \
		return (__typeof__(name) *)next; \
	}

NEXT(accept4)
NEXT(bind)
NEXT(connect)
NEXT(epoll_wait)
NEXT(getsockname)
NEXT(recv)
NEXT(setsockopt)
NEXT(writev)

/* One byte more than the kernel writes, for the end of a path that fills it. */
union address_of_unix {
	struct sockaddr_un of_unix;
	char bytes[sizeof(struct sockaddr_un) + 1];
};

EXPORTED int slurm_pathways_private_sockets_use(const char *own_folder, uint32_t member)
{
	size_t length = strlen(own_folder);

	if (atomic_load(&is_in_use)) {
		errno = EALREADY;
		return -1;
	}
	if (length >= sizeof(folder)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	if (own_folder[0] != '/' || member > PRIVATE_SOCKETS_MAX_MEMBER) {
		errno = EINVAL;
		return -1;
	}
	memcpy(folder, own_folder, length + 1);
	own_member = member;
	atomic_store_explicit(&is_in_use, true, memory_order_release);
	return 0;
}

static int option_of(int fd, int name)
{
	int value = -1;
	socklen_t size = sizeof(value);

	return getsockopt(fd, SOL_SOCKET, name, &value, &size) == 0 ? value : -1;
}

/* Whether this call is for us: a TCP socket, and the address stands for a member. */
static bool is_stand_in(int fd, const struct sockaddr *address, socklen_t size, uint32_t *member, uint16_t *port)
{
	struct sockaddr_in internet;
	uint32_t number;

	if (!atomic_load_explicit(&is_in_use, memory_order_acquire) || !address || size < sizeof(internet))
		return false;
	memcpy(&internet, address, sizeof(internet));
	if (internet.sin_family != AF_INET)
		return false;
	number = ntohl(internet.sin_addr.s_addr);
	if ((number & ~PRIVATE_SOCKETS_MAX_MEMBER) != PRIVATE_SOCKETS_RANGE)
		return false;
	*member = number & PRIVATE_SOCKETS_MAX_MEMBER;
	*port = ntohs(internet.sin_port);
	return option_of(fd, SO_DOMAIN) == AF_INET && option_of(fd, SO_TYPE) == SOCK_STREAM;
}

static void name_listener(struct sockaddr_un *address, uint32_t member, uint16_t port)
{
	memset(address, 0, sizeof(*address));
	address->sun_family = AF_UNIX;
	if (member == own_member)
		snprintf(address->sun_path, sizeof(address->sun_path), "%s/%u", folder, (unsigned)port);
	else
		snprintf(address->sun_path, sizeof(address->sun_path), "%s/m%u/%u", folder, member, (unsigned)port);
}

static void name_way(struct sockaddr_un *address, uint32_t member)
{
	memset(address, 0, sizeof(*address));
	address->sun_family = AF_UNIX;
	snprintf(address->sun_path, sizeof(address->sun_path), "%s/m%u", folder, member);
}

static int close_with(int fd, int error)
{
	close(fd);
	errno = error;
	return -1;
}

/* Puts a Unix socket in the place of a TCP socket, with the flags that this one has. Closes it in any case. */
static int replace(int fd, int replacement)
{
	int status = fcntl(fd, F_GETFL);
	int flags = fcntl(fd, F_GETFD);

	if (status < 0 || flags < 0 || fcntl(replacement, F_SETFL, status & O_NONBLOCK) < 0 ||
	    dup3(replacement, fd, flags & FD_CLOEXEC ? O_CLOEXEC : 0) < 0)
		return close_with(replacement, errno);
	close(replacement);
	return 0;
}

EXPORTED int bind(int fd, const struct sockaddr *address, socklen_t size)
{
	struct sockaddr_un listener;
	uint32_t member;
	uint16_t port;
	int replacement;

	if (!is_stand_in(fd, address, size, &member, &port))
		return next_bind()(fd, address, size);
	if (member != own_member) {
		errno = EADDRNOTAVAIL;
		return -1;
	}
	replacement = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (replacement < 0)
		return -1;
	/* What the file is made with. */
	fchmod(replacement, S_IRUSR | S_IWUSR);
	for (unsigned tried = 0; tried < NUM_PORTS; tried++) {
		uint16_t one = port ? port : (uint16_t)(1 + atomic_fetch_add(&ports_given, 1) % NUM_PORTS);

		name_listener(&listener, member, one);
		if (next_bind()(replacement, (struct sockaddr *)&listener, sizeof(listener)) == 0)
			return replace(fd, replacement);
		if (port || errno != EADDRINUSE)
			break;
	}
	return close_with(replacement, errno);
}

/* Connects to a Unix socket, and waits for a place in its queue even if fd does not block: later nobody is told. */
static int connect_replacement(int replacement, const struct sockaddr_un *listener)
{
	for (;;) {
		if (next_connect()(replacement, (const struct sockaddr *)listener, sizeof(*listener)) == 0)
			return 0;
		if (errno == EAGAIN)
			errno = ETIMEDOUT;
		if (errno != EINTR)
			return -1;
	}
}

static void set_timeout(int fd, int name, int seconds)
{
	struct timeval timeout = {.tv_sec = seconds};

	next_setsockopt()(fd, SOL_SOCKET, name, &timeout, sizeof(timeout));
}

/* Takes the answer: the socket to go on with, which is fd itself or replaces it, or -1; fd is closed then. */
static int take_answer(int fd, int timeout_s)
{
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control;
	char byte;
	struct iovec part = {.iov_base = &byte, .iov_len = 1};
	struct msghdr message = {
		.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
	struct cmsghdr *beside;
	ssize_t count;
	int given;

	set_timeout(fd, SO_RCVTIMEO, timeout_s);
	do
		count = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
	while (count < 0 && errno == EINTR);
	if (count <= 0)
		return close_with(fd, count < 0 && errno == EAGAIN ? ETIMEDOUT : ECONNREFUSED);
	beside = CMSG_FIRSTHDR(&message);
	if (beside && beside->cmsg_level == SOL_SOCKET && beside->cmsg_type == SCM_RIGHTS) {
		memcpy(&given, CMSG_DATA(beside), sizeof(given));
		close(fd);
		return given;
	}
	set_timeout(fd, SO_RCVTIMEO, 0);
	return fd;
}

EXPORTED int connect(int fd, const struct sockaddr *address, socklen_t size)
{
	struct sockaddr_un listener;
	uint32_t member;
	uint16_t port;
	int replacement;

	if (!is_stand_in(fd, address, size, &member, &port))
		return next_connect()(fd, address, size);
	replacement = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (replacement < 0)
		return -1;
	set_timeout(replacement, SO_SNDTIMEO, CONNECT_TIMEOUT_S);
	name_listener(&listener, member, port);
	if (connect_replacement(replacement, &listener) < 0) {
		uint32_t whom[] = {htonl(member), htonl(port)};

		if (errno != ENOTDIR)
			return close_with(replacement, errno == ENOENT ? ECONNREFUSED : errno);
		name_way(&listener, member);
		if (connect_replacement(replacement, &listener) < 0)
			return close_with(replacement, errno == ENOENT ? ECONNREFUSED : errno);
		if (send(replacement, whom, sizeof(whom), MSG_NOSIGNAL) != (ssize_t)sizeof(whom))
			return close_with(replacement, ECONNREFUSED);
		replacement = take_answer(replacement, ANSWER_TIMEOUT_S);
		if (replacement < 0)
			return -1;
	}
	set_timeout(replacement, SO_SNDTIMEO, 0);
	return replace(fd, replacement);
}

/* The port that a name within a folder stands for, 0: none. */
static uint16_t port_named(const char *name)
{
	char *end;
	unsigned long port = strtoul(name, &end, 10);

	return end == name || *end || port > NUM_PORTS ? 0 : (uint16_t)port;
}

/* The port at which this process listens there, 0: it is no listener of ours. */
static uint16_t port_of(const struct sockaddr_un *address)
{
	size_t length = strlen(folder);

	if (address->sun_family != AF_UNIX || strncmp(address->sun_path, folder, length) ||
	    address->sun_path[length] != '/')
		return 0;
	return port_named(address->sun_path + length + 1);
}

/* What comes to a listener: a member, or an answer in the name of one that is elsewhere. */
static int accept_one(int fd, struct sockaddr *restrict address, socklen_t *restrict size, int flags)
{
	union address_of_unix whose;
	socklen_t length = sizeof(whose.of_unix);
	size_t prefix = strlen(folder);
	int accepted;

	memset(&whose, 0, sizeof(whose));
	accepted = next_accept4()(fd, (struct sockaddr *)&whose, &length, flags);
	if (accepted < 0)
		return -1;
	if (whose.of_unix.sun_family == AF_UNIX && strncmp(whose.of_unix.sun_path, folder, prefix) == 0 &&
	    strncmp(whose.of_unix.sun_path + prefix, "/in", 3) == 0) {
		if (fcntl(accepted, F_SETFL, 0) < 0 || (accepted = take_answer(accepted, OPENING_TIMEOUT_S)) < 0 ||
		    fcntl(accepted, F_SETFL, flags & SOCK_NONBLOCK ? O_NONBLOCK : 0) < 0 ||
		    fcntl(accepted, F_SETFD, flags & SOCK_CLOEXEC ? FD_CLOEXEC : 0) < 0) {
			if (accepted >= 0)
				close(accepted);
			/* As when one has gone before it was accepted: the caller takes the next. */
			errno = ECONNABORTED;
			return -1;
		}
	}
	if (address && size) {
		memcpy(address, &whose, *size < length ? *size : length);
		*size = length;
	}
	return accepted;
}

EXPORTED int accept4(int fd, struct sockaddr *restrict address, socklen_t *restrict size, int flags)
{
	int accepted;

	if (!atomic_load_explicit(&is_in_use, memory_order_acquire))
		return next_accept4()(fd, address, size, flags);
	do
		accepted = accept_one(fd, address, size, flags);
	while (accepted < 0 && errno == ECONNABORTED);
	return accepted;
}

EXPORTED int accept(int fd, struct sockaddr *restrict address, socklen_t *restrict size)
{
	return accept4(fd, address, size, 0);
}

EXPORTED int getsockname(int fd, struct sockaddr *restrict address, socklen_t *restrict size)
{
	union address_of_unix here;
	socklen_t length = sizeof(here.of_unix);
	struct sockaddr_in stand_in = {.sin_family = AF_INET};
	uint16_t port;

	if (!atomic_load_explicit(&is_in_use, memory_order_acquire) || !address || !size)
		return next_getsockname()(fd, address, size);
	memset(&here, 0, sizeof(here));
	if (next_getsockname()(fd, (struct sockaddr *)&here, &length) < 0 || (port = port_of(&here.of_unix)) == 0)
		return next_getsockname()(fd, address, size);
	stand_in.sin_addr.s_addr = htonl(PRIVATE_SOCKETS_RANGE | own_member);
	stand_in.sin_port = htons(port);
	memcpy(address, &stand_in, *size < sizeof(stand_in) ? *size : sizeof(stand_in));
	*size = sizeof(stand_in);
	return 0;
}

EXPORTED int setsockopt(int fd, int level, int name, const void *value, socklen_t size)
{
	int outcome = next_setsockopt()(fd, level, name, value, size);
	int error = errno;

	if (outcome == 0 || level != IPPROTO_TCP || !atomic_load_explicit(&is_in_use, memory_order_acquire))
		return outcome;
	if (option_of(fd, SO_DOMAIN) == AF_UNIX)
		return 0;
	errno = error;
	return outcome;
}

EXPORTED int epoll_wait(int fd, struct epoll_event *events, int most, int timeout_ms)
{
	loop = fd;
	return next_epoll_wait()(fd, events, most, timeout_ms);
}

/*
 * Whether this is gloo's end of a connection that was made by the functions above: accepted at a port of this folder, or
 * connected to a port of another one or to the way out of this host. Whoever carries bytes between hosts has the other
 * ends, those of all worlds in one loop.
 */
static bool is_of_gloo(int fd)
{
	union address_of_unix address;
	socklen_t length = sizeof(address.of_unix);
	size_t prefix = strlen(folder);
	const char *path = address.of_unix.sun_path, *name;

	memset(&address, 0, sizeof(address));
	if (next_getsockname()(fd, (struct sockaddr *)&address, &length) < 0 || address.of_unix.sun_family != AF_UNIX)
		return false;
	/* Who was accepted has the listener's name; who has connected has none, but the other end has. */
	if (*path)
		return port_of(&address.of_unix) != 0;
	length = sizeof(address.of_unix);
	if (getpeername(fd, (struct sockaddr *)&address, &length) < 0)
		return false;
	name = strrchr(path, '/');
	if (!name)
		return false;
	return (strncmp(path, folder, prefix) == 0 && name == path + prefix) != (port_named(name + 1) != 0);
}

/* Ends a connection, and drops what has come through it. Everything else stays as it is. */
static void end_connection(int fd)
{
	char dropped[4096];

	if (option_of(fd, SO_TYPE) != SOCK_STREAM || option_of(fd, SO_ACCEPTCONN) != 0)
		return;
	shutdown(fd, SHUT_RDWR);
	while (next_recv()(fd, dropped, sizeof(dropped), MSG_DONTWAIT) > 0)
		;
}

/*
 * Ends all connections of this thread's loop, which the kernel lists: a line "tfd: <number> ..." for each descriptor.
 * Nobody closes one of them meanwhile: gloo waits with that until the loop has come round.
 */
static void end_all_connections(void)
{
	char path[40], text[1024], word[sizeof("tfd:")] = "";
	size_t length = 0;
	ssize_t count;
	int list, fd = -1;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", loop);
	list = open(path, O_RDONLY | O_CLOEXEC);
	if (list < 0)
		return;
	while ((count = read(list, text, sizeof(text))) > 0) {
		for (ssize_t place = 0; place < count; place++) {
			char letter = text[place];

			if (letter == '\n') {
				length = 0;
				fd = -1;
			} else if (length < sizeof(word) - 1) {
				word[length++] = letter;
			} else if (memcmp(word, "tfd:", length) == 0 && length == sizeof(word) - 1) {
				if (letter >= '0' && letter <= '9') {
					fd = (fd < 0 ? 0 : fd) * 10 + (letter - '0');
				} else if (fd >= 0) {
					end_connection(fd);
					/* The rest of the line is of no interest. */
					word[0] = 0;
				}
			}
		}
	}
	close(list);
}

EXPORTED ssize_t recv(int fd, void *bytes, size_t size, int flags)
{
	ssize_t count = next_recv()(fd, bytes, size, flags);
	int error = errno;

	if (loop && size && (count == 0 || (count < 0 && error == ECONNRESET)) &&
	    atomic_load_explicit(&is_in_use, memory_order_acquire) && is_of_gloo(fd))
		end_all_connections();
	errno = error;
	return count;
}

EXPORTED ssize_t writev(int fd, const struct iovec *parts, int count)
{
	ssize_t written = next_writev()(fd, parts, count);
	int error = errno;

	if (written >= 0 || (error != EPIPE && error != ECONNRESET) ||
	    !atomic_load_explicit(&is_in_use, memory_order_acquire) || !is_of_gloo(fd)) {
		errno = error;
		return written;
	}
	if (!loop) {
		errno = ENOTCONN;
		return -1;
	}
	written = 0;
	for (int part = 0; part < count; part++)
		written += (ssize_t)parts[part].iov_len;
	return written;
}
