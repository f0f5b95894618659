// AVX2 + FMA + F16C primitives; the kernels are in simd_kernels.hpp. avxvnni.cpp includes this file once more.
#include <immintrin.h>

#include "kernels.hpp"
#include "constants.hpp"

namespace sluice {
namespace {

typedef __m256 V;
typedef __m256 M;
#ifdef SLUICE_VNNI
constexpr const char* kIsaName = "avxvnni";
#else
constexpr const char* kIsaName = "avx2";
#endif
constexpr int kWidth = 8, kSlices = 4;

inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }

alignas(64) constexpr int32_t kTailMask[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
inline __m256i tail_mask(int64_t n) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kTailMask + 8 - n));
}
inline V load_n(const float* p, int64_t n) { return n == 8 ? load(p) : _mm256_maskload_ps(p, tail_mask(n)); }
inline void store_n(float* p, V v, int64_t n) {
  if (n == 8) store(p, v);
  else _mm256_maskstore_ps(p, tail_mask(n), v);
}

inline V set1(float x) { return _mm256_set1_ps(x); }
inline V set1_at(const float* p) { return _mm256_broadcast_ss(p); }
inline V zero() { return _mm256_setzero_ps(); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V div(V a, V b) { return _mm256_div_ps(a, b); }
inline V sqrt(V a) { return _mm256_sqrt_ps(a); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V fnma(V a, V b, V c) { return _mm256_fnmadd_ps(a, b, c); }
inline V min(V a, V b) { return _mm256_min_ps(a, b); }  // a NaN in b is returned
inline V max(V a, V b) { return _mm256_max_ps(a, b); }
inline V and_bits(V a, V b) { return _mm256_and_ps(a, b); }
inline V andnot_bits(V a, V b) { return _mm256_andnot_ps(a, b); }
inline V or_bits(V a, V b) { return _mm256_or_ps(a, b); }
inline M less(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline V pick(M m, V yes, V no) { return _mm256_blendv_ps(no, yes, m); }
inline float first(V a) { return _mm256_cvtss_f32(a); }

inline V pow2(V n) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline V half_floor(V n) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_cvtps_epi32(n), 1)); }

inline bool has_nonfinite(V v) {
  __m256i exponent = _mm256_set1_epi32(0x7f800000);
  __m256i bits = _mm256_and_si256(_mm256_castps_si256(v), exponent);
  return _mm256_movemask_epi8(_mm256_cmpeq_epi32(bits, exponent)) != 0;
}

inline V widen_bf16(const unsigned char* p) {
  __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline V widen_f16(const unsigned char* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline float reduce(const V v[kSlices]) {
  V a = add(add(v[0], v[2]), add(v[1], v[3]));                                          // 16+16, then 8+8
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));        // 4+4
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));                                               // 2+2
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));                              // 1+1
}

// The bfloat16 of each e2m1 code under each scale, low bytes then high bytes: every such product is one exactly (two
// significant bits; 2^-128 at least). 8 KiB, of which a matrix touches the few lines of its own scales; looking a scaled
// value up saves the multiplication by the scale.
struct Bf16Table {
  unsigned char bytes[256][32];
  constexpr Bf16Table() : bytes() {
    constexpr int exponents[8] = {0, -1, 0, 0, 1, 1, 2, 2}, halves[8] = {0, 0, 0, 1, 0, 1, 0, 1};
    for (int scale = 0; scale < 256; ++scale)
      for (int code = 0; code < 16; ++code) {
        int magnitude = code & 7, biased = scale + exponents[magnitude], significand = 0x80 | halves[magnitude] << 6;
        int bits = magnitude == 0 ? 0
                   : biased >= 255 ? 0x7f80  // beyond float32, as the multiplication would leave it
                   : biased > 0    ? biased << 7 | (significand & 0x7f)
                                   : significand >> (1 - biased);
        bits |= (code & 8) << 12;
        bytes[scale][code] = static_cast<unsigned char>(bits & 255);
        bytes[scale][16 + code] = static_cast<unsigned char>(bits >> 8);
      }
  }
};
alignas(64) constexpr Bf16Table kBf16Table = Bf16Table();

inline __m256i twice(const unsigned char* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Sixteen bytes and their scale to 32 weights. Both halves of the register get the bytes, the upper one its high
// nibbles; two byte shuffles look up the halves of each weight's bfloat16, and interleaving them leaves the elements so:
//   slice 0: 0 4 8 12 1 5 9 13   slice 1: 2 6 10 14 3 7 11 15   slices 2, 3: the same + 16
// x is laid out likewise (mx_arrange), and mx_reduce adds the lanes in the tree's own pairs.
inline void mx_decode(const unsigned char* p, unsigned char scale, V out[kSlices]) {
  const unsigned char* table = kBf16Table.bytes[scale];
  const __m256i shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
  __m256i nibbles = _mm256_and_si256(_mm256_srlv_epi32(twice(p), shifts), _mm256_set1_epi8(15));
  __m256i low = _mm256_shuffle_epi8(twice(table), nibbles), high = _mm256_shuffle_epi8(twice(table + 16), nibbles);
  __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
  const __m256i odd = _mm256_set1_epi32(int(0xffff0000u));
  out[0] = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
  out[1] = _mm256_castsi256_ps(_mm256_and_si256(a, odd));
  out[2] = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
  out[3] = _mm256_castsi256_ps(_mm256_and_si256(b, odd));
}

constexpr int kMxOrder[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

inline void mx_arrange(V v[kSlices]) {
  alignas(32) float in[32], out[32];
  for (int s = 0; s < 4; ++s) store(in + 8 * s, v[s]);
  for (int i = 0; i < 16; ++i) out[i] = in[kMxOrder[i]], out[16 + i] = in[16 + kMxOrder[i]];
  for (int s = 0; s < 4; ++s) v[s] = load(out + 8 * s);
}

inline float mx_reduce(const V v[kSlices]) {
  V a = add(v[0], v[2]), b = add(v[1], v[3]);  // 16+16: lanes 0 4 8 12 1 5 9 13 and 2 6 10 14 3 7 11 15
  V c = _mm256_shuffle_ps(a, b, _MM_SHUFFLE(1, 0, 1, 0)), d = _mm256_shuffle_ps(a, b, _MM_SHUFFLE(3, 2, 3, 2));
  V e = add(c, d);                                    // 8+8: 0 4 2 6 | 1 5 3 7
  V f = add(e, _mm256_movehdup_ps(e));                // 4+4: 0 . 2 . | 1 . 3 .
  V g = add(f, _mm256_permute_ps(f, 2));              // 2+2: 0 ... | 1 ...
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(g), _mm256_extractf128_ps(g, 1)));
}

// ---- int8: one group to a register of eight sums --------------------------------------------------------------------

constexpr int kInt8Tokens = 2, kInt8Groups = 1;
typedef __m256i Bytes;

// 2 e2m1 + 12 for each nibble, as unsigned bytes: low nibbles, then high ones
inline Bytes int8_decode(const unsigned char* p) {
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m256i shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
  return _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srlv_epi32(twice(p), shifts), _mm256_set1_epi8(15)));
}

inline V int8_add(Bytes w, const signed char* x, const int32_t* corrections, const float* steps, V lanes) {
  __m256i xi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  __m256i sum = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(corrections));
#ifdef SLUICE_VNNI
  sum = _mm256_dpbusd_avx_epi32(sum, w, xi);
#else  // at most 2 * 24 * 127 a pair: the 16-bit sums never saturate
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, xi), _mm256_set1_epi16(1)));
#endif
  return fma(_mm256_cvtepi32_ps(sum), _mm256_broadcast_ss(steps), lanes);
}

}  // namespace
}  // namespace sluice

#define SLUICE_TOKEN_BLOCK 4
#define SLUICE_MX_ROWS 1
#include "simd_kernels.hpp"

namespace sluice {
#ifdef SLUICE_VNNI
const Ops* avxvnni_ops() { return &kOps; }
#else
const Ops* avx2_ops() { return &kOps; }
#endif
}  // namespace sluice
