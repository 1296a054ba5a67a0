/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Classic BPF's operation codes: bcc's <bcc/bpf.h> includes this file and needs none of them. */
#ifndef TLSCHED_BPF_COMMON_H
#define TLSCHED_BPF_COMMON_H

#endif
