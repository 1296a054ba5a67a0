/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* bcc includes this file before everything else, on every compilation. */
#ifndef TLSCHED_KCONFIG_H
#define TLSCHED_KCONFIG_H

#include <generated/autoconf.h>

#endif
