// The update by hand in AVX-512 with VBMI.
#include "isa.h"

#if defined(__x86_64__)
#define STRONGHOLD_BODY adamw_avx512vbmi
#define STRONGHOLD_TARGET STRONGHOLD_AVX512VBMI
#define STRONGHOLD_VBMI 1
#include "adamw_avx512.h"
#endif
