// How an operation is cut into pieces for the pool. Arguments are already checked: every pointer and index is good.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.hpp"

namespace sluice {

const Ops& ops();  // the table in use (dispatch.cpp)

namespace driver {

// Tokens computed together at most: bounds scratch, and at 64 rows a product is compute-bound anyway.
constexpr int64_t kMaxTokens = 64;
constexpr int64_t kMaxSources = 4096;

// How many of the pool's threads an operation may use (0: all): routed experts apart from everything else.
void set_widths(int others, int experts);

// int8: activations rounded to 8 bits (kernels.hpp says how); weights are then kMxfp4.
void matmul(const float* x, int64_t tokens, const Matrix& w, float* out, bool int8 = false);
// slots[slot_ids[i]] = w2 act(w1 x[rows[i]], w3 x[rows[i]]), i < n, for every job; their matrices are of one shape.
struct ExpertJob {
  Matrix w1, w3, w2;
  const int32_t *rows, *slot_ids;
  int64_t n;
};
void experts(const float* x, const std::vector<ExpertJob>& jobs, const Activation& act, float* slots, bool int8);

using Map = void (*)(const float*, int64_t, float*);
void map(Map f, const float* x, int64_t n, float* out);
void sigmoid_mul(const float* x, const float* gate, int64_t n, float* out);
void glu(const float* gate, const float* up, int64_t n, const Activation& act, float* out);
void widen(int kind, const unsigned char* src, int64_t n, float* out);
bool finite(const float* x, int64_t n);

void rmsnorm(const float* x, const float* w, int64_t rows, int64_t dim, float eps, float* out);
void l2norm(const float* x, int64_t rows, int64_t dim, float eps, float scale, float* out);

void short_conv(const float* x, const float* w, float* window, float* out, int64_t tokens, int64_t channels,
                int64_t taps);
void kda_decay(const float* z, const float* a_log, const float* dt_bias, bool bounded, float lower_bound,
               int64_t tokens, int64_t heads, int64_t dim, float* alpha);
void kda_recurrence(const float* q, const float* k, const float* v, const float* alpha, const float* beta,
                    float* state, float* out, int64_t tokens, int64_t heads, int64_t dim);

void absorb_query(const float* q, const Matrix& w, int64_t tokens, int64_t heads, int64_t dn, int64_t dv, float* out);
void expand_values(const float* ctx, const Matrix& w, int64_t tokens, int64_t heads, int64_t dn, int64_t dv,
                   float* out);
void mla_attention(const float* q, const float* cache, int64_t start, int64_t tokens, int64_t heads, int64_t width,
                   int64_t latent, float scale, float* out);
void attnres_mix(const float* bank, int64_t n, const float* prefix, const float* w, int64_t tokens, int64_t dim,
                 float eps, float* out);
bool route(const float* logits, const float* bias, int64_t tokens, int64_t experts, int64_t k, bool renormalize,
           float scaling, int32_t* ids, float* weights);
void combine(const float* slots, const float* weights, int64_t tokens, int64_t k, int64_t dim, float* out);

// Reads n bytes with all threads, computing nothing worth more than a load: the memory rate to compare kernels with.
uint64_t read_memory(const unsigned char* p, int64_t n);
// Seconds until every thread of the pool works on a job at once, and has left it again.
double wake_seconds();

}  // namespace driver
}  // namespace sluice
