// The update by hand in AVX-512.
#include "isa.h"

#if defined(__x86_64__)
#define STRONGHOLD_BODY adamw_avx512
#define STRONGHOLD_TARGET STRONGHOLD_AVX512
#define STRONGHOLD_VBMI 0
#include "adamw_avx512.h"
#endif
