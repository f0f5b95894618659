#include "dispatch.hpp"

#if defined(SLUICE_X86)
#include <cpuid.h>
#endif

#include <atomic>

#include "driver.hpp"

namespace sluice {
namespace {

#if defined(SLUICE_X86)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#if defined(SLUICE_EMULATE_AVX512)  // developer builds only: these units run through SIMDe
bool has_avxvnni() { return has_avx2(); }
bool has_avx512() { return has_avx2(); }
bool has_avx512vnni() { return has_avx2(); }
#else
bool has_avxvnni() {
  unsigned a, b, c, d;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#endif
#endif
bool always() { return true; }

struct Row {
  const char* name;
  bool (*supported)();
  const Ops* (*table)();
};

constexpr Row kTable[] = {
#if defined(SLUICE_X86)
    {"avx512vnni", has_avx512vnni, avx512vnni_ops},
    {"avx512", has_avx512, avx512_ops},
    {"avxvnni", has_avxvnni, avxvnni_ops},
    {"avx2", has_avx2, avx2_ops},
#endif
    {"scalar", always, scalar_ops},
};

std::atomic<const Ops*> g_ops{nullptr};

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Row& row : kTable)
    if (row.supported()) names.push_back(row.name);
  return names;
}

const Ops* find_isa(const std::string& name) {
  for (const Row& row : kTable)
    if (name == row.name) return row.supported() ? row.table() : nullptr;
  return nullptr;
}

void set_ops(const Ops* table) { g_ops.store(table); }

const Ops& ops() { return *g_ops.load(std::memory_order_relaxed); }

}  // namespace sluice
