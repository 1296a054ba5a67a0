/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the classifier and user space agree on: the two maps, by name, and their values.
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

/* Map "counters": one value for each band and CPU. */
struct tlsched_counters {
	__u64 packets; /* as on the wire: a GSO packet counts its segments */
	__u64 bytes;   /* as on the wire: each segment with its headers */
};

#endif
