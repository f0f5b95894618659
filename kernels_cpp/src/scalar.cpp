// The definition: every kernel in plain C++, written to be read. The vector units must equal it bit for bit.
// The only functions of the mathematics library used here are exact ones: fma, sqrt (both correctly rounded).
#include "kernels.hpp"

#include <cmath>
#include <cstring>

#include "constants.hpp"

namespace sluice {
namespace {

constexpr int kLanes = 32;

template <class T>
T read(const unsigned char* p) {  // weights may lie at odd addresses
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

float from_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

uint32_t to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  return bits;
}

int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// ---- numbers -------------------------------------------------------------------------------------------------------

float widen_bfloat16(uint16_t h) { return from_bits(uint32_t(h) << 16); }

float widen_float16(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | fraction << 13);
  if (exponent != 0) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
  float magnitude = float(fraction) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

// E8M0: 2^(byte-127); byte 0 is the subnormal 2^-127.
float scale_value(unsigned char byte) { return from_bits(byte == 0 ? 0x00400000u : uint32_t(byte) << 23); }

constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

int64_t row_bytes(const Matrix& w) {
  switch (w.kind) {
    case kFloat32: return w.cols * 4;
    case kMxfp4: return w.cols / 2;
    default: return w.cols * 2;
  }
}

float weight(const Matrix& w, int64_t row, int64_t col) {
  const unsigned char* p = w.data + row * row_bytes(w);
  switch (w.kind) {
    case kFloat32: return read<float>(p + 4 * col);
    case kBfloat16: return widen_bfloat16(read<uint16_t>(p + 2 * col));
    case kFloat16: return widen_float16(read<uint16_t>(p + 2 * col));
    default: {
      unsigned char byte = p[col / 2];
      return kE2m1[col % 2 ? byte >> 4 : byte & 15] * scale_value(w.scales[row * (w.cols / 32) + col / 32]);
    }
  }
}

// ---- sums ----------------------------------------------------------------------------------------------------------

float tree(float* lane) {
  for (int width = kLanes / 2; width >= 1; width /= 2)
    for (int j = 0; j < width; ++j) lane[j] = lane[j] + lane[j + width];
  return lane[0];
}

template <class A, class B>
float dot(int64_t n, A a, B b) {
  float lane[kLanes] = {};
  for (int64_t i = 0; i < padded(n); ++i)
    lane[i % kLanes] = std::fma(i < n ? a(i) : 0.0f, i < n ? b(i) : 0.0f, lane[i % kLanes]);
  return tree(lane);
}

float square_sum(const float* x, int64_t n) {
  return dot(n, [&](int64_t i) { return x[i]; }, [&](int64_t i) { return x[i]; });
}

float plain_sum(const float* x, int64_t n) {  // the lane scheme with plain additions
  float lane[kLanes] = {};
  for (int64_t i = 0; i < padded(n); ++i) lane[i % kLanes] = lane[i % kLanes] + (i < n ? x[i] : 0.0f);
  return tree(lane);
}

// ---- transcendental functions --------------------------------------------------------------------------------------

float exp1(float x) {
  x = x > kExpHigh ? kExpHigh : x;
  x = x < kExpLow ? kExpLow : x;
  if (x != x) return x;
  float n = std::fma(x, kLog2e, kRoundMagic) - kRoundMagic;
  float high = std::fma(-n, kLn2High, x), low = n * kLn2Low;  // high is exact
  float r = high - low, lost = high - r - low;
  float p = std::fma(kExp4, r, kExp3);
  p = std::fma(p, r, kExp2);
  p = std::fma(p, r, kExp1);
  p = std::fma(p, r, kExp0);
  float y = std::fma(p, r * r, lost) + r + 1.0f;
  int exponent = int(n), half = exponent >> 1;  // two steps, so that results below 2^-126 round once, correctly
  return y * from_bits(uint32_t(half + 127) << 23) * from_bits(uint32_t(exponent - half + 127) << 23);
}

float sigmoid1(float x) {
  float e = exp1(-std::fabs(x));
  float above = x < 0.0f ? e : 1.0f;
  float below = 1.0f + e, lost = e - (below - 1.0f);  // below + lost is exact
  float y = above / below;
  float rest = std::fma(-y, lost, std::fma(-y, below, above));  // one Newton step; 1/below is y, or 1-y by symmetry
  return std::fma(rest, x < 0.0f ? 1.0f - y : y, y);
}

float tanh1(float x) {
  float a = std::fabs(x), z = x * x;
  float p = std::fma(kTanh5, z, kTanh4);
  p = std::fma(p, z, kTanh3);
  p = std::fma(p, z, kTanh2);
  p = std::fma(p, z, kTanh1);
  p = std::fma(p, z, kTanh0);
  float small = std::fma(x * z, p, x);
  float large = 1.0f - 2.0f / (exp1(a + a) + 1.0f);
  return a < kTanhSmall ? small : from_bits(to_bits(large) | (to_bits(x) & 0x80000000u));
}

float softplus1(float x) {
  if (x > kSoftplusLinear) return x;
  float e = exp1(-std::fabs(x));
  bool upper = e >= 0.5f;  // log(1+e) = ln2 + log(1 + (e-1)/2); both subtraction and halving are exact there
  float f = upper ? (e - 1.0f) * 0.5f : e;
  float k = upper ? 1.0f : 0.0f;
  float s = f / (2.0f + f), z = s * s, half_square = f * f * 0.5f;
  float p = std::fma(kLog3, z, kLog2);
  p = std::fma(p, z, kLog1);
  p = std::fma(p, z, kLog0);
  float inner = std::fma(s, std::fma(p, z, half_square), k * kLn2Low);
  float log1p = std::fma(k, kLn2High, f - (half_square - inner));
  return (x > 0.0f ? x : 0.0f) + log1p;
}

template <float (*F)(float)>
void map(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = F(x[i]);
}

// ---- products ------------------------------------------------------------------------------------------------------

void prepare(const float* const* x, int64_t tokens, int64_t cols, int, int64_t block0, int64_t block1, float* dst) {
  for (int64_t t = block0; t < block1 && t < tokens; ++t) {
    float* row = dst + t * padded(cols);
    std::memcpy(row, x[t], size_t(cols) * sizeof(float));
    std::memset(row + cols, 0, size_t(padded(cols) - cols) * sizeof(float));
  }
}

void product(const float* prepared, int64_t tokens, const Matrix* w, int64_t row0, int64_t row1, float* const* out,
             float*) {
  for (int64_t row = row0; row < row1; ++row)
    for (int64_t t = 0; t < tokens; ++t) {
      const float* x = prepared + t * padded(w->cols);
      out[t][row] = dot(w->cols, [&](int64_t i) { return x[i]; }, [&](int64_t i) { return weight(*w, row, i); });
    }
}

int64_t product_scratch(int64_t) { return 0; }

// ---- products with int8 activations --------------------------------------------------------------------------------
// Prepared: for each group 32 integers and half its step, as floats: the plainest layout, not the quickest.

int64_t int8_groups(int64_t cols) { return (cols / 32 + 7) / 8 * 8; }
int64_t int8_floats(int64_t cols) { return int8_groups(cols) * 33; }

void int8_prepare(const float* x, int64_t cols, float* dst) {
  for (int64_t g = 0; g < int8_groups(cols); ++g) {
    float* to = dst + g * 33;
    std::memset(to, 0, 33 * sizeof(float));
    if (g >= cols / 32) continue;
    float amax = 0.0f;
    for (int i = 0; i < 32; ++i) amax = std::fabs(x[g * 32 + i]) > amax ? std::fabs(x[g * 32 + i]) : amax;
    bool finite = true;
    for (int i = 0; i < 32; ++i) finite = finite && (to_bits(x[g * 32 + i]) & 0x7f800000u) != 0x7f800000u;
    if (!finite) {
      to[32] = from_bits(0x7fc00000u);
    } else if (amax >= kInt8Tiny) {
      float inverse = kInt8Steps / amax;
      for (int i = 0; i < 32; ++i) to[i] = (x[g * 32 + i] * inverse + kRoundMagic) - kRoundMagic;
      to[32] = amax / kInt8Steps * 0.5f;
    }
  }
}

void int8_product(const float* prepared, int64_t tokens, const Matrix* w, int64_t row0, int64_t row1,
                  float* const* out) {
  for (int64_t row = row0; row < row1; ++row)
    for (int64_t t = 0; t < tokens; ++t) {
      float lane[kLanes] = {};
      for (int64_t g = 0; g < int8_groups(w->cols); ++g) {
        const float* x = prepared + t * int8_floats(w->cols) + g * 33;
        bool real = g < w->cols / 32;
        float step = real ? x[32] * scale_value(w->scales[row * (w->cols / 32) + g]) : 0.0f;
        for (int p = 0; p < 8; ++p) {
          int sum = 0;
          for (int i = 0; real && i < 4; ++i) {
            int element = p % 4 * 8 + i * 2 + p / 4;
            unsigned char byte = w->data[row * (w->cols / 2) + g * 16 + element / 2];
            sum += int(x[element]) * int(2.0f * kE2m1[element % 2 ? byte >> 4 : byte & 15]);
          }
          float& sum_lane = lane[g % 4 * 8 + p];
          sum_lane = std::fma(float(sum), step, sum_lane);
        }
      }
      out[t][row] = tree(lane);
    }
}

// ---- elementwise ---------------------------------------------------------------------------------------------------

void sigmoid_mul(const float* x, const float* gate, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * sigmoid1(gate[i]);
}

void glu(const float* gate, const float* up, int64_t n, const Activation* act, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    float g = gate[i], u = up[i];
    if (act->kind == 0)
      out[i] = g * sigmoid1(g) * u;
    else
      out[i] = act->beta * tanh1(g / act->beta) * sigmoid1(g) * (act->linear_beta * tanh1(u / act->linear_beta));
  }
}

void widen(int kind, const unsigned char* src, int64_t n, float* out) {
  Matrix row = {kind, src, nullptr, 1, n};
  for (int64_t i = 0; i < n; ++i) out[i] = weight(row, 0, i);
}

int finite(const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if ((to_bits(x[i]) & 0x7f800000u) == 0x7f800000u) return 0;
  return 1;
}

// ---- norms ---------------------------------------------------------------------------------------------------------

void rmsnorm(const float* x, const float* w, int64_t n, float eps, float* out) {
  float inverse = 1.0f / std::sqrt(square_sum(x, n) / float(n) + eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * inverse * w[i];
}

void l2norm(const float* x, int64_t n, float eps, float scale, float* out) {
  float inverse = 1.0f / std::sqrt(square_sum(x, n) + eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * inverse * scale;
}

// ---- KDA -----------------------------------------------------------------------------------------------------------

void short_conv(const float* x, const float* w, float* window, float* out, int64_t tokens, int64_t channels,
                int64_t taps, int64_t c0, int64_t c1) {
  int64_t carried = taps - 1;
  for (int64_t c = c0; c < c1; ++c) {
    // input at time t, where times -carried .. -1 are the window's rows
    auto input = [&](int64_t t) { return t < 0 ? window[(t + carried) * channels + c] : x[t * channels + c]; };
    for (int64_t t = 0; t < tokens; ++t) {
      float sum = 0.0f;
      for (int64_t j = 0; j < taps; ++j) sum = std::fma(w[c * taps + j], input(t - carried + j), sum);
      out[t * channels + c] = sum * sigmoid1(sum);
    }
    for (int64_t j = 0; j < carried; ++j) window[j * channels + c] = input(tokens - carried + j);  // reads run ahead
  }
}

void kda_decay(const float* z, const float* bias, float rate, int bounded, float lower_bound, int64_t n,
               float* alpha) {
  for (int64_t i = 0; i < n; ++i) {
    float y = z[i] + bias[i];
    alpha[i] = exp1(bounded ? lower_bound * sigmoid1(rate * y) : -rate * softplus1(y));
  }
}

void kda_head(const float* q, const float* k, const float* v, const float* alpha, const float* beta, float* state,
              float* out, int64_t tokens, int64_t stride, int64_t heads, int64_t dim, int64_t c0, int64_t c1) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t c = c0; c < c1; ++c) {
      int64_t at = t * stride;
      float held = 0.0f, read = 0.0f;
      for (int64_t i = 0; i < dim; ++i) held = std::fma(alpha[at + i] * state[i * dim + c], k[at + i], held);
      float delta = beta[t * heads] * (v[at + c] - held);
      for (int64_t i = 0; i < dim; ++i) {
        float s = std::fma(k[at + i], delta, alpha[at + i] * state[i * dim + c]);
        state[i * dim + c] = s;
        read = std::fma(s, q[at + i], read);
      }
      out[at + c] = read;
    }
}

// ---- attention -----------------------------------------------------------------------------------------------------

void absorb(const float* q, int64_t n, const Matrix* w, int64_t row0, float* out) {
  for (int64_t r = 0; r < w->cols; ++r) {
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) sum = std::fma(q[i], weight(*w, row0 + i, r), sum);
    out[r] = sum;
  }
}

void attend(const float* q, int64_t heads, const float* cache, int64_t positions, int64_t width, int64_t latent,
            float scale, float* out, float* scores) {
  for (int64_t h = 0; h < heads; ++h, q += width, out += latent) {
    float largest = 0.0f;
    for (int64_t j = 0; j < positions; ++j) {
      const float* row = cache + j * width;
      scores[j] = dot(width, [&](int64_t i) { return q[i]; }, [&](int64_t i) { return row[i]; }) * scale;
      largest = j == 0 || scores[j] > largest ? scores[j] : largest;
    }
    for (int64_t j = 0; j < positions; ++j) scores[j] = exp1(scores[j] - largest);
    float total = plain_sum(scores, positions);
    for (int64_t r = 0; r < latent; ++r) {
      float sum = 0.0f;
      for (int64_t j = 0; j < positions; ++j) sum = std::fma(scores[j], cache[j * width + r], sum);
      out[r] = sum / total;
    }
  }
}

int64_t attend_scratch(int64_t, int64_t positions, int64_t) { return positions; }

void attnres(const float* const* sources, int64_t n, const float* w, int64_t dim, float eps, float* scores,
             float* out) {
  float largest = 0.0f;
  for (int64_t s = 0; s < n; ++s) {
    const float* v = sources[s];
    float inverse = 1.0f / std::sqrt(square_sum(v, dim) / float(dim) + eps);
    scores[s] = dot(dim, [&](int64_t i) { return v[i]; }, [&](int64_t i) { return w[i]; }) * inverse;
    largest = s == 0 || scores[s] > largest ? scores[s] : largest;
  }
  for (int64_t s = 0; s < n; ++s) scores[s] = exp1(scores[s] - largest);
  float total = plain_sum(scores, n);
  for (int64_t s = 0; s < n; ++s) scores[s] = scores[s] / total;
  for (int64_t i = 0; i < dim; ++i) {
    float sum = 0.0f;
    for (int64_t s = 0; s < n; ++s) sum = std::fma(scores[s], sources[s][i], sum);
    out[i] = sum;
  }
}

void combine(const float* rows, int64_t stride, const float* weights, int64_t count, int64_t n, float* out) {
  for (int64_t d = 0; d < n; ++d) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) sum = std::fma(weights[i], rows[i * stride + d], sum);
    out[d] = sum;
  }
}

constexpr Ops kOps = {
    "scalar",   1,     prepare,  product,   product_scratch, int8_floats, int8_prepare, int8_product, map<exp1>, map<sigmoid1>, map<tanh1>, map<softplus1>,
    sigmoid_mul, glu,  widen,    finite,    rmsnorm,         l2norm,    short_conv,    kda_decay,  kda_head,
    absorb,     attend, attend_scratch, attnres, combine,
};

}  // namespace

const Ops* scalar_ops() { return &kOps; }

}  // namespace sluice
