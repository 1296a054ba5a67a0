/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The types that bcc's helpers and the kernel's user-space API of bpf(2) name. Their sizes are
 * those of the BPF machine (64 bits, whatever the host), so they hold for every architecture.
 */
#ifndef TLSCHED_TYPES_H
#define TLSCHED_TYPES_H

typedef signed char __s8;
typedef unsigned char __u8;
typedef short __s16;
typedef unsigned short __u16;
typedef int __s32;
typedef unsigned int __u32;
typedef long long __s64;
typedef unsigned long long __u64;

typedef __s8 s8;
typedef __u8 u8;
typedef __s16 s16;
typedef __u16 u16;
typedef __s32 s32;
typedef __u32 u32;
typedef __s64 s64;
typedef __u64 u64;

/* Byte orders: names only. The kernel's own headers let a checker tell them apart. */
typedef __u16 __le16;
typedef __u16 __be16;
typedef __u32 __le32;
typedef __u32 __be32;
typedef __u64 __le64;
typedef __u64 __be64;
typedef __u16 __sum16;
typedef __u32 __wsum;

typedef __UINTPTR_TYPE__ uintptr_t;
typedef __SIZE_TYPE__ size_t;
typedef _Bool bool;
#define true 1
#define false 0

#define __aligned_u64 __u64 __attribute__((aligned(8)))

#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif

#ifndef NULL
#define NULL ((void *)0)
#endif

#endif
