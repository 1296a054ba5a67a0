/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The verdict that a classifier may give here (kernel: include/uapi/linux/pkt_cls.h). */
#ifndef TLSCHED_UAPI_PKT_CLS_H
#define TLSCHED_UAPI_PKT_CLS_H

#define TC_ACT_UNSPEC (-1)

#endif
