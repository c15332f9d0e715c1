/*
 * private_sockets.c from the inside: linked in, its functions come before the C library's, as when it is preloaded.
 *
 *	check_private_sockets <folder>
 */
#define _GNU_SOURCE
#include "private_sockets.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: not so: %s (%s)\n", __FILE__, __LINE__, #condition, strerror(errno)); \
			exit(1); \
		} \
	} while (0)

#define OWN_MEMBER 3
#define OTHER_MEMBER 4194303
#define FAR_MEMBER 70000

static struct sockaddr_in at(uint32_t address, uint16_t port)
{
	struct sockaddr_in made = {.sin_family = AF_INET, .sin_port = htons(port)};

	made.sin_addr.s_addr = htonl(address);
	return made;
}

static int try_bind(int fd, uint32_t address, uint16_t port)
{
	struct sockaddr_in where = at(address, port);

	return bind(fd, (struct sockaddr *)&where, sizeof(where));
}

static int try_connect(int fd, uint32_t address, uint16_t port)
{
	struct sockaddr_in where = at(address, port);

	return connect(fd, (struct sockaddr *)&where, sizeof(where));
}

static int tcp(int flags)
{
	int fd = socket(AF_INET, SOCK_STREAM | flags, 0);

	CHECK(fd >= 0);
	return fd;
}

static int option(int fd, int name)
{
	int found;
	socklen_t size = sizeof(found);

	CHECK(getsockopt(fd, SOL_SOCKET, name, &found, &size) == 0);
	return found;
}

static int domain(int fd)
{
	return option(fd, SO_DOMAIN);
}

static struct sockaddr_in name_of(int fd)
{
	struct sockaddr_in name = {0};
	socklen_t size = sizeof(name);

	CHECK(getsockname(fd, (struct sockaddr *)&name, &size) == 0);
	CHECK(size == sizeof(name) && name.sin_family == AF_INET);
	return name;
}

static void check_talk(int one, int other)
{
	char got[5] = "";

	CHECK(send(one, "ping", 5, 0) == 5 && recv(other, got, 5, MSG_WAITALL) == 5 && strcmp(got, "ping") == 0);
	CHECK(send(other, "pong", 5, 0) == 5 && recv(one, got, 5, MSG_WAITALL) == 5 && strcmp(got, "pong") == 0);
}

static int listen_at_unix(const char *folder, const char *name, int backlog)
{
	struct sockaddr_un where = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);

	CHECK(snprintf(where.sun_path, sizeof(where.sun_path), "%s/%s", folder, name) < (int)sizeof(where.sun_path));
	CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&where, sizeof(where)) == 0 && listen(fd, backlog) == 0);
	return fd;
}

static bool is_open(int fd, short events)
{
	struct pollfd one = {.fd = fd, .events = events};

	return poll(&one, 1, 0) == 1 && one.revents == events;
}

/* Before there is a folder, the range is an ordinary part of the loopback interface's. */
static void check_out_of_use(void)
{
	int fd = tcp(0), on = 1;

	CHECK(try_bind(fd, PRIVATE_SOCKETS_RANGE | OWN_MEMBER, 0) == 0);
	CHECK(domain(fd) == AF_INET && ntohs(name_of(fd).sin_port) != 0);
	CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == 0);
	close(fd);
	fd = socket(AF_UNIX, SOCK_STREAM, 0);
	CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == -1 && errno == EOPNOTSUPP);
	close(fd);
}

static void check_taking_into_use(const char *folder)
{
	char too_long[94];

	memset(too_long, 'x', sizeof(too_long));
	too_long[0] = '/';
	too_long[93] = 0;
	CHECK(slurm_pathways_private_sockets_use(too_long, 1) == -1 && errno == ENAMETOOLONG);
	CHECK(slurm_pathways_private_sockets_use("here", 1) == -1 && errno == EINVAL);
	CHECK(slurm_pathways_private_sockets_use(folder, PRIVATE_SOCKETS_MAX_MEMBER + 1) == -1 && errno == EINVAL);
	CHECK(slurm_pathways_private_sockets_use(folder, OWN_MEMBER) == 0);
	CHECK(slurm_pathways_private_sockets_use(folder, OWN_MEMBER) == -1 && errno == EALREADY);
}

/* As gloo does it: tries the address, then listens at a port that is free, and asks which it is. */
static void check_own_listener(const char *folder)
{
	char path[200];
	struct stat made;
	struct sockaddr_in name;
	struct sockaddr_un whole;
	socklen_t size = 3;
	int on = 1, tried = tcp(0), listener = tcp(SOCK_NONBLOCK | SOCK_CLOEXEC), client, served;

	CHECK(try_bind(tried, PRIVATE_SOCKETS_RANGE | OWN_MEMBER, 0) == 0);
	CHECK(ntohs(name_of(tried).sin_port) == 1);
	close(tried);
	CHECK(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0);
	CHECK(try_bind(listener, PRIVATE_SOCKETS_RANGE | OWN_MEMBER, 0) == 0);
	CHECK(listen(listener, 16) == 0);
	name = name_of(listener);
	CHECK(ntohl(name.sin_addr.s_addr) == (PRIVATE_SOCKETS_RANGE | OWN_MEMBER) && ntohs(name.sin_port) == 2);
	/* Less room than an address needs: what fits, and how long it is. */
	memset(&name, 0x55, sizeof(name));
	CHECK(getsockname(listener, (struct sockaddr *)&name, &size) == 0 && size == sizeof(name));
	CHECK(name.sin_family == AF_INET && ((unsigned char *)&name)[3] == 0x55);
	size = sizeof(whole);
	CHECK(getsockname(listener, (struct sockaddr *)&whole, &size) == 0 && size == sizeof(name));
	CHECK(domain(listener) == AF_UNIX);
	CHECK(fcntl(listener, F_GETFL) & O_NONBLOCK && fcntl(listener, F_GETFD) & FD_CLOEXEC);
	snprintf(path, sizeof(path), "%s/2", folder);
	CHECK(stat(path, &made) == 0 && S_ISSOCK(made.st_mode) && (made.st_mode & 0777) == 0600);

	CHECK(accept(listener, NULL, NULL) == -1 && errno == EAGAIN);
	client = tcp(0);
	CHECK(setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == 0);
	CHECK(try_connect(client, PRIVATE_SOCKETS_RANGE | OWN_MEMBER, 2) == 0);
	CHECK(!(fcntl(client, F_GETFL) & O_NONBLOCK) && !(fcntl(client, F_GETFD) & FD_CLOEXEC));
	served = accept(listener, NULL, NULL);
	CHECK(served >= 0 && setsockopt(served, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == 0);
	CHECK(setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == 0);
	CHECK(ntohs(name_of(served).sin_port) == 2);
	check_talk(client, served);
	close(client);
	close(served);
	close(listener);
	/* Its file is still there; nobody answers. */
	client = tcp(0);
	CHECK(try_connect(client, PRIVATE_SOCKETS_RANGE | OWN_MEMBER, 2) == -1 && errno == ECONNREFUSED);
	CHECK(domain(client) == AF_INET);
	CHECK(try_connect(client, PRIVATE_SOCKETS_RANGE | OWN_MEMBER, 999) == -1 && errno == ECONNREFUSED);
	close(client);
	/* A port that is asked for; one that is taken; somebody else's address. */
	client = tcp(0);
	CHECK(try_bind(client, PRIVATE_SOCKETS_RANGE | OWN_MEMBER, 2) == -1 && errno == EADDRINUSE);
	CHECK(try_bind(client, PRIVATE_SOCKETS_RANGE | OTHER_MEMBER, 0) == -1 && errno == EADDRNOTAVAIL);
	CHECK(domain(client) == AF_INET);
	CHECK(try_bind(client, PRIVATE_SOCKETS_RANGE | OWN_MEMBER, 65535) == 0);
	CHECK(ntohs(name_of(client).sin_port) == 65535);
	close(client);
}

static void check_member_of_this_machine(const char *folder)
{
	char theirs[200], link[200];
	int listener, client = tcp(SOCK_NONBLOCK | SOCK_CLOEXEC), served;

	snprintf(theirs, sizeof(theirs), "%s/theirs", folder);
	snprintf(link, sizeof(link), "%s/m%u", folder, OTHER_MEMBER);
	CHECK(try_connect(client, PRIVATE_SOCKETS_RANGE | OTHER_MEMBER, 7) == -1 && errno == ECONNREFUSED);
	CHECK(mkdir(theirs, 0700) == 0 && symlink(theirs, link) == 0);
	listener = listen_at_unix(theirs, "65535", 1);
	CHECK(try_connect(client, PRIVATE_SOCKETS_RANGE | OTHER_MEMBER, 7) == -1 && errno == ECONNREFUSED);
	CHECK(try_connect(client, PRIVATE_SOCKETS_RANGE | OTHER_MEMBER, 65535) == 0);
	CHECK(domain(client) == AF_UNIX && fcntl(client, F_GETFL) & O_NONBLOCK && fcntl(client, F_GETFD) & FD_CLOEXEC);
	CHECK(is_open(client, POLLOUT));
	served = accept(listener, NULL, NULL);
	check_talk(served, client);
	close(served);
	close(client);
	close(listener);
}

/* A connection of TCP: what is given to others, and its far end. */
static void make_tcp_pair(int *one, int *other)
{
	int listener = tcp(0);

	CHECK(try_bind(listener, INADDR_LOOPBACK, 0) == 0 && listen(listener, 1) == 0);
	*one = tcp(0);
	CHECK(try_connect(*one, INADDR_LOOPBACK, ntohs(name_of(listener).sin_port)) == 0);
	*other = accept(listener, NULL, NULL);
	CHECK(*other >= 0);
	close(listener);
}

/* The answer: a byte, and beside it a descriptor if there is one. */
static void send_answer(int fd, int given)
{
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = {.bytes = ""};
	struct iovec part = {.iov_base = (char[]){0}, .iov_len = 1};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

	if (given >= 0) {
		message.msg_control = &control;
		message.msg_controllen = sizeof(control);
		control.head.cmsg_level = SOL_SOCKET;
		control.head.cmsg_type = SCM_RIGHTS;
		control.head.cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(&control.head), &given, sizeof(given));
	}
	CHECK(sendmsg(fd, &message, MSG_NOSIGNAL) == 1);
}

enum deed { REFUSES, GOES_ON, GIVES };

/* In a process of its own, whoever leads to members elsewhere: takes one connection, and is then the member itself. */
static pid_t start_leading(int listener, enum deed deed)
{
	uint32_t whom[2];
	char got[5];
	int served, given, far = -1;
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (pid != 0)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	served = accept(listener, NULL, NULL);
	CHECK(recv(served, whom, sizeof(whom), MSG_WAITALL) == sizeof(whom));
	CHECK(ntohl(whom[0]) == FAR_MEMBER && ntohl(whom[1]) == 513);
	if (deed == GIVES) {
		make_tcp_pair(&given, &far);
		send_answer(served, given);
	} else if (deed == GOES_ON) {
		send_answer(served, -1);
		far = served;
	}
	if (far >= 0)
		CHECK(recv(far, got, 5, MSG_WAITALL) == 5 && send(far, "pong", 5, 0) == 5);
	_exit(0);
}

static void check_member_elsewhere(const char *folder)
{
	char out[200], link[200], got[5];
	int on_the_way, client = tcp(SOCK_NONBLOCK), status;

	snprintf(out, sizeof(out), "%s/out", folder);
	snprintf(link, sizeof(link), "%s/m%u", folder, FAR_MEMBER);
	CHECK(symlink(out, link) == 0);
	CHECK(try_connect(client, PRIVATE_SOCKETS_RANGE | FAR_MEMBER, 513) == -1 && errno == ECONNREFUSED);
	close(client);
	on_the_way = listen_at_unix(folder, "out", 1);
	for (int deed = REFUSES; deed <= GIVES; deed++) {
		pid_t leading = start_leading(on_the_way, (enum deed)deed);
		struct pollfd answer;

		client = tcp(SOCK_NONBLOCK | SOCK_CLOEXEC);
		status = try_connect(client, PRIVATE_SOCKETS_RANGE | FAR_MEMBER, 513);
		if (deed == REFUSES) {
			CHECK(status == -1 && errno == ECONNREFUSED && domain(client) == AF_INET);
		} else {
			CHECK(status == 0 && domain(client) == (deed == GIVES ? AF_INET : AF_UNIX));
			CHECK(fcntl(client, F_GETFL) & O_NONBLOCK && fcntl(client, F_GETFD) & FD_CLOEXEC);
			CHECK(send(client, "ping", 5, 0) == 5);
			answer = (struct pollfd){.fd = client, .events = POLLIN};
			CHECK(poll(&answer, 1, 20000) == 1);
			CHECK(recv(client, got, 5, 0) == 5 && strcmp(got, "pong") == 0);
		}
		CHECK(waitpid(leading, &status, 0) == leading && status == 0);
		close(client);
	}
	close(on_the_way);
}

/* Members elsewhere that come: from sockets of this process that have a name for it. */
static void check_coming_from_elsewhere(const char *folder)
{
	struct sockaddr_un name = {.sun_family = AF_UNIX}, peer;
	socklen_t size = sizeof(peer);
	int listener = tcp(SOCK_NONBLOCK), opened[3], given, far, served;

	CHECK(try_bind(listener, PRIVATE_SOCKETS_RANGE | OWN_MEMBER, 900) == 0 && listen(listener, 3) == 0);
	for (int i = 0; i < 3; i++) {
		opened[i] = socket(AF_UNIX, SOCK_STREAM, 0);
		snprintf(name.sun_path, sizeof(name.sun_path), "%s/in%d", folder, i);
		CHECK(bind(opened[i], (struct sockaddr *)&name, sizeof(name)) == 0 && unlink(name.sun_path) == 0);
		snprintf(name.sun_path, sizeof(name.sun_path), "%s/900", folder);
		CHECK(connect(opened[i], (struct sockaddr *)&name, sizeof(name)) == 0);
	}
	make_tcp_pair(&given, &far);
	/* The first gives up, which is passed over. */
	close(opened[0]);
	send_answer(opened[1], given);
	close(given);
	send_answer(opened[2], -1);
	served = accept4(listener, (struct sockaddr *)&peer, &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
	CHECK(served >= 0 && domain(served) == AF_INET && peer.sun_family == AF_UNIX);
	CHECK(fcntl(served, F_GETFL) & O_NONBLOCK && fcntl(served, F_GETFD) & FD_CLOEXEC);
	CHECK(fcntl(served, F_SETFL, 0) == 0);
	check_talk(served, far);
	close(served);
	close(far);
	size = 2;
	served = accept(listener, (struct sockaddr *)&peer, &size);
	CHECK(served >= 0 && domain(served) == AF_UNIX && size > 2);
	CHECK(!(fcntl(served, F_GETFL) & O_NONBLOCK) && !(fcntl(served, F_GETFD) & FD_CLOEXEC));
	check_talk(served, opened[2]);
	close(served);
	CHECK(accept(listener, NULL, NULL) == -1 && errno == EAGAIN);
	close(opened[1]);
	close(opened[2]);
	close(listener);
}

/* Other addresses, other sockets, and what makes no sense. */
static void check_the_rest(const char *folder)
{
	struct sockaddr_in where = at(PRIVATE_SOCKETS_RANGE | OWN_MEMBER, 0);
	struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	struct sockaddr_un name;
	socklen_t size = sizeof(name);
	int listener = tcp(0), client = tcp(0), on = 1, fd;

	CHECK(try_bind(listener, INADDR_LOOPBACK, 0) == 0 && listen(listener, 1) == 0 && domain(listener) == AF_INET);
	CHECK(try_connect(client, INADDR_LOOPBACK, ntohs(name_of(listener).sin_port)) == 0 && domain(client) == AF_INET);
	close(listener);
	close(client);
	/* The addresses beside the range; the second is nobody's. */
	fd = tcp(0);
	CHECK(try_bind(fd, PRIVATE_SOCKETS_RANGE - 1, 0) == 0 && domain(fd) == AF_INET);
	close(fd);
	fd = tcp(0);
	CHECK(try_bind(fd, PRIVATE_SOCKETS_RANGE + PRIVATE_SOCKETS_MAX_MEMBER + 1, 0) == -1 && errno == EADDRNOTAVAIL);
	close(fd);
	fd = socket(AF_INET, SOCK_DGRAM, 0);
	CHECK(bind(fd, (struct sockaddr *)&where, sizeof(where)) == 0 && domain(fd) == AF_INET);
	CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == -1);
	close(fd);
	fd = socket(AF_INET6, SOCK_STREAM, 0);
	if (fd >= 0) {
		CHECK(bind(fd, (struct sockaddr *)&six, sizeof(six)) == 0 || errno == EADDRNOTAVAIL);
		close(fd);
	}
	fd = tcp(0);
	CHECK(bind(fd, (struct sockaddr *)&where, 4) == -1 && errno == EINVAL);
	CHECK(connect(fd, (struct sockaddr *)&where, 4) == -1 && errno == EINVAL);
	CHECK(setsockopt(fd, IPPROTO_TCP, 9999, &on, sizeof(on)) == -1 && errno == ENOPROTOOPT);
	close(fd);
	CHECK(bind(-1, (struct sockaddr *)&where, sizeof(where)) == -1 && errno == EBADF);
	CHECK(connect(-1, (struct sockaddr *)&where, sizeof(where)) == -1 && errno == EBADF);
	CHECK(getsockname(-1, (struct sockaddr *)&name, &size) == -1 && errno == EBADF);
	CHECK(setsockopt(-1, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == -1 && errno == EBADF);
	/* Unix sockets that are not ours keep their names, however close these come, and whatever room is given. */
	for (const char *const *other = (const char *const[]){"a", "4x", "0", "65536", NULL}; *other; other++) {
		fd = listen_at_unix(folder, *other, 1);
		size = sizeof(name);
		CHECK(getsockname(fd, (struct sockaddr *)&name, &size) == 0 && name.sun_family == AF_UNIX);
		CHECK(strcmp(strrchr(name.sun_path, '/') + 1, *other) == 0);
		size = 2;
		CHECK(getsockname(fd, (struct sockaddr *)&name, &size) == 0 && size > 2);
		close(fd);
	}
	/* A name without end: all 108 bytes. */
	memset(&name, 0, sizeof(name));
	name.sun_family = AF_UNIX;
	memset(name.sun_path, 'y', sizeof(name.sun_path));
	memcpy(name.sun_path, folder, strlen(folder));
	name.sun_path[strlen(folder)] = '/';
	fd = socket(AF_UNIX, SOCK_STREAM, 0);
	CHECK(bind(fd, (struct sockaddr *)&name, sizeof(name)) == 0);
	memset(&name, 0, sizeof(name));
	size = sizeof(name);
	CHECK(getsockname(fd, (struct sockaddr *)&name, &size) == 0 && name.sun_path[sizeof(name.sun_path) - 1] == 'y');
	close(fd);
}

/* Written to a connection that has ended: as if there were none; and in a thread that waits for events, to nowhere. */
static void check_writing_to_the_end(const char *folder)
{
	char theirs[200], path[220];
	struct iovec parts[] = {{.iov_base = (char[]){"one"}, .iov_len = 3}, {.iov_base = (char[]){"four"}, .iov_len = 4}};
	struct epoll_event event;
	int listener, client = tcp(0), served, pair[2], epoll = epoll_create1(0);

	snprintf(theirs, sizeof(theirs), "%s/theirs", folder);
	snprintf(path, sizeof(path), "%s/65535", theirs);
	CHECK(unlink(path) == 0);
	listener = listen_at_unix(theirs, "65535", 1);
	CHECK(try_connect(client, PRIVATE_SOCKETS_RANGE | OTHER_MEMBER, 65535) == 0);
	served = accept(listener, NULL, NULL);
	CHECK(writev(client, parts, 2) == 7 && socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	close(served);
	close(pair[1]);
	CHECK(writev(client, parts, 2) == -1 && errno == ENOTCONN);
	CHECK(writev(pair[0], parts, 2) == -1 && errno == EPIPE);
	CHECK(writev(-1, parts, 2) == -1 && errno == EBADF);
	CHECK(epoll >= 0 && epoll_wait(epoll, &event, 1, 0) == 0);
	CHECK(writev(client, parts, 2) == 7 && writev(client, parts, 1) == 3);
	CHECK(writev(pair[0], parts, 2) == -1 && errno == EPIPE);
	close(epoll);
	close(pair[0]);
	close(client);
	close(listener);
}

/* In a thread that waits for events, one connection that ends takes the others along, with what they hold. */
static void check_end_of_all(const char *folder)
{
	char theirs[200], path[220], bytes[8];
	struct epoll_event event = {.events = EPOLLIN};
	int listener, own = tcp(0), clients[] = {tcp(0), tcp(0)}, served[2], pair[2], epoll = epoll_create1(0);

	snprintf(theirs, sizeof(theirs), "%s/theirs", folder);
	snprintf(path, sizeof(path), "%s/65535", theirs);
	CHECK(unlink(path) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	listener = listen_at_unix(theirs, "65535", 2);
	CHECK(try_bind(own, PRIVATE_SOCKETS_RANGE | OWN_MEMBER, 0) == 0 && listen(own, 1) == 0);
	CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, own, &event) == 0);
	for (int i = 0; i < 2; i++) {
		CHECK(try_connect(clients[i], PRIVATE_SOCKETS_RANGE | OTHER_MEMBER, 65535) == 0);
		CHECK((served[i] = accept(listener, NULL, NULL)) >= 0);
		CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, clients[i], &event) == 0);
	}
	CHECK(write(served[1], "unwanted", 8) == 8 && write(pair[0], "other", 5) == 5);
	close(served[0]);
	CHECK(epoll_wait(epoll, &event, 1, 0) == 1);
	CHECK(recv(clients[0], bytes, sizeof(bytes), 0) == 0);
	CHECK(recv(clients[1], bytes, sizeof(bytes), MSG_DONTWAIT) == 0);
	CHECK(recv(served[1], bytes, sizeof(bytes), MSG_DONTWAIT) == 0 && recv(pair[1], bytes, sizeof(bytes), 0) == 5);
	/* What listens goes on, or gloo would end the process. */
	CHECK(option(own, SO_ACCEPTCONN) == 1);
	close(epoll);
	close(served[1]);
	for (int i = 0; i < 2; i++) {
		close(clients[i]);
		close(pair[i]);
	}
	close(own);
	close(listener);
}

/* Who carries the bytes of several worlds between hosts, in one loop: where one connection ends, the others go on. */
static void check_end_of_one(const char *folder)
{
	char path[200], bytes[8];
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	struct epoll_event event = {.events = EPOLLIN};
	int way_out, inside = tcp(0), leaving[2], coming[2], ends[2][2], epoll = epoll_create1(0);

	snprintf(path, sizeof(path), "%s/out", folder);
	CHECK(unlink(path) == 0);
	way_out = listen_at_unix(folder, "out", 2);
	CHECK(try_bind(inside, PRIVATE_SOCKETS_RANGE | OWN_MEMBER, 901) == 0 && listen(inside, 2) == 0);
	for (int i = 0; i < 2; i++) {
		leaving[i] = socket(AF_UNIX, SOCK_STREAM, 0);
		snprintf(name.sun_path, sizeof(name.sun_path), "%s/out", folder);
		CHECK(connect(leaving[i], (struct sockaddr *)&name, sizeof(name)) == 0);
		CHECK((ends[0][i] = accept(way_out, NULL, NULL)) >= 0);
		ends[1][i] = socket(AF_UNIX, SOCK_STREAM, 0);
		snprintf(name.sun_path, sizeof(name.sun_path), "%s/in%d", folder, i);
		CHECK(bind(ends[1][i], (struct sockaddr *)&name, sizeof(name)) == 0 && unlink(name.sun_path) == 0);
		snprintf(name.sun_path, sizeof(name.sun_path), "%s/901", folder);
		CHECK(connect(ends[1][i], (struct sockaddr *)&name, sizeof(name)) == 0);
		send_answer(ends[1][i], -1);
		CHECK((coming[i] = accept(inside, NULL, NULL)) >= 0);
		for (int way = 0; way < 2; way++)
			CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, ends[way][i], &event) == 0);
	}
	close(leaving[0]);
	close(coming[0]);
	CHECK(epoll_wait(epoll, &event, 1, 0) == 1);
	for (int way = 0; way < 2; way++) {
		CHECK(recv(ends[way][0], bytes, sizeof(bytes), 0) == 0);
		check_talk(way ? coming[1] : leaving[1], ends[way][1]);
		close(ends[way][0]);
		close(ends[way][1]);
	}
	close(leaving[1]);
	close(coming[1]);
	close(epoll);
	close(inside);
	close(way_out);
}

/* Whether a process sleeps. */
static bool is_asleep(pid_t pid)
{
	char path[64], line[512];
	const char *end = NULL;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	file = fopen(path, "r");
	CHECK(file);
	if (fgets(line, sizeof(line), file))
		end = strrchr(line, ')');
	fclose(file);
	return end && end[2] == 'S';
}

/* A queue that is full: connecting waits for a place, as there is no later moment at which it could be told. */
static void check_full_queue(const char *folder)
{
	char link[200], theirs[200];
	int listener, first = tcp(SOCK_NONBLOCK), second = tcp(SOCK_NONBLOCK), status;
	pid_t accepting;

	snprintf(theirs, sizeof(theirs), "%s/full", folder);
	snprintf(link, sizeof(link), "%s/m8", folder);
	CHECK(mkdir(theirs, 0700) == 0 && symlink(theirs, link) == 0);
	/* One place. */
	listener = listen_at_unix(theirs, "1", 0);
	CHECK(try_connect(first, PRIVATE_SOCKETS_RANGE | 8, 1) == 0);
	accepting = fork();
	CHECK(accepting >= 0);
	if (accepting == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		while (!is_asleep(getppid()))
			usleep(1000);
		_exit(accept(listener, NULL, NULL) < 0);
	}
	CHECK(try_connect(second, PRIVATE_SOCKETS_RANGE | 8, 1) == 0);
	CHECK(fcntl(second, F_GETFL) & O_NONBLOCK);
	CHECK(waitpid(accepting, &status, 0) == accepting && status == 0);
	close(second);
	close(first);
	close(listener);
}

int main(int argc, char **argv)
{
	CHECK(argc == 2);
	signal(SIGPIPE, SIG_IGN);
	check_out_of_use();
	check_taking_into_use(argv[1]);
	check_own_listener(argv[1]);
	check_member_of_this_machine(argv[1]);
	check_member_elsewhere(argv[1]);
	check_coming_from_elsewhere(argv[1]);
	check_full_queue(argv[1]);
	check_writing_to_the_end(argv[1]);
	check_end_of_all(argv[1]);
	check_end_of_one(argv[1]);
	check_the_rest(argv[1]);
	puts("private sockets: ok");
	return 0;
}
