/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* bcc's helpers include it for roundup_pow_of_two(), which only stack-trace maps use. */
#ifndef TLSCHED_LOG2_H
#define TLSCHED_LOG2_H

#endif
