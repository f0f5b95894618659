#include "driver.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <utility>

#include "pool.hpp"

namespace sluice {
namespace driver {
namespace {

std::atomic<int> g_others{0}, g_experts{0};  // threads an operation may use; 0 is all

int64_t padded(int64_t n) { return (n + 31) / 32 * 32; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Below this many multiply-adds (or elements times their weight) waking threads costs more than they help.
constexpr int64_t kAlone = 1 << 16;
constexpr int64_t kPieceWork = 1 << 19;

template <class F>
Pool::Phase phase(int64_t pieces, F& f, bool homed = false) {
  return {pieces, [](void* c, int64_t piece, int worker) { (*static_cast<F*>(c))(piece, worker); }, &f, homed};
}

// f(begin, end, worker) over [0, n), `work` units an item; pieces are multiples of `unit` items.
struct Split {
  int64_t n, grain, pieces;
  bool alone;
  Split(int64_t n, int64_t work, int64_t unit, int threads) : n(n) {
    int64_t total = n * std::max<int64_t>(work, 1);
    int64_t wanted = std::max<int64_t>(1, std::min(kPieceWork / std::max<int64_t>(work, 1), ceil_div(n, 4 * threads)));
    grain = ceil_div(wanted, unit) * unit;
    pieces = ceil_div(n, grain);
    alone = total < kAlone || threads == 1;
  }
};

template <class F>
void spread(int64_t n, int64_t work, int64_t unit, F f) {
  if (n <= 0) return;
  Pool::Lease lease;
  Split s(n, work, unit, lease.pool().size());
  auto piece = [&](int64_t p, int worker) { f(p * s.grain, std::min(n, (p + 1) * s.grain), worker); };
  Pool::Phase ph = phase(s.pieces, piece);
  lease.pool().run(&ph, 1, s.alone ? 1 : g_others.load());
}

// A product in one of its two forms: float activations or int8.
struct Form {
  const Ops& o;
  bool int8;
  int64_t floats(int64_t n, int64_t cols) const { return n * (int8 ? o.int8_floats(cols) : padded(cols)); }
  int64_t blocks(int64_t n) const { return ceil_div(n, int8 ? 1 : o.token_block); }
  void prepare(const float* const* x, int64_t n, const Matrix& w, int64_t block, float* dst) const {
    if (int8) o.int8_prepare(x[block], w.cols, dst + block * o.int8_floats(w.cols));
    else o.prepare(x, n, w.cols, w.kind, block, block + 1, dst);
  }
  void product(const float* prepared, int64_t n, const Matrix& w, int64_t r0, int64_t r1, float* const* out,
               float* scratch) const {
    if (int8) o.int8_product(prepared, n, &w, r0, r1, out);
    else o.product(prepared, n, &w, r0, r1, out, scratch);
  }
};

constexpr int kRowUnit = 6;  // divides into the units' own row groups, so that no piece ends in a lone row

enum Slot : int { kPrepared, kHidden, kUp, kPreparedHidden, kSmall };

}  // namespace

void set_widths(int others, int experts) {
  g_others.store(others);
  g_experts.store(experts);
}

void matmul(const float* x, int64_t tokens, const Matrix& w, float* out, bool int8) {
  const Ops& o = ops();
  const Form form = {o, int8};
  for (int64_t t0 = 0; t0 < tokens; t0 += kMaxTokens) {
    int64_t n = std::min(kMaxTokens, tokens - t0);
    Pool::Lease lease;
    Pool& pool = lease.pool();
    float* prepared = pool.shared(kPrepared, form.floats(n, w.cols));
    pool.reserve_workers(o.product_scratch(n) + 64);
    const float* in[kMaxTokens];
    float* to[kMaxTokens];
    for (int64_t t = 0; t < n; ++t) in[t] = x + (t0 + t) * w.cols, to[t] = out + (t0 + t) * w.rows;
    Split rows(w.rows, w.cols * n, kRowUnit, pool.size());
    auto prepare = [&](int64_t b, int) { form.prepare(in, n, w, b, prepared); };
    auto product = [&](int64_t p, int worker) {
      form.product(prepared, n, w, p * rows.grain, std::min(w.rows, (p + 1) * rows.grain), to,
                   pool.worker(worker, 0));
    };
    Pool::Phase phases[] = {phase(form.blocks(n), prepare), phase(rows.pieces, product)};
    pool.run(phases, 2, rows.alone ? 1 : g_others.load());
  }
}

namespace {

// Jobs of one shape with at most kMaxTokens rows together: four phases for all of them. Pieces go through the rows of
// the matrices in order and within a piece's rows through the jobs, so that a home's share is the same rows of each.
void run_experts(const float* x, const ExpertJob* jobs, int64_t count, const Activation& act, float* slots, bool int8) {
  const Ops& o = ops();
  const Form form = {o, int8};
  const Matrix &w1 = jobs[0].w1, &w2 = jobs[0].w2;
  int64_t inner = w1.rows, cols = w1.cols, total = 0, most = 0;
  struct Place {
    int64_t row, prepared, prepared_hidden;  // where the job's rows begin, in rows and in floats
  };
  std::vector<Place> at(static_cast<size_t>(count));
  std::vector<std::pair<int64_t, int64_t>> blocks, hidden_blocks;  // (job, block of its tokens)
  int64_t prepared_floats = 0, hidden_floats = 0;
  for (int64_t j = 0; j < count; ++j) {
    const ExpertJob& job = jobs[j];
    Place& place = at[size_t(j)];
    place = {total, prepared_floats, hidden_floats};
    // one token's experts all read the same row, which is then laid out once
    if (j > 0 && job.n == 1 && jobs[j - 1].n == 1 && job.rows[0] == jobs[j - 1].rows[0]) {
      place.prepared = at[size_t(j - 1)].prepared;
    } else {
      prepared_floats += form.floats(job.n, cols);
      for (int64_t b = 0; b < form.blocks(job.n); ++b) blocks.emplace_back(j, b);
    }
    hidden_floats += form.floats(job.n, inner);
    for (int64_t b = 0; b < form.blocks(job.n); ++b) hidden_blocks.emplace_back(j, b);
    total += job.n;
    most = std::max(most, job.n);
  }
  Pool::Lease lease;
  Pool& pool = lease.pool();
  float* prepared = pool.shared(kPrepared, prepared_floats);
  float* hidden = pool.shared(kHidden, total * inner);
  float* up = pool.shared(kUp, total * inner);
  float* prepared_hidden = pool.shared(kPreparedHidden, hidden_floats);
  pool.reserve_workers(o.product_scratch(most) + 64);
  const float *in[kMaxTokens], *inner_in[kMaxTokens];
  float *to_gate[kMaxTokens], *to_up[kMaxTokens], *to[kMaxTokens];
  for (int64_t j = 0; j < count; ++j)
    for (int64_t i = 0; i < jobs[j].n; ++i) {
      int64_t t = at[size_t(j)].row + i;
      in[t] = x + jobs[j].rows[i] * cols;
      to_gate[t] = hidden + t * inner;
      to_up[t] = up + t * inner;
      inner_in[t] = to_gate[t];
      to[t] = slots + jobs[j].slot_ids[i] * w2.rows;
    }
  Split first(inner, 2 * cols * most, kRowUnit, pool.size());
  Split second(w2.rows, inner * most, kRowUnit, pool.size());
  auto prepare = [&](int64_t p, int) {
    auto [j, b] = blocks[size_t(p)];
    const Place& place = at[size_t(j)];
    form.prepare(in + place.row, jobs[j].n, jobs[j].w1, b, prepared + place.prepared);
  };
  auto gate_up = [&](int64_t p, int worker) {
    const ExpertJob& job = jobs[p % count];
    const Place& place = at[size_t(p % count)];
    int64_t r0 = p / count * first.grain, r1 = std::min(inner, r0 + first.grain);
    float *scratch = pool.worker(worker, 0), *const *gate = to_gate + place.row;
    form.product(prepared + place.prepared, job.n, job.w1, r0, r1, gate, scratch);
    form.product(prepared + place.prepared, job.n, job.w3, r0, r1, to_up + place.row, scratch);
    for (int64_t t = 0; t < job.n; ++t) o.glu(gate[t] + r0, to_up[place.row + t] + r0, r1 - r0, &act, gate[t] + r0);
  };
  auto prepare_hidden = [&](int64_t p, int) {
    auto [j, b] = hidden_blocks[size_t(p)];
    const Place& place = at[size_t(j)];
    form.prepare(inner_in + place.row, jobs[j].n, jobs[j].w2, b, prepared_hidden + place.prepared_hidden);
  };
  auto down = [&](int64_t p, int worker) {
    const ExpertJob& job = jobs[p % count];
    const Place& place = at[size_t(p % count)];
    int64_t r0 = p / count * second.grain;
    form.product(prepared_hidden + place.prepared_hidden, job.n, job.w2, r0, std::min(w2.rows, r0 + second.grain),
                 to + place.row, pool.worker(worker, 0));
  };
  Pool::Phase phases[] = {phase(int64_t(blocks.size()), prepare), phase(first.pieces * count, gate_up, true),
                          phase(int64_t(hidden_blocks.size()), prepare_hidden),
                          phase(second.pieces * count, down, true)};
  bool alone = pool.size() == 1 || 3 * inner * cols * total < kAlone;
  pool.run(phases, 4, alone ? 1 : g_experts.load());
}

}  // namespace

void experts(const float* x, const std::vector<ExpertJob>& jobs, const Activation& act, float* slots, bool int8) {
  std::vector<ExpertJob> batch;
  int64_t rows = 0;
  auto run = [&] {
    if (!batch.empty()) run_experts(x, batch.data(), int64_t(batch.size()), act, slots, int8);
    batch.clear();
    rows = 0;
  };
  for (const ExpertJob& job : jobs)
    for (int64_t begin = 0; begin < job.n; begin += kMaxTokens) {
      ExpertJob part = job;
      part.rows += begin;
      part.slot_ids += begin;
      part.n = std::min(kMaxTokens, job.n - begin);
      if (rows + part.n > kMaxTokens) run();
      batch.push_back(part);
      rows += part.n;
    }
  run();
}

void map(Map f, const float* x, int64_t n, float* out) {
  spread(n, 16, 64, [&](int64_t a, int64_t b, int) { f(x + a, b - a, out + a); });
}

void sigmoid_mul(const float* x, const float* gate, int64_t n, float* out) {
  const Ops& o = ops();
  spread(n, 16, 64, [&](int64_t a, int64_t b, int) { o.sigmoid_mul(x + a, gate + a, b - a, out + a); });
}

void glu(const float* gate, const float* up, int64_t n, const Activation& act, float* out) {
  const Ops& o = ops();
  spread(n, 40, 64, [&](int64_t a, int64_t b, int) { o.glu(gate + a, up + a, b - a, &act, out + a); });
}

void widen(int kind, const unsigned char* src, int64_t n, float* out) {
  const Ops& o = ops();
  int bytes = kind == kFloat32 ? 4 : 2;
  spread(n, 2, 64, [&](int64_t a, int64_t b, int) { o.widen(kind, src + a * bytes, b - a, out + a); });
}

bool finite(const float* x, int64_t n) {
  const Ops& o = ops();
  std::atomic<bool> good{true};
  spread(n, 1, 64, [&](int64_t a, int64_t b, int) {
    if (!o.finite(x + a, b - a)) good.store(false, std::memory_order_relaxed);
  });
  return good.load();
}

void rmsnorm(const float* x, const float* w, int64_t rows, int64_t dim, float eps, float* out) {
  const Ops& o = ops();
  spread(rows, 2 * dim, 1, [&](int64_t a, int64_t b, int) {
    for (int64_t r = a; r < b; ++r) o.rmsnorm(x + r * dim, w, dim, eps, out + r * dim);
  });
}

void l2norm(const float* x, int64_t rows, int64_t dim, float eps, float scale, float* out) {
  const Ops& o = ops();
  spread(rows, 2 * dim, 1, [&](int64_t a, int64_t b, int) {
    for (int64_t r = a; r < b; ++r) o.l2norm(x + r * dim, dim, eps, scale, out + r * dim);
  });
}

void short_conv(const float* x, const float* w, float* window, float* out, int64_t tokens, int64_t channels,
                int64_t taps) {
  const Ops& o = ops();
  spread(channels, tokens * (taps + 16), 64, [&](int64_t a, int64_t b, int) {
    o.short_conv(x, w, window, out, tokens, channels, taps, a, b);
  });
}

void kda_decay(const float* z, const float* a_log, const float* dt_bias, bool bounded, float lower_bound,
               int64_t tokens, int64_t heads, int64_t dim, float* alpha) {
  const Ops& o = ops();
  spread(tokens * heads, dim * 32, 1, [&](int64_t a, int64_t b, int) {
    for (int64_t i = a; i < b; ++i) {
      int64_t h = i % heads;
      float rate;
      o.exp(a_log + h, 1, &rate);
      o.kda_decay(z + i * dim, dt_bias + h * dim, rate, bounded, lower_bound, dim, alpha + i * dim);
    }
  });
}

void kda_recurrence(const float* q, const float* k, const float* v, const float* alpha, const float* beta,
                    float* state, float* out, int64_t tokens, int64_t heads, int64_t dim) {
  const Ops& o = ops();
  constexpr int64_t kColumns = 64;
  int64_t parts = ceil_div(dim, kColumns);
  if (tokens == 0) return;
  spread(heads * parts, tokens * dim * kColumns * 2, 1, [&](int64_t a, int64_t b, int) {
    for (int64_t i = a; i < b; ++i) {
      int64_t h = i / parts, c0 = i % parts * kColumns, at = h * dim;
      o.kda_head(q + at, k + at, v + at, alpha + at, beta + h, state + h * dim * dim, out + at, tokens, heads * dim,
                 heads, dim, c0, std::min(dim, c0 + kColumns));
    }
  });
}

void absorb_query(const float* q, const Matrix& w, int64_t tokens, int64_t heads, int64_t dn, int64_t dv,
                  float* out) {
  const Ops& o = ops();
  spread(heads, tokens * dn * w.cols, 1, [&](int64_t a, int64_t b, int) {
    for (int64_t h = a; h < b; ++h)
      for (int64_t t = 0; t < tokens; ++t)
        o.absorb(q + (t * heads + h) * dn, dn, &w, h * (dn + dv), out + (t * heads + h) * w.cols);
  });
}

void expand_values(const float* ctx, const Matrix& w, int64_t tokens, int64_t heads, int64_t dn, int64_t dv,
                   float* out) {
  const Ops& o = ops();
  int64_t latent = w.cols;
  for (int64_t t0 = 0; t0 < tokens; t0 += kMaxTokens) {
    int64_t n = std::min(kMaxTokens, tokens - t0);
    Pool::Lease lease;
    Pool& pool = lease.pool();
    int64_t prepared_floats = n * padded(latent);
    pool.reserve_workers(prepared_floats + o.product_scratch(n) + 64);
    Split s(heads, n * dv * latent, 1, pool.size());
    auto piece = [&](int64_t p, int worker) {
      float* prepared = pool.worker(worker, 0);
      const float* in[kMaxTokens];
      float* to[kMaxTokens];
      for (int64_t h = p * s.grain; h < std::min(heads, (p + 1) * s.grain); ++h) {
        int64_t row0 = h * (dn + dv) + dn;  // the head's value rows
        Matrix rows = {w.kind, w.data + row0 * latent * (w.kind == kFloat32 ? 4 : 2), nullptr, dv, latent};
        for (int64_t t = 0; t < n; ++t) {
          in[t] = ctx + ((t0 + t) * heads + h) * latent;
          to[t] = out + ((t0 + t) * heads + h) * dv;
        }
        o.prepare(in, n, latent, w.kind, 0, ceil_div(n, o.token_block), prepared);
        o.product(prepared, n, &rows, 0, dv, to, prepared + prepared_floats);
      }
    };
    Pool::Phase ph = phase(s.pieces, piece);
    pool.run(&ph, 1, s.alone ? 1 : g_others.load());
  }
}

void mla_attention(const float* q, const float* cache, int64_t start, int64_t tokens, int64_t heads, int64_t width,
                   int64_t latent, float scale, float* out) {
  const Ops& o = ops();
  if (tokens * heads == 0) return;
  Pool::Lease lease;
  Pool& pool = lease.pool();
  // Heads of one token go over the cache together, as many as leave every thread work and scratch small.
  int64_t positions = start + tokens;
  int64_t group = std::min<int64_t>(48, std::max<int64_t>(8, (1 << 18) / positions));
  group = std::min(group, std::max<int64_t>(1, (1 << 21) / positions));  // 8 MB of scores a thread at most
  group = std::min(group, std::max<int64_t>(4, ceil_div(tokens * heads, 2 * pool.size())));
  int64_t groups = ceil_div(heads, group);
  pool.reserve_workers(o.attend_scratch(group, positions, width) + 64);
  Split s(tokens * groups, group * positions * (width + latent), 1, pool.size());
  auto piece = [&](int64_t p, int worker) {
    for (int64_t i = p * s.grain; i < std::min(s.n, (p + 1) * s.grain); ++i) {
      int64_t t = i / groups, h = i % groups * group, at = t * heads + h;
      o.attend(q + at * width, std::min(group, heads - h), cache, start + t + 1, width, latent, scale,
               out + at * latent, pool.worker(worker, 0));
    }
  };
  Pool::Phase ph = phase(s.pieces, piece);
  pool.run(&ph, 1, s.alone ? 1 : g_others.load());
}

void attnres_mix(const float* bank, int64_t n, const float* prefix, const float* w, int64_t tokens, int64_t dim,
                 float eps, float* out) {
  const Ops& o = ops();
  spread(tokens, (n + 1) * dim * 3, 1, [&](int64_t a, int64_t b, int) {
    const float* sources[kMaxSources];
    float scores[kMaxSources];
    for (int64_t t = a; t < b; ++t) {
      for (int64_t s = 0; s < n; ++s) sources[s] = bank + (s * tokens + t) * dim;
      sources[n] = prefix + t * dim;
      o.attnres(sources, n + 1, w, dim, eps, scores, out + t * dim);
    }
  });
}

bool route(const float* logits, const float* bias, int64_t tokens, int64_t experts, int64_t k, bool renormalize,
           float scaling, int32_t* ids, float* weights) {
  const Ops& o = ops();
  Pool::Lease lease;
  float* scores = lease.pool().shared(kSmall, experts + 2 * k);
  float* best = scores + experts;
  for (int64_t t = 0; t < tokens; ++t) {
    o.sigmoid(logits + t * experts, experts, scores);
    int32_t* chosen = ids + t * k;
    float* w = weights + t * k;
    int64_t held = 0;
    for (int64_t e = 0; e < experts; ++e) {
      float biased = scores[e] + bias[e];
      if (biased != biased) return false;
      if (held == k && !(biased > best[k - 1])) continue;
      int64_t at = held < k ? held++ : k - 1;
      for (; at > 0 && biased > best[at - 1]; --at) best[at] = best[at - 1], chosen[at] = chosen[at - 1];
      best[at] = biased;  // an equal score stays behind the lower id, which came first
      chosen[at] = int32_t(e);
    }
    float sum = 0.0f;
    for (int64_t i = 0; i < k; ++i) sum = sum + scores[chosen[i]];
    for (int64_t i = 0; i < k; ++i)
      w[i] = (renormalize ? scores[chosen[i]] / (sum + 1e-20f) : scores[chosen[i]]) * scaling;
  }
  return true;
}

void combine(const float* slots, const float* weights, int64_t tokens, int64_t k, int64_t dim, float* out) {
  const Ops& o = ops();
  constexpr int64_t kColumns = 1024;
  int64_t parts = ceil_div(dim, kColumns);
  spread(tokens * parts, k * kColumns, 1, [&](int64_t a, int64_t b, int) {
    for (int64_t i = a; i < b; ++i) {
      int64_t t = i / parts, c = i % parts * kColumns;
      o.combine(slots + t * k * dim + c, dim, weights + t * k, k, std::min(kColumns, dim - c), out + t * dim + c);
    }
  });
}

uint64_t read_memory(const unsigned char* p, int64_t n) {
  std::atomic<uint64_t> total{0};
  spread(n / 64, 64, 1 << 13, [&](int64_t a, int64_t b, int) {
    uint64_t lanes[8] = {};
    for (int64_t i = a; i < b; ++i) {
      uint64_t line[8];
      std::memcpy(line, p + i * 64, 64);
      for (int j = 0; j < 8; ++j) lanes[j] ^= line[j];
    }
    uint64_t sum = 0;
    for (uint64_t lane : lanes) sum ^= lane;
    total.fetch_xor(sum, std::memory_order_relaxed);
  });
  return total.load();
}

double wake_seconds() {
  Pool::Lease lease;
  int n = lease.pool().size();
  std::atomic<int> arrived{0};
  auto begin = std::chrono::steady_clock::now();
  auto piece = [&](int64_t, int) {
    arrived.fetch_add(1);
    while (arrived.load() < n && std::chrono::steady_clock::now() - begin < std::chrono::seconds(1)) {
    }
  };
  Pool::Phase ph = phase(n, piece);
  lease.pool().run(&ph, 1);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace driver
}  // namespace sluice
