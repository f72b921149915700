// The instruction sets that a kernel is compiled for, and the choice among them when the program runs.
//
// A kernel is one always_inline body that the compiler vectorises; each set compiles it again under a target
// attribute. All compute the same bits: the compiler contracts no product and sum into a fused multiply-add
// (-ffp-contract=off), those that are written are the C library's where the processor has none, and every sum has one
// fixed order. Left open are which NaN comes of two, and the sign of a zero that is left where a weight and its update
// cancel.
#pragma once

#include <string>
#include <vector>

#define STRONGHOLD_INLINE inline __attribute__((always_inline))

// Calls USE(name, attribute) for every set of this architecture, the plainest first.
#if defined(__x86_64__)
#define STRONGHOLD_PLAIN
#define STRONGHOLD_AVX2 __attribute__((target("avx2,fma")))
#if defined(__clang__)  // drops the whole attribute for a word that it does not know
#define STRONGHOLD_WIDE
#else
#define STRONGHOLD_WIDE ",prefer-vector-width=512"
#endif
#define STRONGHOLD_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl" STRONGHOLD_WIDE)))
#define STRONGHOLD_AVX512VBMI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi" STRONGHOLD_WIDE)))
#define STRONGHOLD_EACH_ISA(USE)                                 \
  USE(plain, STRONGHOLD_PLAIN) USE(avx2, STRONGHOLD_AVX2)        \
  USE(avx512, STRONGHOLD_AVX512) USE(avx512vbmi, STRONGHOLD_AVX512VBMI)
#elif defined(__aarch64__)
// Every arm64 has NEON, and the compiler uses it as a matter of course; the plain body is there to compare with.
#if defined(__clang__)
#define STRONGHOLD_PLAIN
#else
#define STRONGHOLD_PLAIN __attribute__((optimize("no-tree-vectorize")))
#endif
#define STRONGHOLD_EACH_ISA(USE) USE(plain, STRONGHOLD_PLAIN) USE(neon, )
#else
#define STRONGHOLD_PLAIN
#define STRONGHOLD_EACH_ISA(USE) USE(plain, STRONGHOLD_PLAIN)
#endif

namespace stronghold {

#define STRONGHOLD_ENUMERATOR(name, target) name,
enum class Isa { STRONGHOLD_EACH_ISA(STRONGHOLD_ENUMERATOR) };
#undef STRONGHOLD_ENUMERATOR

// The sets that this processor runs, the plainest first.
std::vector<std::string> available_isas();

// The last of available_isas().
std::string best_isa();

// The set of that name. Throws std::invalid_argument where it is unknown or this processor lacks it.
Isa isa_named(const std::string& name);

}  // namespace stronghold
