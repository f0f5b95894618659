// The AVX-512 unit with the VNNI instruction in its int8 products (Cascade Lake, Zen 4 and later).
#define SLUICE_VNNI
#include "avx512.cpp"
