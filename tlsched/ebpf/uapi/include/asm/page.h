/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* bcc's helpers size perf buffers by it; nothing here has one. */
#ifndef TLSCHED_PAGE_H
#define TLSCHED_PAGE_H

#define PAGE_SIZE 4096

#endif
