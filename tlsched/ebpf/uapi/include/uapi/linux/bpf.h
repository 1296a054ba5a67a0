/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* struct __sk_buff, helper numbers, map types: bcc carries a copy of the kernel's own header. */
#ifndef TLSCHED_UAPI_BPF_H
#define TLSCHED_UAPI_BPF_H

#include <bcc/bpf.h>

#endif
