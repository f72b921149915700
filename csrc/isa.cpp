#include "isa.h"

#include <stdexcept>

namespace stronghold {
namespace {

struct Known {
  const char* name;
  Isa isa;
};

#define STRONGHOLD_ENTRY(name, target) {#name, Isa::name},
constexpr Known kKnown[] = {STRONGHOLD_EACH_ISA(STRONGHOLD_ENTRY)};
#undef STRONGHOLD_ENTRY

bool runs(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (isa == Isa::avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == Isa::avx512 || isa == Isa::avx512vbmi)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           (isa == Isa::avx512 || __builtin_cpu_supports("avx512vbmi"));
#endif
  (void)isa;
  return true;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Known& known : kKnown)
    if (runs(known.isa)) names.push_back(known.name);
  return names;
}

std::string best_isa() { return available_isas().back(); }

Isa isa_named(const std::string& name) {
  std::string available;
  for (const Known& known : kKnown) {
    if (!runs(known.isa)) continue;
    if (name == known.name) return known.isa;
    available += (available.empty() ? "" : ", ") + std::string(known.name);
  }
  throw std::invalid_argument("isa must be one that this processor runs (got '" + name + "', it runs " + available +
                              "); pass the last of these");
}

}  // namespace stronghold
