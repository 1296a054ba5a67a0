// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Marks -> band, at clsact egress.
 *
 * A packet of a local socket whose priority and DSCP are both those of one lane gets that lane's
 * class in skb->priority, where HTB looks first. Everything else is the default band's and stays
 * as it is, with one exception: whoever names one of our classes himself (a privileged
 * SO_PRIORITY) is moved to the default class, since a class number is not a mark.
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
#define IPV6_HEADER 40

BPF_ARRAY(marks, struct tlsched_mark, TLSCHED_MARKS);
BPF_PERCPU_ARRAY(counters, struct tlsched_counters, TLSCHED_BANDS);

static __always_inline bool is_vlan(__u16 ethertype)
{
	return ethertype == ETHERTYPE_VLAN || ethertype == ETHERTYPE_VLAN_SERVICE;
}

/* Offset 0 stands for the network header, any other counts from the start of the frame. */
static __always_inline int load(struct __sk_buff *skb, __u32 offset, void *to, __u32 length)
{
	if (offset == 0)
		return bpf_skb_load_bytes_relative(skb, 0, to, length, BPF_HDR_START_NET);
	return bpf_skb_load_bytes(skb, offset, to, length);
}

/* The whole fixed header is read although two bytes would do: half a header is no IP packet. */
static __always_inline __u32 ip_dscp(struct __sk_buff *skb, __u16 ethertype, __u32 offset)
{
	__u8 ip[IPV6_HEADER];

	if (ethertype == ETHERTYPE_IPV4) {
		if (load(skb, offset, ip, IPV4_HEADER) || ip[0] >> 4 != 4)
			return TLSCHED_NO_DSCP;
		if ((ip[0] & 15) * 4 < IPV4_HEADER)
			return TLSCHED_NO_DSCP;
		return ip[1] >> 2;
	}
	if (ethertype == ETHERTYPE_IPV6) {
		if (load(skb, offset, ip, IPV6_HEADER) || ip[0] >> 4 != 6)
			return TLSCHED_NO_DSCP;
		return (ip[0] & 15) << 2 | ip[1] >> 6;
	}
	return TLSCHED_NO_DSCP;
}

static __always_inline __u32 packet_dscp(struct __sk_buff *skb)
{
	__u16 ethertype = bpf_ntohs(skb->protocol);
	__u32 offset = ETHERTYPE_OFFSET;

	/*
	 * No tag, or one that the device will insert. The network header is then right on every
	 * device, also on those without an Ethernet header.
	 */
	if (!is_vlan(ethertype))
		return ip_dscp(skb, ethertype, 0);
	/*
	 * A tag inside the frame. Whether the network header points behind it depends on who made
	 * the packet (recent packet sockets: yes; frames that came in from a wire: no),
	 * so the tags are walked from the start of the frame, which is where data starts at egress.
	 */
#pragma unroll
	for (int tag = 0; tag <= VLAN_TAGS; tag++) {
		if (bpf_skb_load_bytes(skb, offset, &ethertype, sizeof(ethertype)))
			return TLSCHED_NO_DSCP;
		ethertype = bpf_ntohs(ethertype);
		if (!is_vlan(ethertype))
			return ip_dscp(skb, ethertype, offset + sizeof(ethertype));
		offset += VLAN_HEADER;
	}
	return TLSCHED_NO_DSCP;
}

/* The lane's mark if both agree, else the default band's. NULL never happens; the verifier asks. */
static __always_inline const struct tlsched_mark *find_mark(struct __sk_buff *skb)
{
	__u32 none = TLSCHED_NO_DSCP;
	__u32 dscp = TLSCHED_NO_DSCP;
	const struct tlsched_mark *mark;

	/*
	 * A packet that came in over another link carries no mark of a socket: when the kernel
	 * forwards it, skb->priority is only a guess from its TOS byte (ip_forward()).
	 */
	if (!skb->ingress_ifindex)
		dscp = packet_dscp(skb);
	mark = marks.lookup(&dscp);
	if (mark && mark->priority == skb->priority)
		return mark;
	return marks.lookup(&none);
}

/*
 * wire_len and gso_segs give what the wire will carry: each segment of a GSO packet with headers of
 * its own. HTB counts its classes the same way, so the two can be compared.
 */
static __always_inline void count(struct __sk_buff *skb, __u32 band)
{
	struct tlsched_counters *counter = counters.lookup(&band);

	if (!counter)
		return;
	counter->packets += skb->gso_segs ? skb->gso_segs : 1;
	counter->bytes += skb->wire_len;
}

int tlsched(struct __sk_buff *skb)
{
	const struct tlsched_mark *mark = find_mark(skb);

	if (!mark)
		return TC_ACT_UNSPEC;
	/* The upper half of a class number is the tree's: no packet may name one of ours itself. */
	if (mark->band != TLSCHED_DEFAULT || skb->priority >> 16 == mark->classid >> 16)
		skb->priority = mark->classid;
	count(skb, mark->band);
	return TC_ACT_UNSPEC;
}
