// The AVX2 unit with the 256-bit VNNI instruction in its int8 products (Alder Lake, Zen 5 and later).
#define SLUICE_VNNI
#ifdef SLUICE_EMULATE_AVX512
#include "simde_avx512.hpp"
#endif
#include "avx2.cpp"
