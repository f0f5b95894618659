// AVX-512 (F, BW, DQ, VL) primitives; the kernels are in simd_kernels.hpp. With SLUICE_EMULATE_AVX512 the same unit
// is compiled through SIMDe, so that its bits can be tested on a machine without the instructions (CMakeLists.txt).
// avx512vnni.cpp includes this file once more.
#ifdef SLUICE_EMULATE_AVX512
#define SIMDE_ENABLE_NATIVE_ALIASES
#include "simde_avx512.hpp"
#else
#include <immintrin.h>
#endif

#include "kernels.hpp"
#include "constants.hpp"

namespace sluice {
namespace {

typedef __m512 V;
typedef __mmask16 M;
#ifdef SLUICE_VNNI
constexpr const char* kIsaName = "avx512vnni";
#else
constexpr const char* kIsaName = "avx512";
#endif
constexpr int kWidth = 16, kSlices = 2;

inline M first_n(int64_t n) { return M(0xffffu >> (16 - n)); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline V load_n(const float* p, int64_t n) { return n == 16 ? load(p) : _mm512_maskz_loadu_ps(first_n(n), p); }
inline void store_n(float* p, V v, int64_t n) {
  if (n == 16) store(p, v);
  else _mm512_mask_storeu_ps(p, first_n(n), v);
}

inline V set1(float x) { return _mm512_set1_ps(x); }
inline V set1_at(const float* p) { return _mm512_set1_ps(*p); }
inline V zero() { return _mm512_setzero_ps(); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V div(V a, V b) { return _mm512_div_ps(a, b); }
inline V sqrt(V a) { return _mm512_sqrt_ps(a); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V fnma(V a, V b, V c) { return _mm512_fnmadd_ps(a, b, c); }
inline V min(V a, V b) { return _mm512_min_ps(a, b); }  // a NaN in b is returned
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline V and_bits(V a, V b) { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_castps_si512(b))); }
inline V andnot_bits(V a, V b) {
  return _mm512_castsi512_ps(_mm512_andnot_si512(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
inline V or_bits(V a, V b) { return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(a), _mm512_castps_si512(b))); }
inline M less(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline V pick(M m, V yes, V no) { return _mm512_mask_blend_ps(m, no, yes); }
inline float first(V a) { return _mm_cvtss_f32(_mm512_castps512_ps128(a)); }

inline V pow2(V n) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline V half_floor(V n) { return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_cvtps_epi32(n), 1)); }

inline bool has_nonfinite(V v) {
  __m512i exponent = _mm512_set1_epi32(0x7f800000);
  return _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(v), exponent), exponent) != 0;
}

inline V widen_bf16(const unsigned char* p) {
  __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
inline V widen_f16(const unsigned char* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline float reduce(const V v[kSlices]) {
  V a = add(v[0], v[1]);                                                                            // 16+16
  __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a),
                           _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)));       // 8+8
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));                    // 4+4
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));                                                           // 2+2
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));                                          // 1+1
}

// Sixteen bytes to 32 weights in natural order: each half of the lanes shifts its own nibble down and a 16-entry
// table, already scaled, is permuted by it (only the low four index bits count).
inline void mx_decode(const unsigned char* p, unsigned char scale, V out[kSlices]) {
  const V table = mul(_mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,  //
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f),
                      set1_at(scale_float(scale)));
  const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i low = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const __m512i high = _mm512_setr_epi32(2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  out[0] = _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_permutexvar_epi32(low, bytes), shifts), table);
  out[1] = _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_permutexvar_epi32(high, bytes), shifts), table);
}
inline void mx_arrange(V*) {}
inline float mx_reduce(const V v[kSlices]) { return reduce(v); }

// ---- int8: two groups to a register -------------------------------------------------------------------------------

constexpr int kInt8Tokens = 4, kInt8Groups = 2;
typedef __m512i Bytes;

// 2 e2m1 + 12 for each nibble, as unsigned bytes: of each group the low nibbles, then the high ones
inline Bytes int8_decode(const unsigned char* p) {
  const __m512i table =
      _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m512i shifts = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4);
  const __m512i twice = _mm512_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7);
  __m512i b = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  b = _mm512_srlv_epi32(_mm512_permutexvar_epi32(twice, b), shifts);
  return _mm512_shuffle_epi8(table, _mm512_and_si512(b, _mm512_set1_epi8(15)));
}

inline V int8_add(Bytes w, const signed char* x, const int32_t* corrections, const float* steps, V lanes) {
  __m512i xi = _mm512_loadu_si512(x), sum = _mm512_loadu_si512(corrections);
#ifdef SLUICE_VNNI
  sum = _mm512_dpbusd_epi32(sum, w, xi);
#else  // at most 2 * 24 * 127 a pair: the 16-bit sums never saturate
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(w, xi), _mm512_set1_epi16(1)));
#endif
  return fma(_mm512_cvtepi32_ps(sum), pick(0xff00, set1(steps[1]), set1(steps[0])), lanes);
}

}  // namespace
}  // namespace sluice

#define SLUICE_TOKEN_BLOCK 8
#define SLUICE_MX_ROWS 2
#include "simd_kernels.hpp"

namespace sluice {
#ifdef SLUICE_VNNI
const Ops* avx512vnni_ops() { return &kOps; }
#else
const Ops* avx512_ops() { return &kOps; }
#endif
}  // namespace sluice
