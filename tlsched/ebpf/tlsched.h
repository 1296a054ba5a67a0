/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the classifier and user space agree on: the maps, by name, their keys and their values.
 * abi.py says the same in Python; a test compares the two.
 */
#ifndef TLSCHED_H
#define TLSCHED_H

#define TLSCHED_BANDS 7 /* the lanes' bands, most urgent first, then the default band */
#define TLSCHED_DEFAULT (TLSCHED_BANDS - 1)
#define TLSCHED_DSCPS 64 /* a DSCP has six bits */

/*
 * Map "marks": one value for each DSCP, and one more for packets that have none. A DSCP that is no
 * lane's holds what that last one holds: the default band.
 */
#define TLSCHED_NO_DSCP TLSCHED_DSCPS
#define TLSCHED_MARKS (TLSCHED_DSCPS + 1)

struct tlsched_mark {
	__u32 priority; /* the SO_PRIORITY that has to go with this DSCP */
	__u32 band;	/* 0 to 6: key into "counters" */
	__u32 classid;	/* what skb->priority becomes: major << 16 | minor */
};

/*
 * Map "counters": one value for each band and CPU, and one more: what lost a lane's DSCP because
 * its sender is not trusted. That is counted as the default band's as well.
 */
#define TLSCHED_REFUSED TLSCHED_BANDS
#define TLSCHED_COUNTERS (TLSCHED_BANDS + 1)

struct tlsched_counters {
	__u64 packets; /* as on the wire: a GSO packet counts its segments */
	__u64 bytes;   /* as on the wire: each segment with its headers */
};

/* Map "settings": one value. A set that no flag or level names is not looked into. */
#define TLSCHED_ETHERNET 1  /* frames on this link begin with an Ethernet header */
#define TLSCHED_ANY_LOCAL 2 /* every socket of this host is trusted */
#define TLSCHED_UIDS 4	    /* "trusted_uids" has entries */
#define TLSCHED_SOURCES 8   /* "trusted_v4" or "trusted_v6" has entries */

struct tlsched_settings {
	__u32 flags;
	__u32 cgroup_levels; /* bit n: "trusted_cgroups" has one that is n below the root */
};

/*
 * The sets: "trusted_uids" (keys __u32), "trusted_cgroups" (keys __u64, the cgroup's id),
 * "trusted_v4" and "trusted_v6" (longest-prefix tries). Whatever is in one is trusted; the values
 * are always 1.
 */
#define TLSCHED_SET_ENTRIES 2048 /* during a change old and new entries stand here together */
#define TLSCHED_CGROUP_LEVELS 16

struct tlsched_v4_prefix {
	__u32 bits;
	__u8 address[4];
};

struct tlsched_v6_prefix {
	__u32 bits;
	__u8 address[16];
};

#endif
