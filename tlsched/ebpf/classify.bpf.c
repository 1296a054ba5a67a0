// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Marks -> band, at clsact egress.
 *
 * A packet of a local socket whose priority and DSCP are both those of one lane gets that lane's
 * class in skb->priority, where HTB looks first; so does a forwarded packet with a lane's DSCP.
 * Both only if the sender is trusted. Whoever is not loses a lane's DSCP, lest the network ahead
 * serve him as one. Everything else is the default band's and stays as it is, with one exception:
 * whoever names one of our classes himself (a privileged SO_PRIORITY) is moved to the default
 * class, since a class number is not a mark.
 *
 * The verdict is always TC_ACT_UNSPEC: others' filters on the link still see the packet.
 */
#define BPF_LICENSE Dual BSD/GPL

#include <uapi/linux/bpf.h>
#include <uapi/linux/pkt_cls.h>
#include "tlsched.h"

#define ETHERTYPE_IPV4 0x0800
#define ETHERTYPE_IPV6 0x86dd
#define ETHERTYPE_VLAN 0x8100
#define ETHERTYPE_VLAN_SERVICE 0x88a8

/* Where a frame's first ethertype stands, and how far a tag moves it. */
#define ETHERTYPE_OFFSET 12
#define VLAN_HEADER 4
#define VLAN_TAGS 2

#define IPV4_HEADER 20
#define IPV4_CHECKSUM 10
#define IPV4_SOURCE 12
#define IPV6_HEADER 40
#define IPV6_SOURCE 8

BPF_ARRAY(marks, struct tlsched_mark, TLSCHED_MARKS);
BPF_PERCPU_ARRAY(counters, struct tlsched_counters, TLSCHED_COUNTERS);
BPF_ARRAY(settings, struct tlsched_settings, 1);
BPF_HASH(trusted_uids, __u32, __u8, TLSCHED_SET_ENTRIES);
BPF_HASH(trusted_cgroups, __u64, __u8, TLSCHED_SET_ENTRIES);
BPF_LPM_TRIE(trusted_v4, struct tlsched_v4_prefix, __u8, TLSCHED_SET_ENTRIES);
BPF_LPM_TRIE(trusted_v6, struct tlsched_v6_prefix, __u8, TLSCHED_SET_ENTRIES);

/* Where in the frame an IP header stands (0 without Ethernet header), and its fixed part. */
struct header {
	__u32 offset;
	__u8 ip[IPV6_HEADER];
};

static __always_inline bool is_vlan(__u16 ethertype)
{
	return ethertype == ETHERTYPE_VLAN || ethertype == ETHERTYPE_VLAN_SERVICE;
}

/*
 * The frame itself is read, from its start, which is where data starts at egress. What goes with
 * it would be less sure: a packet socket says what it likes in skb->protocol, and the network
 * header points before or behind the tags, depending on who made the packet.
 */
static __always_inline __u16 find_in_frame(struct __sk_buff *skb, __u32 *offset)
{
	__u16 ethertype = 0;

	*offset = ETHERTYPE_OFFSET;
#pragma unroll
	for (int tag = 0; tag <= VLAN_TAGS; tag++) {
		if (bpf_skb_load_bytes(skb, *offset, &ethertype, sizeof(ethertype)))
			return 0;
		ethertype = bpf_ntohs(ethertype);
		*offset += sizeof(ethertype);
		if (!is_vlan(ethertype))
			break;
		*offset += VLAN_HEADER - sizeof(ethertype);
	}
	return ethertype;
}

/* A device without Ethernet header (tun, WireGuard) has the network header right. */
static __always_inline int load(struct __sk_buff *skb, __u32 offset, void *to, __u32 length)
{
	if (offset == 0)
		return bpf_skb_load_bytes_relative(skb, 0, to, length, BPF_HDR_START_NET);
	return bpf_skb_load_bytes(skb, offset, to, length);
}

/*
 * Finds the IP header and returns its DSCP. The whole fixed header is read although two bytes
 * would do: half a header is no IP packet.
 */
static __always_inline __u32 read_ip(struct __sk_buff *skb, __u32 flags, struct header *header)
{
	__u8 *ip = header->ip;
	__u16 ethertype;

	if (flags & TLSCHED_ETHERNET)
		ethertype = find_in_frame(skb, &header->offset);
	else
		ethertype = bpf_ntohs(skb->protocol);
	if (ethertype == ETHERTYPE_IPV4) {
		if (load(skb, header->offset, ip, IPV4_HEADER) || ip[0] >> 4 != 4)
			return TLSCHED_NO_DSCP;
		if ((ip[0] & 15) * 4 < IPV4_HEADER)
			return TLSCHED_NO_DSCP;
		return ip[1] >> 2;
	}
	if (ethertype == ETHERTYPE_IPV6) {
		if (load(skb, header->offset, ip, IPV6_HEADER) || ip[0] >> 4 != 6)
			return TLSCHED_NO_DSCP;
		return (ip[0] & 15) << 2 | ip[1] >> 6;
	}
	return TLSCHED_NO_DSCP;
}

static __always_inline bool trusts_source(struct header *header, __u32 flags)
{
	struct tlsched_v4_prefix v4 = { .bits = 32 };
	struct tlsched_v6_prefix v6 = { .bits = 128 };

	if (!(flags & TLSCHED_SOURCES))
		return false;
	if (header->ip[0] >> 4 == 4) {
		__builtin_memcpy(v4.address, header->ip + IPV4_SOURCE, sizeof(v4.address));
		return trusted_v4.lookup(&v4);
	}
	__builtin_memcpy(v6.address, header->ip + IPV6_SOURCE, sizeof(v6.address));
	return trusted_v6.lookup(&v6);
}

/* The socket's cgroup is where it was made in, or its listener was; later moves do not count. */
static __always_inline bool trusts_cgroup(struct __sk_buff *skb, __u32 levels)
{
	/* Unrolled: without CAP_PERFMON the verifier follows a loop past its end. */
#pragma unroll
	for (int level = 0; level < TLSCHED_CGROUP_LEVELS; level++) {
		__u64 id;

		if (!(levels & 1u << level))
			continue;
		id = bpf_skb_ancestor_cgroup_id(skb, level);
		if (trusted_cgroups.lookup(&id))
			return true;
	}
	return false;
}

static __always_inline bool trusts_socket(struct __sk_buff *skb,
					  const struct tlsched_settings *known)
{
	__u32 uid;

	/*
	 * Without a socket is what the kernel answers by itself (resets by netfilter), and what a
	 * tunnel of this host makes of a forwarded packet: it forgets the way in, and may copy the
	 * DSCP to the outside. The sockets of SYN-ACKs and of connections in TIME_WAIT do here.
	 */
	if (known->flags & TLSCHED_ANY_LOCAL)
		return skb->sk;
	/*
	 * Here they do if they lead to whole ones: a SYN-ACK's does, to the listener. Whatever else
	 * has no cgroup, and must not be asked for its owner, which would be the user that stands
	 * for all unknown ones.
	 */
	if (!bpf_skb_cgroup_id(skb))
		return false;
	/* A uid is as the socket's network namespace numbers users, which need not be as the host. */
	if (known->flags & TLSCHED_UIDS) {
		uid = bpf_get_socket_uid(skb);
		if (trusted_uids.lookup(&uid))
			return true;
	}
	return trusts_cgroup(skb, known->cgroup_levels);
}

/* Clears the DSCP and keeps the two bits of ECN beside it. Copies a header that others share. */
static __always_inline void clear_dscp(struct __sk_buff *skb, struct header *header)
{
	__u8 was[2] = { header->ip[0], header->ip[1] };
	__u8 now[2] = { was[0], was[1] & 3 };
	__u16 from, to;
	__u8 first;

	/* Without Ethernet header the frame is the packet, or has a header that we do not know. */
	if (header->offset == 0 && (bpf_skb_load_bytes(skb, 0, &first, 1) || first != was[0]))
		return;
	if (was[0] >> 4 == 4) {
		__builtin_memcpy(&from, was, sizeof(from));
		__builtin_memcpy(&to, now, sizeof(to));
		bpf_l3_csum_replace(skb, header->offset + IPV4_CHECKSUM, from, to, sizeof(to));
		bpf_skb_store_bytes(skb, header->offset, now, sizeof(now), 0);
		return;
	}
	now[0] = was[0] & 0xf0;
	now[1] = was[1] & 0x3f;
	/* IPv6 has no checksum that makes up for it in the sum over the packet. */
	bpf_skb_store_bytes(skb, header->offset, now, sizeof(now), BPF_F_RECOMPUTE_CSUM);
}

/*
 * wire_len and gso_segs give what the wire will carry: each segment of a GSO packet with headers of
 * its own. HTB counts its classes the same way, so the two can be compared.
 */
static __always_inline void count(struct __sk_buff *skb, __u32 key)
{
	struct tlsched_counters *counter = counters.lookup(&key);

	if (!counter)
		return;
	counter->packets += skb->gso_segs ? skb->gso_segs : 1;
	counter->bytes += skb->wire_len;
}

/*
 * Whether a packet with a lane's DSCP belongs there. One that came in over another link has no
 * socket to mark it: when the kernel forwards it, skb->priority is only a guess from its TOS byte
 * (ip_forward()). So its DSCP alone counts, and its source is asked for.
 */
static __always_inline bool belongs(struct __sk_buff *skb, struct header *header,
				    const struct tlsched_mark *mark,
				    const struct tlsched_settings *known)
{
	bool forwarded = skb->ingress_ifindex;

	if (forwarded ? trusts_source(header, known->flags) : trusts_socket(skb, known))
		return forwarded || mark->priority == skb->priority;
	count(skb, TLSCHED_REFUSED);
	clear_dscp(skb, header);
	return false;
}

int tlsched(struct __sk_buff *skb)
{
	__u32 zero = 0, dscp = TLSCHED_NO_DSCP;
	const struct tlsched_settings *current = settings.lookup(&zero);
	const struct tlsched_mark *mark, *none = marks.lookup(&dscp);
	struct tlsched_settings known;
	struct header header = {};

	/* None of these is ever NULL; the verifier asks. */
	if (!current || !none)
		return TC_ACT_UNSPEC;
	known = *current; /* once: they may change meanwhile */
	dscp = read_ip(skb, known.flags, &header);
	mark = marks.lookup(&dscp);
	if (!mark)
		return TC_ACT_UNSPEC;
	if (mark->band != TLSCHED_DEFAULT && !belongs(skb, &header, mark, &known))
		mark = none;
	/* The upper half of a class number is the tree's: no packet may name one of ours itself. */
	if (mark->band != TLSCHED_DEFAULT || skb->priority >> 16 == mark->classid >> 16)
		skb->priority = mark->classid;
	count(skb, mark->band);
	return TC_ACT_UNSPEC;
}
