// The seam between the arithmetic units (one per instruction set) and everything else: plain structs and one table
// of function pointers. This header is all an instruction-set unit may include beside intrinsics, so it holds no
// inline function with external linkage and nothing of the standard library (an inline compiled for AVX2 could be
// the copy the linker keeps for every machine).
//
// Definitions that every unit obeys bit for bit (DESIGN 4):
//   dot     32 lanes; lane j takes elements j, j+32, ... by fused multiply-add from +0, the last group padded with
//           zeros; then lanes add as the tree 16+16, 8+8, 4+4, 2+2, 1+1.
//   column  sums over an index i that is not the vector axis run with i ascending, fused, from +0.
#pragma once
#include <stdint.h>

namespace sluice {

enum Kind : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kMxfp4 = 3 };

// Rows of weights, possibly at odd addresses. kMxfp4: data holds cols/2 bytes a row (element 2j in the low nibble of
// byte j), scales cols/32 bytes a row; otherwise scales is null.
struct Matrix {
  int kind;
  const unsigned char* data;
  const unsigned char* scales;
  int64_t rows, cols;
};

// kind 0: SiLU(gate) * up. kind 1: SiTU, beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta).
struct Activation {
  int kind;
  float beta, linear_beta;
};

struct Ops {
  const char* name;

  // Products. `prepare` lays tokens [block0*token_block, block1*token_block) of x (tokens rows of cols floats) out in
  // this unit's own order, zero-padded to whole groups of 32; dst holds tokens * padded(cols) floats for all tokens.
  int64_t token_block;
  void (*prepare)(const float* const* x, int64_t tokens, int64_t cols, int kind, int64_t block0, int64_t block1,
                  float* dst);
  // out[t][row] = dot(x_t, w_row) for row in [row0, row1); scratch holds product_scratch(tokens) floats.
  void (*product)(const float* prepared, int64_t tokens, const Matrix* w, int64_t row0, int64_t row1,
                  float* const* out, float* scratch);
  int64_t (*product_scratch)(int64_t tokens);

  // Products with activations rounded to 8 bits in groups of 32; w is kMxfp4. The definition, for one token and row:
  //   amax = largest |x| of the group; step = amax/127; q = x * (127/amax) rounded to nearest, ties to even;
  //   P[p], p < 8 = integer sum of q * 2 e2m1 over elements 8p, 8p+2, 8p+4, 8p+6 (p < 4), the odd ones beside (p >= 4);
  //   lane 8 (g mod 4) + p takes, over groups g ascending, fma(float(P[p]), (step/2) * 2^(scale-127), lane);
  //   groups are padded with zeros to a multiple of 8, lanes add as the tree.
  // A group below 2^-100 counts as zeros; one that is not finite has step NaN.
  // int8_prepare lays tokens out one after another, int8_floats(cols) floats each.
  int64_t (*int8_floats)(int64_t cols);
  void (*int8_prepare)(const float* x, int64_t cols, float* dst);
  void (*int8_product)(const float* prepared, int64_t tokens, const Matrix* w, int64_t row0, int64_t row1,
                       float* const* out);

  // Elementwise over n floats; out may equal the first input.
  void (*exp)(const float* x, int64_t n, float* out);
  void (*sigmoid)(const float* x, int64_t n, float* out);
  void (*tanh)(const float* x, int64_t n, float* out);
  void (*softplus)(const float* x, int64_t n, float* out);
  void (*sigmoid_mul)(const float* x, const float* gate, int64_t n, float* out);
  void (*glu)(const float* gate, const float* up, int64_t n, const Activation* act, float* out);
  void (*widen)(int kind, const unsigned char* src, int64_t n, float* out);
  int (*finite)(const float* x, int64_t n);

  // One row of n.
  void (*rmsnorm)(const float* x, const float* weight, int64_t n, float eps, float* out);
  void (*l2norm)(const float* x, int64_t n, float eps, float scale, float* out);

  // Channels [c0, c1) of a depthwise causal convolution of `taps` taps over T tokens, then SiLU. x, out: [T, channels],
  // weight [channels, taps], window [taps-1, channels], oldest first, left holding the last taps-1 inputs.
  void (*short_conv)(const float* x, const float* weight, float* window, float* out, int64_t tokens, int64_t channels,
                     int64_t taps, int64_t c0, int64_t c1);
  // alpha = exp(lower_bound sigmoid(rate (z + bias))) when bounded, else exp(-rate softplus(z + bias)).
  void (*kda_decay)(const float* z, const float* bias, float rate, int bounded, float lower_bound, int64_t n,
                    float* alpha);
  // Value columns [c0, c1) of one head through T tokens. q, k, v, alpha, out point at the head's first token and step
  // `stride` floats a token; beta steps `heads`; state is [dim (key), dim (value)].
  void (*kda_head)(const float* q, const float* k, const float* v, const float* alpha, const float* beta, float* state,
                   float* out, int64_t tokens, int64_t stride, int64_t heads, int64_t dim, int64_t c0, int64_t c1);

  // out[r] = sum over i ascending of q[i] w[row0+i][r], r < w->cols.
  void (*absorb)(const float* q, int64_t n, const Matrix* w, int64_t row0, float* out);
  // `heads` queries of one token (at most 64, rows of `width` floats) over `positions` cache rows of `width` floats:
  // softmax(scale q.c) mixes the first `latent` columns, positions ascending, then divides by the lane-scheme sum.
  // scratch: attend_scratch floats.
  void (*attend)(const float* q, int64_t heads, const float* cache, int64_t positions, int64_t width, int64_t latent,
                 float scale, float* out, float* scratch);
  int64_t (*attend_scratch)(int64_t heads, int64_t positions, int64_t width);
  // Softmax mix of n source rows of dim floats by normalised-key scores (model.md 3.1); scores: n rounded up to 32.
  void (*attnres)(const float* const* sources, int64_t n, const float* w, int64_t dim, float eps, float* scores,
                  float* out);
  // out[d] = sum over i ascending of weights[i] rows[i*stride + d], d < n.
  void (*combine)(const float* rows, int64_t stride, const float* weights, int64_t count, int64_t n, float* out);
};

const Ops* scalar_ops();
const Ops* avx2_ops();
const Ops* avxvnni_ops();  // avx2 with the 256-bit VNNI instruction for int8
const Ops* avx512_ops();
const Ops* avx512vnni_ops();

}  // namespace sluice
