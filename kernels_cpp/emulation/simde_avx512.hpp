// Developers only: the AVX-512 instructions our unit uses, by SIMDe (Debian: libsimde-dev) on a machine with AVX2 and
// FMA. SIMDe 0.7 lacks a handful; they are given here by two AVX2 halves. fmadd stays fused: SIMDe builds it from two
// native 256-bit ones as long as FMA is enabled, and the tests of equal bits would show it if it did not.
#pragma once
#if !defined(__AVX2__) || !defined(__FMA__)
#error "emulation needs AVX2 and FMA: without them SIMDe's fmadd rounds twice"
#endif
#include <simde/x86/avx512.h>

namespace sluice {
namespace {
namespace emulated {

template <class T>
struct Halves {
  T low, high;
};

inline simde__m512 join(__m256 a, __m256 b) {
  Halves<__m256> h = {a, b};
  simde__m512 v;
  __builtin_memcpy(&v, &h, 64);
  return v;
}
inline simde__m512i join(__m256i a, __m256i b) {
  Halves<__m256i> h = {a, b};
  simde__m512i v;
  __builtin_memcpy(&v, &h, 64);
  return v;
}
inline Halves<__m256> split(simde__m512 v) {
  Halves<__m256> h;
  __builtin_memcpy(&h, &v, 64);
  return h;
}
inline Halves<__m256i> split(simde__m512i v) {
  Halves<__m256i> h;
  __builtin_memcpy(&h, &v, 64);
  return h;
}

inline simde__m512 maskz_loadu(unsigned mask, const float* p) {
  float lanes[16] = {};
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) lanes[i] = p[i];
  return join(_mm256_loadu_ps(lanes), _mm256_loadu_ps(lanes + 8));
}
inline void mask_storeu(float* p, unsigned mask, simde__m512 v) {
  float lanes[16];
  __builtin_memcpy(lanes, &v, 64);
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) p[i] = lanes[i];
}
inline simde__m512i cvtps_epi32(simde__m512 v) {
  auto h = split(v);
  return join(_mm256_cvtps_epi32(h.low), _mm256_cvtps_epi32(h.high));
}
inline simde__m512 cvtepi32_ps(simde__m512i v) {
  auto h = split(v);
  return join(_mm256_cvtepi32_ps(h.low), _mm256_cvtepi32_ps(h.high));
}
inline simde__m512i srai_epi32(simde__m512i v, int n) {
  auto h = split(v);
  return join(_mm256_srai_epi32(h.low, n), _mm256_srai_epi32(h.high, n));
}
inline simde__m512i cvtepu16_epi32(__m256i v) {
  return join(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1)));
}
inline simde__m512 cvtph_ps(__m256i v) {
  return join(_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)));
}

}  // namespace emulated
}  // namespace
}  // namespace sluice

#define _mm512_maskz_loadu_ps(m, p) ::sluice::emulated::maskz_loadu(m, p)
#define _mm512_mask_storeu_ps(p, m, v) ::sluice::emulated::mask_storeu(p, m, v)
#define _mm512_cvtps_epi32(v) ::sluice::emulated::cvtps_epi32(v)
#define _mm512_cvtepi32_ps(v) ::sluice::emulated::cvtepi32_ps(v)
#define _mm512_srai_epi32(v, n) ::sluice::emulated::srai_epi32(v, n)
#define _mm512_cvtepu16_epi32(v) ::sluice::emulated::cvtepu16_epi32(v)
#define _mm512_cvtph_ps(v) ::sluice::emulated::cvtph_ps(v)
#define _mm256_dpbusd_avx_epi32(a, u, s) simde_mm256_dpbusd_epi32(a, u, s)
#undef _mm512_madd_epi16  // an alias for the masked form in 0.7.4
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
