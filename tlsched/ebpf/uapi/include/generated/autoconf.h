/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* bcc's helpers refuse to compile unless the kernel's configuration has bpf(2). */
#ifndef TLSCHED_AUTOCONF_H
#define TLSCHED_AUTOCONF_H

#define CONFIG_BPF_SYSCALL 1

#endif
