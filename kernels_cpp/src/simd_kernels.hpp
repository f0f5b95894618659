// The vector kernels, written once over a register type V of kWidth floats and included by each instruction-set unit
// after it has defined V and its primitives. Everything lives in an anonymous namespace: no weak symbol may leave a
// unit. 32 lanes are kSlices registers; slice s holds lanes s*kWidth ...
//
// An including unit defines: SLUICE_TOKEN_BLOCK, SLUICE_MX_ROWS, V, kWidth, kSlices, and
//   load store load_n store_n set1 zero add sub mul div fma fnma min max sqrt
//   and_bits or_bits less(a, b) -> M, pick(M, yes, no), pow2(V integral) (2^n for n in [-127, 127]), half_floor
//   reduce(const V[kSlices]) (the tree), widen_bf16(p), widen_f16(p), has_nonfinite(V)
//   mx_decode(p16, scale byte, V[kSlices]), mx_arrange(V[kSlices]) (x in mx_decode's order), mx_reduce(const V[kSlices])
//   kInt8Tokens, kInt8Groups (in a register), Bytes int8_decode(p), V int8_add(Bytes, x, corrections, steps, V)

namespace sluice {
namespace {

constexpr int kLanes = 32;
constexpr int64_t kTokenBlock = SLUICE_TOKEN_BLOCK;
// A tile is kTileRows rows by one token block of sums held in registers: 3 x 4 and its operands are 16 registers of
// AVX2. A panel is kTileRows decoded rows of kPanelGroups groups of 32 columns, K3's hidden size: sums stay in registers
// for the whole length of it. It fits L2, and long runs through it beat short ones that fit L1 (docs/performance.md).
constexpr int kTileRows = 3;
constexpr int64_t kPanelGroups = 224;

inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- transcendental functions: the scalar unit's operations in the scalar unit's order ---------------------------

inline V exp_v(V x) {
  x = min(set1(kExpHigh), x);  // operand order: a NaN in x passes through both
  x = max(set1(kExpLow), x);
  V n = sub(fma(x, set1(kLog2e), set1(kRoundMagic)), set1(kRoundMagic));
  V high = fnma(n, set1(kLn2High), x), low = mul(n, set1(kLn2Low));
  V r = sub(high, low), lost = sub(sub(high, r), low);
  V p = fma(set1(kExp4), r, set1(kExp3));
  p = fma(p, r, set1(kExp2));
  p = fma(p, r, set1(kExp1));
  p = fma(p, r, set1(kExp0));
  V y = add(add(fma(p, mul(r, r), lost), r), set1(1.0f));
  V half = half_floor(n);
  return mul(mul(y, pow2(half)), pow2(sub(n, half)));
}

inline V minus_abs(V x) { return or_bits(x, set1(-0.0f)); }
inline V abs_v(V x) { return andnot_bits(set1(-0.0f), x); }

inline V sigmoid_v(V x) {
  V e = exp_v(minus_abs(x));
  M negative = less(x, zero());
  V above = pick(negative, e, set1(1.0f));
  V below = add(set1(1.0f), e), lost = sub(e, sub(below, set1(1.0f)));
  V y = div(above, below);
  V rest = fnma(y, lost, fnma(y, below, above));
  return fma(rest, pick(negative, sub(set1(1.0f), y), y), y);
}

inline V tanh_v(V x) {
  V a = abs_v(x), z = mul(x, x);
  V p = fma(set1(kTanh5), z, set1(kTanh4));
  p = fma(p, z, set1(kTanh3));
  p = fma(p, z, set1(kTanh2));
  p = fma(p, z, set1(kTanh1));
  p = fma(p, z, set1(kTanh0));
  V small = fma(mul(x, z), p, x);
  V large = sub(set1(1.0f), div(set1(2.0f), add(exp_v(add(a, a)), set1(1.0f))));
  return pick(less(a, set1(kTanhSmall)), small, or_bits(large, and_bits(x, set1(-0.0f))));
}

inline V softplus_v(V x) {
  V e = exp_v(minus_abs(x));
  M lower = less(e, set1(0.5f));
  V f = pick(lower, e, mul(sub(e, set1(1.0f)), set1(0.5f)));
  V k = pick(lower, zero(), set1(1.0f));
  V s = div(f, add(set1(2.0f), f)), z = mul(s, s), half_square = mul(mul(f, f), set1(0.5f));
  V p = fma(set1(kLog3), z, set1(kLog2));
  p = fma(p, z, set1(kLog1));
  p = fma(p, z, set1(kLog0));
  V inner = fma(s, fma(p, z, half_square), mul(k, set1(kLn2Low)));
  V log1p = fma(k, set1(kLn2High), sub(f, sub(half_square, inner)));
  V positive = pick(less(zero(), x), x, zero());
  return pick(less(set1(kSoftplusLinear), x), x, add(positive, log1p));
}

template <class F>
inline void map(const float* x, int64_t n, float* out, F f) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, f(load(x + i)));
  if (i < n) store_n(out + i, f(load_n(x + i, n - i)), n - i);
}

template <class F>
inline void map2(const float* x, const float* y, int64_t n, float* out, F f) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, f(load(x + i), load(y + i)));
  if (i < n) store_n(out + i, f(load_n(x + i, n - i), load_n(y + i, n - i)), n - i);
}

void exp_n(const float* x, int64_t n, float* out) {
  map(x, n, out, [](V v) { return exp_v(v); });
}
void sigmoid_n(const float* x, int64_t n, float* out) {
  map(x, n, out, [](V v) { return sigmoid_v(v); });
}
void tanh_n(const float* x, int64_t n, float* out) {
  map(x, n, out, [](V v) { return tanh_v(v); });
}
void softplus_n(const float* x, int64_t n, float* out) {
  map(x, n, out, [](V v) { return softplus_v(v); });
}

void sigmoid_mul(const float* x, const float* gate, int64_t n, float* out) {
  map2(x, gate, n, out, [](V a, V g) { return mul(a, sigmoid_v(g)); });
}

void glu(const float* gate, const float* up, int64_t n, const Activation* act, float* out) {
  if (act->kind == 0) {
    map2(gate, up, n, out, [](V g, V u) { return mul(mul(g, sigmoid_v(g)), u); });
  } else {
    V beta = set1(act->beta), linear = set1(act->linear_beta);
    map2(gate, up, n, out, [=](V g, V u) {
      V left = mul(mul(beta, tanh_v(div(g, beta))), sigmoid_v(g));
      return mul(left, mul(linear, tanh_v(div(u, linear))));
    });
  }
}

int finite(const float* x, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth)
    if (has_nonfinite(load(x + i))) return 0;
  return i == n || !has_nonfinite(load_n(x + i, n - i));
}

// ---- sums ----------------------------------------------------------------------------------------------------------

struct Lanes {
  V v[kSlices];
  void clear() {
    for (int s = 0; s < kSlices; ++s) v[s] = zero();
  }
  float sum() const { return reduce(v); }
};

// slice s of the group of 32 at x, of which `left` floats exist
inline V part(const float* x, int s, int64_t left) {
  int64_t n = left - s * kWidth;
  return n >= kWidth ? load(x + s * kWidth) : n > 0 ? load_n(x + s * kWidth, n) : zero();
}

inline float square_sum(const float* x, int64_t n) {
  Lanes lanes;
  lanes.clear();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int s = 0; s < kSlices; ++s) {
      V a = load(x + i + s * kWidth);
      lanes.v[s] = fma(a, a, lanes.v[s]);
    }
  if (i < n)
    for (int s = 0; s < kSlices; ++s) {
      V a = part(x + i, s, n - i);
      lanes.v[s] = fma(a, a, lanes.v[s]);
    }
  return lanes.sum();
}

inline float dot(const float* x, const float* y, int64_t n) {
  Lanes lanes;
  lanes.clear();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int s = 0; s < kSlices; ++s) lanes.v[s] = fma(load(x + i + s * kWidth), load(y + i + s * kWidth), lanes.v[s]);
  if (i < n)
    for (int s = 0; s < kSlices; ++s) lanes.v[s] = fma(part(x + i, s, n - i), part(y + i, s, n - i), lanes.v[s]);
  return lanes.sum();
}

inline float plain_sum(const float* x, int64_t n) {
  Lanes lanes;
  lanes.clear();
  for (int64_t i = 0; i < n; i += kLanes)
    for (int s = 0; s < kSlices; ++s) lanes.v[s] = add(lanes.v[s], part(x + i, s, n - i));
  return lanes.sum();
}

inline float root(float x) { return first(sqrt(set1(x))); }

void scale_twice(const float* x, int64_t n, float a, V b, float* out) {
  V va = set1(a);
  map(x, n, out, [=](V v) { return mul(mul(v, va), b); });
}

void rmsnorm(const float* x, const float* w, int64_t n, float eps, float* out) {
  V inverse = set1(1.0f / root(square_sum(x, n) / float(n) + eps));
  map2(x, w, n, out, [=](V v, V g) { return mul(mul(v, inverse), g); });
}

void l2norm(const float* x, int64_t n, float eps, float scale, float* out) {
  scale_twice(x, n, 1.0f / root(square_sum(x, n) + eps), set1(scale), out);
}

// ---- weights -------------------------------------------------------------------------------------------------------

inline void copy_bytes(void* to, const void* from, int64_t n) { __builtin_memcpy(to, from, size_t(n)); }

struct Float32 {
  static constexpr int kBytes = 4;
  static V widen(const unsigned char* p) { return load(reinterpret_cast<const float*>(p)); }
};
struct Bfloat16 {
  static constexpr int kBytes = 2;
  static V widen(const unsigned char* p) { return widen_bf16(p); }
};
struct Float16 {
  static constexpr int kBytes = 2;
  static V widen(const unsigned char* p) { return widen_f16(p); }
};

// One row read in groups of 32, kLineGroups of which fill a cache line; kRows of them are multiplied side by side for one
// token, and kAhead is how far ahead of use their lines are asked for (measured: docs/performance.md). A plain row's
// last group may be short: it is copied beside zeros, never read past.
template <class W>
struct PlainRow {
  const unsigned char* p;
  int64_t cols;
  PlainRow(const Matrix& w, int64_t row) : p(w.data + row * w.cols * W::kBytes), cols(w.cols) {}
  void group(int64_t g, V out[kSlices]) const {
    for (int s = 0; s < kSlices; ++s) out[s] = W::widen(p + (g * kLanes + s * kWidth) * W::kBytes);
  }
  void tail(int64_t g, V out[kSlices]) const {
    alignas(64) unsigned char last[kLanes * W::kBytes] = {};
    copy_bytes(last, p + g * kLanes * W::kBytes, (cols - g * kLanes) * W::kBytes);
    for (int s = 0; s < kSlices; ++s) out[s] = W::widen(last + s * kWidth * W::kBytes);
  }
  static constexpr int64_t kLineGroups = 1, kRows = 2, kAhead = 1024;
  void prefetch(int64_t g) const { __builtin_prefetch(p + g * kLanes * W::kBytes + kAhead); }
  static float sum(const V v[kSlices]) { return reduce(v); }
};

struct MxRow {
  const unsigned char *p, *scales;
  MxRow(const Matrix& w, int64_t row) : p(w.data + row * (w.cols / 2)), scales(w.scales + row * (w.cols / 32)) {}
  void group(int64_t g, V out[kSlices]) const {
    mx_decode(p + g * 16, scales[g], out);
  }
  void tail(int64_t, V[kSlices]) const {}
  static constexpr int64_t kLineGroups = 4, kRows = SLUICE_MX_ROWS, kAhead = 4096;
  void prefetch(int64_t g) const { __builtin_prefetch(p + g * 16 + kAhead); }
  static float sum(const V v[kSlices]) { return mx_reduce(v); }
};

void widen_any(int kind, const unsigned char* src, int64_t n, float* out) {
  Matrix m = {kind, src, nullptr, 1, n};
  V v[kSlices];
  auto run = [&](auto row) {
    int64_t g = 0;
    for (; (g + 1) * kLanes <= n; ++g) {
      row.group(g, v);
      for (int s = 0; s < kSlices; ++s) store(out + g * kLanes + s * kWidth, v[s]);
    }
    if (g * kLanes < n) {
      alignas(64) float last[kLanes];
      row.tail(g, v);
      for (int s = 0; s < kSlices; ++s) store(last + s * kWidth, v[s]);
      copy_bytes(out + g * kLanes, last, (n - g * kLanes) * 4);
    }
  };
  if (kind == kFloat32) run(PlainRow<Float32>(m, 0));
  else if (kind == kBfloat16) run(PlainRow<Bfloat16>(m, 0));
  else run(PlainRow<Float16>(m, 0));
}

// ---- products ------------------------------------------------------------------------------------------------------
// Up to kDirectTokens tokens go straight from decoded registers into their sums, kDirectBlock of them for each decoding
// (3 sets of sums spill on AVX2 and lost to 2 + 1); prepared x is then plain rows. More tokens share a panel of decoded
// weights; prepared x is then blocks of nearly equal size (at most kTokenBlock, never one), each laid out
// [slice][group][token][kWidth] so that the inner loop walks through it.

constexpr int64_t kDirectTokens = 4, kDirectBlock = SLUICE_TOKEN_BLOCK / 2;

struct Block {
  int64_t start, count;
  Block(int64_t tokens, int64_t b) {
    int64_t blocks = (tokens + kTokenBlock - 1) / kTokenBlock, base = tokens / blocks, extra = tokens % blocks;
    start = b * base + least(b, extra);
    count = base + (b < extra ? 1 : 0);
  }
};

void prepare(const float* const* x, int64_t tokens, int64_t cols, int kind, int64_t block0, int64_t block1,
             float* dst) {
  int64_t groups = padded(cols) / kLanes;
  for (int64_t b = block0; b < block1 && b * kTokenBlock < tokens; ++b) {
    Block block(tokens, b);
    float* to = dst + block.start * padded(cols);
    for (int64_t t = 0; t < block.count; ++t) {
      const float* row = x[block.start + t];
      for (int64_t g = 0; g < groups; ++g) {
        V v[kSlices];
        for (int s = 0; s < kSlices; ++s) v[s] = part(row + g * kLanes, s, cols - g * kLanes);
        if (kind == kMxfp4) mx_arrange(v);
        for (int s = 0; s < kSlices; ++s)
          store(tokens <= kDirectTokens ? to + (t * groups + g) * kLanes + s * kWidth
                                        : to + ((s * groups + g) * block.count + t) * kWidth,
                v[s]);
      }
    }
  }
}

template <int ROWS, int T, class R>
inline void direct(const float* x, const Matrix& w, int64_t row, float* const* out) {
  const R r[2] = {R(w, row), R(w, row + ROWS - 1)};
  V acc[ROWS][T][kSlices];
  for (int i = 0; i < ROWS; ++i)
    for (int t = 0; t < T; ++t)
      for (int s = 0; s < kSlices; ++s) acc[i][t][s] = zero();
  int64_t whole = w.cols / kLanes, stride = padded(w.cols);
  auto add_group = [&](const V v[kSlices], int i, int64_t g) {
    for (int s = 0; s < kSlices; ++s)
      for (int t = 0; t < T; ++t)
        acc[i][t][s] = fma(load(x + t * stride + g * kLanes + s * kWidth), v[s], acc[i][t][s]);
  };
  int64_t g = 0;
  for (; g + R::kLineGroups <= whole; g += R::kLineGroups)
    for (int i = 0; i < ROWS; ++i) {
      r[i].prefetch(g);
      for (int j = 0; j < R::kLineGroups; ++j) {
        V v[kSlices];
        r[i].group(g + j, v);
        add_group(v, i, g + j);
      }
    }
  for (; g < whole; ++g)
    for (int i = 0; i < ROWS; ++i) {
      V v[kSlices];
      r[i].group(g, v);
      add_group(v, i, g);
    }
  if (whole * kLanes < w.cols)
    for (int i = 0; i < ROWS; ++i) {
      V v[kSlices];
      r[i].tail(whole, v);
      add_group(v, i, whole);
    }
  for (int i = 0; i < ROWS; ++i)
    for (int t = 0; t < T; ++t) out[t][row + i] = R::sum(acc[i][t]);
}

// acc[slice][row][token] += panel x block over `groups` groups. panel: [slice][group][row of the triple][kWidth].
template <int T>
inline void tile(const float* panel, const float* x, int64_t x_slice, int64_t groups, float* acc) {
  for (int s = 0; s < kSlices; ++s) {
    V a[kTileRows][T];
    float* at = acc + s * kTileRows * T * kWidth;
    for (int i = 0; i < kTileRows; ++i)
      for (int t = 0; t < T; ++t) a[i][t] = load(at + (i * T + t) * kWidth);
    const float* pw = panel + s * kPanelGroups * kTileRows * kWidth;
    const float* px = x + s * x_slice;
    for (int64_t g = 0; g < groups; ++g) {
      V v[kTileRows];
      for (int i = 0; i < kTileRows; ++i) v[i] = load(pw + (g * kTileRows + i) * kWidth);
      for (int t = 0; t < T; ++t) {
        V xt = load(px + (g * T + t) * kWidth);
        for (int i = 0; i < kTileRows; ++i) a[i][t] = fma(xt, v[i], a[i][t]);
      }
    }
    for (int i = 0; i < kTileRows; ++i)
      for (int t = 0; t < T; ++t) store(at + (i * T + t) * kWidth, a[i][t]);
  }
}

inline void tile_of(int64_t tokens, const float* panel, const float* x, int64_t x_slice, int64_t groups, float* acc) {
  switch (tokens) {
    case 2: return tile<2>(panel, x, x_slice, groups, acc);
    case 3: return tile<3>(panel, x, x_slice, groups, acc);
    case 4: return tile<4>(panel, x, x_slice, groups, acc);
#if SLUICE_TOKEN_BLOCK > 4
    case 5: return tile<5>(panel, x, x_slice, groups, acc);
    case 6: return tile<6>(panel, x, x_slice, groups, acc);
    case 7: return tile<7>(panel, x, x_slice, groups, acc);
    case 8: return tile<8>(panel, x, x_slice, groups, acc);
#endif
  }
}

constexpr int64_t kPanel = kLanes * kPanelGroups * kTileRows;

template <class R>
inline void gemm(const float* x, int64_t tokens, const Matrix& w, int64_t row, int rows, float* const* out,
                 float* scratch) {
  int64_t groups = padded(w.cols) / kLanes, whole = w.cols / kLanes;
  int64_t blocks = (tokens + kTokenBlock - 1) / kTokenBlock;
  float* panel = scratch;
  float* acc = scratch + kPanel;
  for (int64_t i = 0; i < tokens * kTileRows * kLanes; i += kWidth) store(acc + i, zero());
  for (int64_t g0 = 0; g0 < groups; g0 += kPanelGroups) {
    int64_t n = least(kPanelGroups, groups - g0);
    for (int i = 0; i < kTileRows; ++i) {
      R r(w, row + (i < rows ? i : rows - 1));  // a missing row repeats the last; its sums are dropped
      float* to = panel + i * kWidth;
      for (int64_t g = 0; g < n; ++g) {
        V v[kSlices];
        if (g % R::kLineGroups == 0) r.prefetch(g0 + g);
        if (g0 + g < whole) r.group(g0 + g, v);
        else r.tail(g0 + g, v);
        for (int s = 0; s < kSlices; ++s) store(to + (s * kPanelGroups + g) * kTileRows * kWidth, v[s]);
      }
    }
    for (int64_t b = 0; b < blocks; ++b) {
      Block block(tokens, b);
      tile_of(block.count, panel, x + block.start * groups * kLanes + g0 * block.count * kWidth,
              groups * block.count * kWidth, n, acc + block.start * kTileRows * kLanes);
    }
  }
  for (int64_t b = 0; b < blocks; ++b) {
    Block block(tokens, b);
    const float* a = acc + block.start * kTileRows * kLanes;
    for (int i = 0; i < rows; ++i)
      for (int64_t t = 0; t < block.count; ++t) {
        V v[kSlices];
        for (int s = 0; s < kSlices; ++s) v[s] = load(a + ((s * kTileRows + i) * block.count + t) * kWidth);
        out[block.start + t][row + i] = R::sum(v);
      }
  }
}

template <class R>
inline void direct_block(const float* x, int64_t tokens, const Matrix& w, int64_t row, float* const* out) {
  switch (tokens) {
    case 2: return direct<1, 2, R>(x, w, row, out);
#if SLUICE_TOKEN_BLOCK > 4
    case 3: return direct<1, 3, R>(x, w, row, out);
    case 4: return direct<1, 4, R>(x, w, row, out);
#endif
  }
}

template <class R>
void product_of(const float* x, int64_t tokens, const Matrix& w, int64_t row0, int64_t row1, float* const* out,
                float* scratch) {
  if (tokens > kDirectTokens) {
    for (int64_t row = row0; row < row1; row += kTileRows)
      gemm<R>(x, tokens, w, row, int(least(kTileRows, row1 - row)), out, scratch);
    return;
  }
  int64_t lone = tokens % kDirectBlock == 1 ? tokens - 1 : tokens;  // one token alone may take several rows at a time
  for (int64_t row = row0; row < row1; row += R::kRows) {
    int64_t rows = least(R::kRows, row1 - row);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t t = 0; t < lone; t += kDirectBlock)
        direct_block<R>(x + t * padded(w.cols), least(kDirectBlock, lone - t), w, row + i, out + t);
    if (lone == tokens) continue;
    const float* last = x + lone * padded(w.cols);
    if (rows == R::kRows) direct<R::kRows, 1, R>(last, w, row, out + lone);
    else direct<1, 1, R>(last, w, row, out + lone);
  }
}

void product(const float* x, int64_t tokens, const Matrix* w, int64_t row0, int64_t row1, float* const* out,
             float* scratch) {
  switch (w->kind) {
    case kFloat32: return product_of<PlainRow<Float32>>(x, tokens, *w, row0, row1, out, scratch);
    case kBfloat16: return product_of<PlainRow<Bfloat16>>(x, tokens, *w, row0, row1, out, scratch);
    case kFloat16: return product_of<PlainRow<Float16>>(x, tokens, *w, row0, row1, out, scratch);
    default: return product_of<MxRow>(x, tokens, *w, row0, row1, out, scratch);
  }
}

int64_t product_scratch(int64_t tokens) { return kPanel + tokens * kTileRows * kLanes; }

// ---- products with int8 activations --------------------------------------------------------------------------------
// Prepared, for one token: per group 32 bytes (even elements, then odd ones), per group 8 corrections, per group half
// its step. The unit multiplies unsigned 2 e2m1 + 12 by signed bytes; the correction, -12 times the sum of the four
// bytes a lane takes, makes it exact again. Groups are padded to a multiple of 8.

inline int64_t int8_groups(int64_t cols) { return (cols / 32 + 7) / 8 * 8; }
int64_t int8_floats(int64_t cols) { return int8_groups(cols) * 17; }

struct Int8 {
  const signed char* bytes;
  const int32_t* corrections;
  const float* steps;
  Int8() = default;
  Int8(const float* p, int64_t groups)
      : bytes(reinterpret_cast<const signed char*>(p)),
        corrections(reinterpret_cast<const int32_t*>(p + groups * 8)),
        steps(p + groups * 16) {}
  void advance() { bytes += 256, corrections += 64, steps += 8; }  // by eight groups
};

void int8_prepare(const float* x, int64_t cols, float* dst) {
  int64_t groups = int8_groups(cols);
  signed char* bytes = reinterpret_cast<signed char*>(dst);
  int32_t* corrections = reinterpret_cast<int32_t*>(dst + groups * 8);
  float* steps = dst + groups * 16;
  for (int64_t g = 0; g < groups; ++g) {
    float rounded[32] = {};
    steps[g] = 0.0f;
    if (g < cols / 32) {
      V v[kSlices], top = zero();
      bool bad = false;
      for (int s = 0; s < kSlices; ++s) {
        v[s] = load(x + g * 32 + s * kWidth);
        bad = bad || has_nonfinite(v[s]);
        top = max(abs_v(v[s]), top);
      }
      float each[kWidth], amax = 0.0f;
      store(each, top);
      for (int i = 0; i < kWidth; ++i) amax = each[i] > amax ? each[i] : amax;
      if (bad) {
        steps[g] = __builtin_nanf("");
      } else if (amax >= kInt8Tiny) {
        V inverse = set1(kInt8Steps / amax), magic = set1(kRoundMagic);
        for (int s = 0; s < kSlices; ++s)
          store(rounded + s * kWidth, sub(add(mul(v[s], inverse), magic), magic));
        steps[g] = amax / kInt8Steps * 0.5f;
      }
    }
    for (int i = 0; i < 16; ++i) {
      bytes[g * 32 + i] = static_cast<signed char>(rounded[2 * i]);
      bytes[g * 32 + 16 + i] = static_cast<signed char>(rounded[2 * i + 1]);
    }
    for (int p = 0; p < 8; ++p) {
      int sum = 0;
      for (int i = 0; i < 4; ++i) sum += bytes[g * 32 + 4 * p + i];
      corrections[g * 8 + p] = -12 * sum;
    }
  }
}

// 2^(scale-127) of eight groups; 0 is subnormal, and a padded group's step is zero whatever stands here.
inline __m256 int8_scales(const unsigned char* scales) {
  __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales))), 23);
  return _mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(0x00400000)));
}

// Adds eight groups from the packed bytes at p to the lanes of T tokens; x: each token's prepared groups from here on.
template <int T>
inline void int8_eight(const unsigned char* p, const unsigned char* scales, const Int8* x, Lanes* acc) {
  alignas(32) float steps[T][8];
  __m256 scale = int8_scales(scales);
  for (int t = 0; t < T; ++t) _mm256_store_ps(steps[t], _mm256_mul_ps(_mm256_loadu_ps(x[t].steps), scale));
  constexpr int kAtOnce = T == 1 ? kSlices : 1;  // decoded ahead of use: quicker, as long as registers suffice
  for (int h = 0; h < 8; h += kInt8Groups * kAtOnce) {
    Bytes weights[kAtOnce];
    for (int i = 0; i < kAtOnce; ++i) weights[i] = int8_decode(p + (h + i * kInt8Groups) * 16);
    for (int i = 0; i < kAtOnce; ++i)
      for (int t = 0; t < T; ++t) {
        int at = h + i * kInt8Groups;
        V& lanes = acc[t].v[at / kInt8Groups % kSlices];
        lanes = int8_add(weights[i], x[t].bytes + at * 32, x[t].corrections + at * 8, steps[t] + at, lanes);
      }
  }
}

template <int T>
inline void int8_row(const float* prepared, const Matrix& w, int64_t row, float* const* out) {
  int64_t groups = w.cols / 32, stride = int8_floats(w.cols);
  const unsigned char *p = w.data + row * (w.cols / 2), *scales = w.scales + row * groups;
  Int8 x[T] = {};
  Lanes acc[T];
  for (int t = 0; t < T; ++t) {
    x[t] = Int8(prepared + t * stride, int8_groups(w.cols));
    acc[t].clear();
  }
  int64_t g = 0;
  for (; g + 8 <= groups; g += 8) {
    __builtin_prefetch(p + g * 16 + MxRow::kAhead);
    __builtin_prefetch(p + g * 16 + MxRow::kAhead + 64);
    int8_eight<T>(p + g * 16, scales + g, x, acc);
    for (int t = 0; t < T; ++t) x[t].advance();
  }
  if (g < groups) {  // the last groups are copied beside zeros, never read past
    unsigned char bytes[128] = {}, last[8] = {};
    copy_bytes(bytes, p + g * 16, (groups - g) * 16);
    copy_bytes(last, scales + g, groups - g);
    int8_eight<T>(bytes, last, x, acc);
  }
  for (int t = 0; t < T; ++t) out[t][row] = acc[t].sum();
}

void int8_product(const float* prepared, int64_t tokens, const Matrix* w, int64_t row0, int64_t row1,
                  float* const* out) {
  int64_t stride = int8_floats(w->cols);
  for (int64_t row = row0; row < row1; ++row) {
    int64_t t = 0;
    for (; t + kInt8Tokens <= tokens; t += kInt8Tokens) int8_row<kInt8Tokens>(prepared + t * stride, *w, row, out + t);
    for (; t < tokens; ++t) int8_row<1>(prepared + t * stride, *w, row, out + t);
  }
}

// ---- KDA -----------------------------------------------------------------------------------------------------------

void short_conv(const float* x, const float* w, float* window, float* out, int64_t tokens, int64_t channels,
                int64_t taps, int64_t c0, int64_t c1) {
  int64_t carried = taps - 1;
  for (int64_t c = c0; c < c1; c += kWidth) {
    int64_t n = least(kWidth, c1 - c);
    auto input = [&](int64_t t) {
      return load_n(t < 0 ? window + (t + carried) * channels + c : x + t * channels + c, n);
    };
    auto tap = [&](int64_t j) {
      alignas(64) float column[kWidth] = {};
      for (int64_t i = 0; i < n; ++i) column[i] = w[(c + i) * taps + j];
      return load(column);
    };
    if (taps == 4) {  // the model's own width keeps its taps and inputs in registers
      V w0 = tap(0), w1 = tap(1), w2 = tap(2), w3 = tap(3);
      V y0 = input(-3), y1 = input(-2), y2 = input(-1);
      for (int64_t t = 0; t < tokens; ++t) {
        V y3 = input(t);
        V sum = fma(w3, y3, fma(w2, y2, fma(w1, y1, fma(w0, y0, zero()))));
        store_n(out + t * channels + c, mul(sum, sigmoid_v(sum)), n);
        y0 = y1, y1 = y2, y2 = y3;
      }
    } else {
      for (int64_t t = 0; t < tokens; ++t) {
        V sum = zero();
        for (int64_t j = 0; j < taps; ++j) sum = fma(tap(j), input(t - carried + j), sum);
        store_n(out + t * channels + c, mul(sum, sigmoid_v(sum)), n);
      }
    }
    for (int64_t j = 0; j < carried; ++j) store_n(window + j * channels + c, input(tokens - carried + j), n);
  }
}

void kda_decay(const float* z, const float* bias, float rate, int bounded, float lower_bound, int64_t n,
               float* alpha) {
  V low = set1(lower_bound);
  if (bounded) {
    V r = set1(rate);
    map2(z, bias, n, alpha, [=](V a, V b) { return exp_v(mul(low, sigmoid_v(mul(r, add(a, b))))); });
  } else {
    V r = set1(-rate);
    map2(z, bias, n, alpha, [=](V a, V b) { return exp_v(mul(r, softplus_v(add(a, b)))); });
  }
}

// REGS registers of value columns at a time: each column's sums run over the key index in order, so columns are
// independent and REGS chains hide the latency of the multiply-add.
template <int REGS>
inline void kda_columns(const float* q, const float* k, const float* v, const float* alpha, const float* beta,
                        float* state, float* out, int64_t tokens, int64_t stride, int64_t heads, int64_t dim,
                        int64_t c, int64_t n) {
  auto get = [&](const float* p, int r) { return REGS > 1 ? load(p + r * kWidth) : load_n(p, n); };
  auto put = [&](float* p, int r, V value) {
    if (REGS > 1) store(p + r * kWidth, value);
    else store_n(p, value, n);
  };
  for (int64_t t = 0; t < tokens; ++t) {
    int64_t at = t * stride;
    V held[REGS], delta[REGS], read[REGS];
    for (int r = 0; r < REGS; ++r) held[r] = zero(), read[r] = zero();
    for (int64_t i = 0; i < dim; ++i) {
      V a = set1(alpha[at + i]), ki = set1(k[at + i]);
      for (int r = 0; r < REGS; ++r) held[r] = fma(mul(a, get(state + i * dim + c, r)), ki, held[r]);
    }
    V b = set1(beta[t * heads]);
    for (int r = 0; r < REGS; ++r) delta[r] = mul(b, sub(get(v + at + c, r), held[r]));
    for (int64_t i = 0; i < dim; ++i) {
      V a = set1(alpha[at + i]), ki = set1(k[at + i]), qi = set1(q[at + i]);
      for (int r = 0; r < REGS; ++r) {
        float* cell = state + i * dim + c;
        V s = fma(ki, delta[r], mul(a, get(cell, r)));
        put(cell, r, s);
        read[r] = fma(s, qi, read[r]);
      }
    }
    for (int r = 0; r < REGS; ++r) put(out + at + c, r, read[r]);
  }
}

void kda_head(const float* q, const float* k, const float* v, const float* alpha, const float* beta, float* state,
              float* out, int64_t tokens, int64_t stride, int64_t heads, int64_t dim, int64_t c0, int64_t c1) {
  constexpr int kMany = 4;
  int64_t c = c0;
  for (; c + kMany * kWidth <= c1; c += kMany * kWidth)
    kda_columns<kMany>(q, k, v, alpha, beta, state, out, tokens, stride, heads, dim, c, kWidth);
  for (; c < c1; c += kWidth)
    kda_columns<1>(q, k, v, alpha, beta, state, out, tokens, stride, heads, dim, c, least(kWidth, c1 - c));
}

// ---- attention -----------------------------------------------------------------------------------------------------

// out[c] = sum over i ascending of coefficient(i) * row(i)[c], for c in [0, n): each column is its own chain.
template <int REGS, class C, class R>
inline void columns(int64_t count, int64_t c, int64_t n, C coefficient, R row, float* out, V divisor) {
  V sum[REGS];
  for (int r = 0; r < REGS; ++r) sum[r] = zero();
  for (int64_t i = 0; i < count; ++i) {
    V a = set1(coefficient(i));
    for (int r = 0; r < REGS; ++r) sum[r] = fma(a, row(i, c + r * kWidth, n), sum[r]);
  }
  for (int r = 0; r < REGS; ++r) store_n(out + c + r * kWidth, div(sum[r], divisor), n);
}

template <class C, class R>
inline void mix(int64_t count, int64_t n, C coefficient, R row, float* out, V divisor) {
  constexpr int kMany = 8;
  int64_t c = 0;
  for (; c + kMany * kWidth <= n; c += kMany * kWidth)
    columns<kMany>(count, c, kWidth, coefficient, row, out, divisor);
  for (; c < n; c += kWidth) columns<1>(count, c, least(kWidth, n - c), coefficient, row, out, divisor);
}

template <class W>
inline V widen_part(const unsigned char* p, int64_t n) {
  if (n == kWidth) return W::widen(p);
  alignas(64) unsigned char last[kWidth * W::kBytes] = {};
  copy_bytes(last, p, n * W::kBytes);
  return W::widen(last);
}

// Row by row, as the weights lie in memory; four rows share one trip of the sums, which stay in L1.
template <class W>
inline void absorb_of(const float* q, int64_t n, const Matrix& w, int64_t row0, float* out) {
  constexpr int kRows = 4;
  for (int64_t c = 0; c < w.cols; ++c) out[c] = 0.0f;
  for (int64_t i = 0; i < n; i += kRows) {
    int rows = int(least(kRows, n - i));
    const unsigned char* p = w.data + (row0 + i) * w.cols * W::kBytes;
    V factor[kRows];
    for (int r = 0; r < kRows; ++r) factor[r] = set1(r < rows ? q[i + r] : 0.0f);
    for (int64_t c = 0; c < w.cols; c += kWidth) {
      int64_t m = least(kWidth, w.cols - c);
      V sum = load_n(out + c, m);
      for (int r = 0; r < rows; ++r) sum = fma(factor[r], widen_part<W>(p + (r * w.cols + c) * W::kBytes, m), sum);
      store_n(out + c, sum, m);
    }
  }
}

void absorb(const float* q, int64_t n, const Matrix* w, int64_t row0, float* out) {
  if (w->kind == kFloat32) absorb_of<Float32>(q, n, *w, row0, out);
  else if (w->kind == kBfloat16) absorb_of<Bfloat16>(q, n, *w, row0, out);
  else absorb_of<Float16>(q, n, *w, row0, out);
}

inline float largest_of(const float* x, int64_t n) {
  float m = x[0];
  for (int64_t i = 1; i < n; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

// scores become exp(score - largest); returns their sum
inline float soften(float* scores, int64_t n) {
  V m = set1(largest_of(scores, n));
  map(scores, n, scores, [=](V v) { return exp_v(sub(v, m)); });
  return plain_sum(scores, n);
}

// sums[head][column] += score[head][position] * cache[position][column] for a tile of HEADS x REGS registers.
template <int HEADS, int REGS>
inline void weigh_tile(const float* scores, int64_t score_stride, const float* cache, int64_t width, int64_t count,
                       float* sums, int64_t sum_stride, int64_t n) {
  V a[HEADS][REGS];
  auto get = [&](const float* p) { return REGS > 1 ? load(p) : load_n(p, n); };
  for (int h = 0; h < HEADS; ++h)
    for (int r = 0; r < REGS; ++r) a[h][r] = get(sums + h * sum_stride + r * kWidth);
  for (int64_t j = 0; j < count; ++j) {
    V c[REGS];
    for (int r = 0; r < REGS; ++r) c[r] = get(cache + j * width + r * kWidth);
    for (int h = 0; h < HEADS; ++h) {
      V p = set1(scores[h * score_stride + j]);
      for (int r = 0; r < REGS; ++r) a[h][r] = fma(p, c[r], a[h][r]);
    }
  }
  for (int h = 0; h < HEADS; ++h)
    for (int r = 0; r < REGS; ++r) {
      if (REGS > 1) store(sums + h * sum_stride + r * kWidth, a[h][r]);
      else store_n(sums + h * sum_stride, a[h][r], n);
    }
}

template <int HEADS>
inline void weigh_columns(const float* scores, int64_t score_stride, const float* cache, int64_t width, int64_t count,
                          float* sums, int64_t latent) {
  constexpr int kRegs = 3;
  int64_t c = 0;
  for (; c + kRegs * kWidth <= latent; c += kRegs * kWidth)
    weigh_tile<HEADS, kRegs>(scores, score_stride, cache + c, width, count, sums + c, latent, kWidth);
  for (; c < latent; c += kWidth)
    weigh_tile<HEADS, 1>(scores, score_stride, cache + c, width, count, sums + c, latent, least(kWidth, latent - c));
}

constexpr int64_t kAttendHeads = 64;      // as many pointers are kept on the stack
constexpr int64_t kAttendPositions = 64;  // cache rows that all heads go over while they lie in L2

int64_t attend_scratch(int64_t heads, int64_t positions, int64_t width) {
  return heads * (padded(positions) + padded(width)) + product_scratch(heads);
}

// The scores are a product with the cache rows as its weights: the same dot products, at the same speed.
void attend(const float* q, int64_t heads, const float* cache, int64_t positions, int64_t width, int64_t latent,
            float scale, float* out, float* scratch) {
  int64_t stride = padded(positions);
  float* scores = scratch;
  float* prepared = scores + heads * stride;
  float* rest = prepared + heads * padded(width);
  const float* in[kAttendHeads];
  float* to[kAttendHeads];
  for (int64_t h = 0; h < heads; ++h) in[h] = q + h * width, to[h] = scores + h * stride;
  Matrix rows = {kFloat32, reinterpret_cast<const unsigned char*>(cache), nullptr, positions, width};
  prepare(in, heads, width, kFloat32, 0, (heads + kTokenBlock - 1) / kTokenBlock, prepared);
  product(prepared, heads, &rows, 0, positions, to, rest);
  float totals[kAttendHeads];
  V factor = set1(scale);
  for (int64_t h = 0; h < heads; ++h) {
    map(to[h], positions, to[h], [=](V v) { return mul(v, factor); });
    totals[h] = soften(to[h], positions);
  }
  for (int64_t i = 0; i < heads * latent; ++i) out[i] = 0.0f;
  for (int64_t j = 0; j < positions; j += kAttendPositions) {
    int64_t count = least(kAttendPositions, positions - j), h = 0;
    const float* block = cache + j * width;
    for (; h + 4 <= heads; h += 4)
      weigh_columns<4>(to[h] + j, stride, block, width, count, out + h * latent, latent);
    for (; h < heads; ++h) weigh_columns<1>(to[h] + j, stride, block, width, count, out + h * latent, latent);
  }
  for (int64_t h = 0; h < heads; ++h) {
    V total = set1(totals[h]);
    map(out + h * latent, latent, out + h * latent, [=](V v) { return div(v, total); });
  }
}

void attnres(const float* const* sources, int64_t n, const float* w, int64_t dim, float eps, float* scores,
             float* out) {
  for (int64_t s = 0; s < n; ++s)
    scores[s] = dot(sources[s], w, dim) * (1.0f / root(square_sum(sources[s], dim) / float(dim) + eps));
  float total = soften(scores, n);
  for (int64_t s = 0; s < n; ++s) scores[s] = scores[s] / total;
  mix(
      n, dim, [&](int64_t s) { return scores[s]; },
      [&](int64_t s, int64_t c, int64_t count) { return load_n(sources[s] + c, count); }, out, set1(1.0f));
}

void combine(const float* rows, int64_t stride, const float* weights, int64_t count, int64_t n, float* out) {
  mix(
      count, n, [&](int64_t i) { return weights[i]; },
      [&](int64_t i, int64_t c, int64_t m) { return load_n(rows + i * stride + c, m); }, out, set1(1.0f));
}

constexpr Ops kOps = {
    kIsaName,    kTokenBlock, prepare, product,  product_scratch, int8_floats, int8_prepare, int8_product, exp_n,   sigmoid_n,  tanh_n,    softplus_n,
    sigmoid_mul, glu,         widen_any, finite, rmsnorm,         l2norm,  short_conv, kda_decay, kda_head,
    absorb,      attend,      attend_scratch, attnres, combine,
};

}  // namespace
}  // namespace sluice
