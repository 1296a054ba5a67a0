/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * bcc puts LINUX_VERSION_CODE into the program's "version" section, which the kernel reads for
 * kprobes only. A classifier does not depend on it.
 */
#ifndef TLSCHED_VERSION_H
#define TLSCHED_VERSION_H

#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))
#ifndef LINUX_VERSION_CODE
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 8, 0)
#endif

#endif
