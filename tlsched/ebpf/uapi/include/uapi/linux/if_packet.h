/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* bcc's helpers include it and need nothing of it. */
#ifndef TLSCHED_UAPI_IF_PACKET_H
#define TLSCHED_UAPI_IF_PACKET_H

#endif
