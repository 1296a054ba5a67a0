// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A lane's marks for the TCP sockets of a cgroup, whose programs know nothing of it.
 *
 * A socket is marked when it begins to listen (its SYN-ACKs then bear the marks), when it begins to
 * connect (so does its SYN), and again when a connection stands: an accepted socket inherits the
 * DSCP of the one that listened, but not its priority.
 */
#define BPF_LICENSE Dual BSD/GPL

#include <uapi/linux/bpf.h>

/* asm/socket.h, linux/in.h, linux/in6.h */
#define AF_INET6 10
#define SOL_SOCKET 1
#define SO_PRIORITY 12
#define IPPROTO_IP 0
#define IP_TOS 1
#define IPPROTO_IPV6 41
#define IPV6_TCLASS 67

/* What a program leaves in reply for those of the cgroups around this one, which run after it. */
#define TLSCHED_TAGGED 0x7150

/* tag.py says the same in Python; a test compares the two. */
struct tlsched_tag {
	__u32 priority; /* SO_PRIORITY */
	__u32 tos;	/* the TOS or traffic-class byte: DSCP << 2 */
};

BPF_ARRAY(tag, struct tlsched_tag, 1);

static __always_inline bool set(struct bpf_sock_ops *skops, int level, int option, int value)
{
	return bpf_setsockopt(skops, level, option, &value, sizeof(value)) == 0;
}

/* An IPv6 socket whose peer is an IPv4 host: ::ffff:a.b.c.d. */
static __always_inline bool has_v4_peer(struct bpf_sock_ops *skops)
{
	return skops->remote_ip6[0] == 0 && skops->remote_ip6[1] == 0 &&
	       skops->remote_ip6[2] == bpf_htonl(0xffff);
}

static __always_inline void set_marks(struct bpf_sock_ops *skops, const struct tlsched_tag *marks)
{
	bool v6 = skops->family == AF_INET6;

	if (v6 && !set(skops, IPPROTO_IPV6, IPV6_TCLASS, marks->tos))
		return;
	/*
	 * An IPv6 socket has both: a packet to an IPv4 peer bears its IP_TOS. The kernel refuses that
	 * one for sockets with IPV6_V6ONLY, and before 6.13 for all of IPv6. A socket with an IPv4
	 * peer then gets no priority either: half a mark leads nowhere.
	 */
	if (!set(skops, IPPROTO_IP, IP_TOS, marks->tos) && (!v6 || has_v4_peer(skops)))
		return;
	/* Last, since IP_TOS derives a priority of its own. */
	set(skops, SOL_SOCKET, SO_PRIORITY, marks->priority);
}

int tlsched_tag(struct bpf_sock_ops *skops)
{
	const struct tlsched_tag *marks;
	__u32 only = 0;

	switch (skops->op) {
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		break;
	default:
		return 1;
	}
	/* A cgroup further in is marked too, and its program has had its say. */
	if (skops->reply == TLSCHED_TAGGED)
		return 1;
	marks = tag.lookup(&only);
	if (marks)
		set_marks(skops, marks);
	skops->reply = TLSCHED_TAGGED;
	return 1;
}
