// Python's door: checks shape, dtype, contiguity and every index, takes pointers, releases the GIL, and only then
// computes. Past the checks nothing throws but want of memory, and no Python object is touched.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/numpy.h>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "dispatch.hpp"
#include "driver.hpp"
#include "pool.hpp"

namespace py = pybind11;

namespace sluice {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw py::value_error(what); }

std::string shape_text(const py::array& a) {
  std::string s = "(";
  for (py::ssize_t i = 0; i < a.ndim(); ++i) s += (i ? ", " : "") + std::to_string(a.shape(i));
  return s + ")";
}

// kind: numpy's letter ('f', 'u', 'i', 'b'); any_address: data may lie at odd addresses (weights in a read buffer).
py::array checked(const py::object& o, const char* name, char kind, int bytes, bool any_address = false) {
  if (!py::isinstance<py::array>(o)) refuse(std::string(name) + ": not a numpy array");
  py::array a = py::reinterpret_borrow<py::array>(o);
  py::dtype d = a.dtype();
  if (d.kind() != kind || d.itemsize() != bytes || d.byteorder() == '>')
    refuse(std::string(name) + ": dtype " + std::string(py::str(d)) + ", expected " +
           (kind == 'f' ? "float" : kind == 'u' ? "uint" : "int") + std::to_string(8 * bytes));
  if (!(a.flags() & py::array::c_style)) refuse(std::string(name) + ": not C-contiguous");
  if (!any_address && reinterpret_cast<uintptr_t>(a.data()) % uintptr_t(bytes) != 0)
    refuse(std::string(name) + ": data not aligned to its items");
  return a;
}

void shaped(const py::array& a, const char* name, std::initializer_list<int64_t> shape) {
  bool good = a.ndim() == py::ssize_t(shape.size());
  std::string want = "(";
  int i = 0;
  for (int64_t n : shape) {
    want += (i ? ", " : "") + std::string(n < 0 ? "any" : std::to_string(n));
    if (good && n >= 0 && a.shape(i) != n) good = false;
    ++i;
  }
  if (!good) refuse(std::string(name) + ": shape " + shape_text(a) + ", expected " + want + ")");
}

struct In {
  py::array a;
  const float* p;
  In(const py::object& o, const char* name, std::initializer_list<int64_t> shape)
      : a(checked(o, name, 'f', 4)), p(static_cast<const float*>(a.data())) {
    shaped(a, name, shape);
  }
  In(const py::object& o, const char* name) : a(checked(o, name, 'f', 4)), p(static_cast<const float*>(a.data())) {}
  int64_t dim(int i) const { return a.shape(i); }
};

float* writable(py::array& a, const char* name) {
  if (!a.writeable()) refuse(std::string(name) + ": not writeable");
  return static_cast<float*>(a.mutable_data());
}

struct Out {
  py::array a;
  float* p;
  Out(const py::object& o, const char* name, std::initializer_list<int64_t> shape) : a(checked(o, name, 'f', 4)) {
    shaped(a, name, shape);
    p = writable(a, name);
  }
  Out(const py::object& o, const char* name) : a(checked(o, name, 'f', 4)), p(writable(a, name)) {}
};

void same_shape(const py::array& a, const py::array& b, const char* name) {
  bool good = a.ndim() == b.ndim();
  for (py::ssize_t i = 0; good && i < a.ndim(); ++i) good = a.shape(i) == b.shape(i);
  if (!good) refuse(std::string(name) + ": shape " + shape_text(b) + ", expected " + shape_text(a));
}

void apart(const py::array& out, const char* name, const py::array& in, const char* other) {
  const char *a = static_cast<const char*>(out.data()), *b = static_cast<const char*>(in.data());
  if (out.nbytes() > 0 && in.nbytes() > 0 && a < b + in.nbytes() && b < a + out.nbytes())
    refuse(std::string(name) + ": overlaps " + other);
}

// Equal start is allowed (elementwise in place), any other overlap is not.
void apart_or_same(const py::array& out, const char* name, const py::array& in, const char* other) {
  if (out.data() != in.data()) apart(out, name, in, other);
}

struct Weight {
  Matrix m;
  py::array data, scales;
};

Weight weight(const py::object& o, const char* name) {
  Weight w;
  if (py::isinstance<py::tuple>(o)) {
    py::tuple pair = py::reinterpret_borrow<py::tuple>(o);
    if (pair.size() != 2) refuse(std::string(name) + ": MXFP4 weights are (packed, scales)");
    w.data = checked(pair[0], (std::string(name) + ".packed").c_str(), 'u', 1);
    w.scales = checked(pair[1], (std::string(name) + ".scales").c_str(), 'u', 1);
    shaped(w.data, (std::string(name) + ".packed").c_str(), {-1, -1});
    int64_t rows = w.data.shape(0), cols = w.data.shape(1) * 2;
    if (cols % 32 != 0) refuse(std::string(name) + ".packed: columns are not whole groups of 32 (16 bytes)");
    shaped(w.scales, (std::string(name) + ".scales").c_str(), {rows, cols / 32});
    w.m = {kMxfp4, static_cast<const unsigned char*>(w.data.data()),
           static_cast<const unsigned char*>(w.scales.data()), rows, cols};
    return w;
  }
  if (!py::isinstance<py::array>(o)) refuse(std::string(name) + ": neither a numpy array nor Mxfp4");
  py::dtype d = py::reinterpret_borrow<py::array>(o).dtype();
  int kind = d.kind() == 'f' && d.itemsize() == 4   ? kFloat32
             : d.kind() == 'u' && d.itemsize() == 2 ? kBfloat16
             : d.kind() == 'f' && d.itemsize() == 2 ? kFloat16
                                                    : -1;
  if (kind < 0)
    refuse(std::string(name) + ": dtype " + std::string(py::str(d)) + ", expected float32, uint16 (bfloat16) or float16");
  w.data = checked(o, name, d.kind(), int(d.itemsize()), true);
  shaped(w.data, name, {-1, -1});
  w.m = {kind, static_cast<const unsigned char*>(w.data.data()), nullptr, w.data.shape(0), w.data.shape(1)};
  return w;
}

void weight_shape(const Weight& w, const char* name, int64_t rows, int64_t cols) {
  if ((rows >= 0 && w.m.rows != rows) || (cols >= 0 && w.m.cols != cols))
    refuse(std::string(name) + ": shape (" + std::to_string(w.m.rows) + ", " + std::to_string(w.m.cols) +
           "), expected (" + (rows < 0 ? "any" : std::to_string(rows)) + ", " +
           (cols < 0 ? "any" : std::to_string(cols)) + ")");
}

Activation activation(const py::object& o) {
  if (!py::isinstance<py::tuple>(o)) refuse("act: expected Situ(beta, linear_beta) or SILU");
  py::tuple t = py::reinterpret_borrow<py::tuple>(o);
  if (t.size() == 0) return {0, 0.0f, 0.0f};
  if (t.size() != 2) refuse("act: expected Situ(beta, linear_beta) or SILU");
  float beta = t[0].cast<float>(), linear = t[1].cast<float>();
  if (!(beta > 0.0f) || !(linear > 0.0f) || std::isinf(beta) || std::isinf(linear))
    refuse("act: both betas must be positive and finite");
  return {1, beta, linear};
}

py::array indexes(const py::object& o, const char* name, int64_t n, int64_t limit) {
  py::array a = checked(o, name, 'i', 4);
  shaped(a, name, {n});
  const int32_t* p = static_cast<const int32_t*>(a.data());
  for (int64_t i = 0; i < a.shape(0); ++i)
    if (p[i] < 0 || p[i] >= limit)
      refuse(std::string(name) + "[" + std::to_string(i) + "] = " + std::to_string(p[i]) + " is outside 0.." +
             std::to_string(limit - 1));
  return a;
}

void good_eps(float eps) {
  if (!(eps >= 0.0f) || std::isinf(eps)) refuse("eps: negative or not finite");
}

// ---- operations ----------------------------------------------------------------------------------------------------

void needs_packed(const Weight& w, const char* name) {
  if (w.m.kind != kMxfp4) refuse(std::string(name) + ": int8 activations need MXFP4 weights");
}

template <bool INT8>
void matmul(const py::object& x_, const py::object& w_, const py::object& out_) {
  Weight w = weight(w_, "w");
  if (INT8) needs_packed(w, "w");
  In x(x_, "x", {-1, w.m.cols});
  Out out(out_, "out", {x.dim(0), w.m.rows});
  apart(out.a, "out", x.a, "x");
  apart(out.a, "out", w.data, "w");
  int64_t tokens = x.dim(0);
  py::gil_scoped_release release;
  driver::matmul(x.p, tokens, w.m, out.p, INT8);
}

// One expert's three matrices, checked once and held: what a layer's call takes many of.
struct ExpertWeights {
  Weight w1, w3, w2;
  ExpertWeights(const py::object& w1_, const py::object& w3_, const py::object& w2_)
      : w1(weight(w1_, "w1")), w3(weight(w3_, "w3")), w2(weight(w2_, "w2")) {
    if (w1.m.kind != w3.m.kind || w1.m.kind != w2.m.kind) refuse("w1, w3, w2: not of one kind");
    weight_shape(w3, "w3", w1.m.rows, w1.m.cols);
    weight_shape(w2, "w2", w1.m.cols, w1.m.rows);
  }
  bool like(const ExpertWeights& other) const {
    return w1.m.kind == other.w1.m.kind && w1.m.rows == other.w1.m.rows && w1.m.cols == other.w1.m.cols;
  }
};

void experts(const py::object& x_, const py::list& weights, const py::list& rows_, const py::object& act_,
             const py::object& slots_, const py::list& ids_, bool int8) {
  if (rows_.size() != weights.size()) refuse("rows: not one array for each expert");
  if (ids_.size() != weights.size()) refuse("slot_ids: not one array for each expert");
  In x(x_, "x", {-1, -1});
  Out slots(slots_, "slots", {-1, x.dim(1)});
  Activation act = activation(act_);
  apart(slots.a, "slots", x.a, "x");
  std::vector<driver::ExpertJob> jobs;
  std::vector<py::object> held;  // whatever becomes of the lists while the GIL is released
  const ExpertWeights* first = nullptr;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!py::isinstance<ExpertWeights>(weights[i])) refuse("weights: not a list of ExpertWeights");
    const ExpertWeights& w = weights[i].cast<const ExpertWeights&>();
    if (first == nullptr) {
      first = &w;
      weight_shape(w.w1, "w1", -1, x.dim(1));
      if (int8) needs_packed(w.w1, "w1");
    } else if (!w.like(*first)) {
      refuse("weights: expert " + std::to_string(i) + " is not of the first one's kind and shape");
    }
    py::array rows = indexes(rows_[i], "rows", -1, x.dim(0));
    py::array ids = indexes(ids_[i], "slot_ids", rows.shape(0), slots.a.shape(0));
    jobs.push_back({w.w1.m, w.w3.m, w.w2.m, static_cast<const int32_t*>(rows.data()),
                    static_cast<const int32_t*>(ids.data()), rows.shape(0)});
    held.insert(held.end(), {py::reinterpret_borrow<py::object>(weights[i]), rows, ids});
  }
  py::gil_scoped_release release;
  driver::experts(x.p, jobs, act, slots.p, int8);
}

void glu(const py::object& gate_, const py::object& up_, const py::object& act_, const py::object& out_) {
  In gate(gate_, "gate"), up(up_, "up");
  Out out(out_, "out");
  same_shape(gate.a, up.a, "up");
  same_shape(gate.a, out.a, "out");
  Activation act = activation(act_);
  apart_or_same(out.a, "out", gate.a, "gate");
  apart_or_same(out.a, "out", up.a, "up");
  int64_t n = gate.a.size();
  py::gil_scoped_release release;
  driver::glu(gate.p, up.p, n, act, out.p);
}

void rmsnorm(const py::object& x_, const py::object& w_, float eps, const py::object& out_) {
  In x(x_, "x", {-1, -1});
  In w(w_, "weight", {x.dim(1)});
  Out out(out_, "out", {x.dim(0), x.dim(1)});
  good_eps(eps);
  apart_or_same(out.a, "out", x.a, "x");
  apart(out.a, "out", w.a, "weight");
  int64_t rows = x.dim(0), dim = x.dim(1);
  py::gil_scoped_release release;
  driver::rmsnorm(x.p, w.p, rows, dim, eps, out.p);
}

void l2norm(const py::object& x_, float eps, float scale, const py::object& out_) {
  In x(x_, "x", {-1, -1});
  Out out(out_, "out", {x.dim(0), x.dim(1)});
  good_eps(eps);
  apart_or_same(out.a, "out", x.a, "x");
  int64_t rows = x.dim(0), dim = x.dim(1);
  py::gil_scoped_release release;
  driver::l2norm(x.p, rows, dim, eps, scale, out.p);
}

void sigmoid_mul(const py::object& x_, const py::object& gate_, const py::object& out_) {
  In x(x_, "x"), gate(gate_, "gate");
  Out out(out_, "out");
  same_shape(x.a, gate.a, "gate");
  same_shape(x.a, out.a, "out");
  apart_or_same(out.a, "out", x.a, "x");
  apart_or_same(out.a, "out", gate.a, "gate");
  int64_t n = x.a.size();
  py::gil_scoped_release release;
  driver::sigmoid_mul(x.p, gate.p, n, out.p);
}

template <driver::Map Ops::*F>
void elementwise(const py::object& x_, const py::object& out_) {
  In x(x_, "x");
  Out out(out_, "out");
  same_shape(x.a, out.a, "out");
  apart_or_same(out.a, "out", x.a, "x");
  int64_t n = x.a.size();
  py::gil_scoped_release release;
  driver::map(ops().*F, x.p, n, out.p);
}

void short_conv(const py::object& x_, const py::object& w_, const py::object& window_, const py::object& out_) {
  In x(x_, "x", {-1, -1});
  In w(w_, "weight", {x.dim(1), -1});
  if (w.dim(1) < 1) refuse("weight: no taps");
  Out window(window_, "window", {w.dim(1) - 1, x.dim(1)});
  Out out(out_, "out", {x.dim(0), x.dim(1)});
  apart(out.a, "out", x.a, "x");
  apart(out.a, "out", w.a, "weight");
  apart(out.a, "out", window.a, "window");
  apart(window.a, "window", x.a, "x");
  apart(window.a, "window", w.a, "weight");
  int64_t tokens = x.dim(0), channels = x.dim(1), taps = w.dim(1);
  py::gil_scoped_release release;
  driver::short_conv(x.p, w.p, window.p, out.p, tokens, channels, taps);
}

void kda_decay(const py::object& z_, const py::object& a_log_, const py::object& dt_bias_,
               std::optional<float> lower_bound, const py::object& alpha_) {
  In z(z_, "z", {-1, -1, -1});
  In a_log(a_log_, "a_log", {z.dim(1)});
  In dt_bias(dt_bias_, "dt_bias", {z.dim(1), z.dim(2)});
  Out alpha(alpha_, "alpha", {z.dim(0), z.dim(1), z.dim(2)});
  if (lower_bound && !(*lower_bound < 0.0f)) refuse("lower_bound: must be negative or None");
  apart_or_same(alpha.a, "alpha", z.a, "z");
  apart(alpha.a, "alpha", a_log.a, "a_log");
  apart(alpha.a, "alpha", dt_bias.a, "dt_bias");
  int64_t tokens = z.dim(0), heads = z.dim(1), dim = z.dim(2);
  bool bounded = lower_bound.has_value();
  float bound = bounded ? *lower_bound : 0.0f;
  py::gil_scoped_release release;
  driver::kda_decay(z.p, a_log.p, dt_bias.p, bounded, bound, tokens, heads, dim, alpha.p);
}

void kda_recurrence(const py::object& q_, const py::object& k_, const py::object& v_, const py::object& alpha_,
                    const py::object& beta_, const py::object& state_, const py::object& out_) {
  In q(q_, "q", {-1, -1, -1});
  int64_t tokens = q.dim(0), heads = q.dim(1), dim = q.dim(2);
  In k(k_, "k", {tokens, heads, dim}), v(v_, "v", {tokens, heads, dim}), alpha(alpha_, "alpha", {tokens, heads, dim});
  In beta(beta_, "beta", {tokens, heads});
  Out state(state_, "state", {heads, dim, dim}), out(out_, "out", {tokens, heads, dim});
  const In* inputs[] = {&q, &k, &v, &alpha, &beta};
  const char* names[] = {"q", "k", "v", "alpha", "beta"};
  for (int i = 0; i < 5; ++i) {
    apart(out.a, "out", inputs[i]->a, names[i]);
    apart(state.a, "state", inputs[i]->a, names[i]);
  }
  apart(out.a, "out", state.a, "state");
  py::gil_scoped_release release;
  driver::kda_recurrence(q.p, k.p, v.p, alpha.p, beta.p, state.p, out.p, tokens, heads, dim);
}

void plain_kind(const Weight& w, const char* name) {
  if (w.m.kind == kMxfp4) refuse(std::string(name) + ": MXFP4 is not taken here");
}

void absorb_query(const py::object& q_, const py::object& w_, int64_t dv, const py::object& out_) {
  In q(q_, "q", {-1, -1, -1});
  Weight w = weight(w_, "w_kvb");
  plain_kind(w, "w_kvb");
  int64_t tokens = q.dim(0), heads = q.dim(1), dn = q.dim(2);
  if (dv < 0 || dv > w.m.rows) refuse("dv: outside 0..rows of w_kvb");
  weight_shape(w, "w_kvb", heads * (dn + dv), -1);
  Out out(out_, "out", {tokens, heads, w.m.cols});
  apart(out.a, "out", q.a, "q");
  apart(out.a, "out", w.data, "w_kvb");
  py::gil_scoped_release release;
  driver::absorb_query(q.p, w.m, tokens, heads, dn, dv, out.p);
}

void expand_values(const py::object& ctx_, const py::object& w_, int64_t dn, const py::object& out_) {
  In ctx(ctx_, "ctx", {-1, -1, -1});
  Weight w = weight(w_, "w_kvb");
  plain_kind(w, "w_kvb");
  int64_t tokens = ctx.dim(0), heads = ctx.dim(1);
  Out out(out_, "out", {tokens, heads, -1});
  int64_t dv = out.a.shape(2);
  if (dn < 0 || dn > w.m.rows) refuse("dn: outside 0..rows of w_kvb");
  weight_shape(w, "w_kvb", heads * (dn + dv), ctx.dim(2));
  apart(out.a, "out", ctx.a, "ctx");
  apart(out.a, "out", w.data, "w_kvb");
  py::gil_scoped_release release;
  driver::expand_values(ctx.p, w.m, tokens, heads, dn, dv, out.p);
}

void mla_attention(const py::object& q_, const py::object& cache_, int64_t start, float scale, const py::object& out_) {
  In q(q_, "q", {-1, -1, -1});
  In cache(cache_, "cache", {-1, q.dim(2)});
  Out out(out_, "out", {q.dim(0), q.dim(1), -1});
  int64_t tokens = q.dim(0), heads = q.dim(1), width = q.dim(2), latent = out.a.shape(2);
  if (latent > width) refuse("out: wider than a cache row");
  if (start < 0 || start > cache.dim(0) || tokens > cache.dim(0) - start)
    refuse("start: " + std::to_string(start) + " + " + std::to_string(tokens) + " tokens do not fit the cache's " +
           std::to_string(cache.dim(0)) + " rows");
  apart(out.a, "out", q.a, "q");
  apart(out.a, "out", cache.a, "cache");
  py::gil_scoped_release release;
  driver::mla_attention(q.p, cache.p, start, tokens, heads, width, latent, scale, out.p);
}

void attnres_mix(const py::object& bank_, int64_t n, const py::object& prefix_, const py::object& w_, float eps,
                 const py::object& out_) {
  In bank(bank_, "bank", {-1, -1, -1});
  if (n < 0 || n > bank.dim(0) || n >= driver::kMaxSources)
    refuse("n: " + std::to_string(n) + " is outside 0.." + std::to_string(bank.dim(0)));
  In prefix(prefix_, "prefix", {bank.dim(1), bank.dim(2)});
  In w(w_, "w", {bank.dim(2)});
  Out out(out_, "out", {bank.dim(1), bank.dim(2)});
  good_eps(eps);
  apart(out.a, "out", bank.a, "bank");
  apart(out.a, "out", prefix.a, "prefix");
  apart(out.a, "out", w.a, "w");
  int64_t tokens = bank.dim(1), dim = bank.dim(2);
  py::gil_scoped_release release;
  driver::attnres_mix(bank.p, n, prefix.p, w.p, tokens, dim, eps, out.p);
}

bool route(const py::object& logits_, const py::object& bias_, int64_t k, bool renormalize, float scaling,
           const py::object& ids_, const py::object& weights_) {
  In logits(logits_, "logits", {-1, -1});
  int64_t tokens = logits.dim(0), experts = logits.dim(1);
  In bias(bias_, "bias", {experts});
  if (k < 1 || k > experts) refuse("k: " + std::to_string(k) + " is outside 1.." + std::to_string(experts));
  py::array ids = checked(ids_, "ids", 'i', 4);
  shaped(ids, "ids", {tokens, k});
  if (!ids.writeable()) refuse("ids: not writeable");
  Out weights(weights_, "weights", {tokens, k});
  apart(weights.a, "weights", logits.a, "logits");
  apart(ids, "ids", logits.a, "logits");
  int32_t* id = static_cast<int32_t*>(ids.mutable_data());
  py::gil_scoped_release release;
  return driver::route(logits.p, bias.p, tokens, experts, k, renormalize, scaling, id, weights.p);
}

void combine(const py::object& slots_, const py::object& weights_, const py::object& out_) {
  In slots(slots_, "slots", {-1, -1, -1});
  In weights(weights_, "weights", {slots.dim(0), slots.dim(1)});
  Out out(out_, "out", {slots.dim(0), slots.dim(2)});
  apart(out.a, "out", slots.a, "slots");
  apart(out.a, "out", weights.a, "weights");
  int64_t tokens = slots.dim(0), k = slots.dim(1), dim = slots.dim(2);
  py::gil_scoped_release release;
  driver::combine(slots.p, weights.p, tokens, k, dim, out.p);
}

void widen(const py::object& src_, const py::object& out_) {
  if (!py::isinstance<py::array>(src_)) refuse("src: not a numpy array");
  py::dtype d = py::reinterpret_borrow<py::array>(src_).dtype();
  bool half = d.itemsize() == 2;
  if (!(d.kind() == 'f' && (half || d.itemsize() == 4)) && !(d.kind() == 'u' && half))
    refuse("src: dtype " + std::string(py::str(d)) + ", expected uint16 (bfloat16), float16 or float32");
  py::array src = checked(src_, "src", d.kind(), int(d.itemsize()), true);
  Out out(out_, "out");
  same_shape(src, out.a, "out");
  apart(out.a, "out", src, "src");
  int kind = !half ? kFloat32 : d.kind() == 'u' ? kBfloat16 : kFloat16;
  const unsigned char* p = static_cast<const unsigned char*>(src.data());
  int64_t n = src.size();
  py::gil_scoped_release release;
  driver::widen(kind, p, n, out.p);
}

bool all_finite(const py::object& x_) {
  In x(x_, "x");
  int64_t n = x.a.size();
  py::gil_scoped_release release;
  return driver::finite(x.p, n);
}

bool mxfp4_scales_valid(const py::object& scales_) {
  py::array scales = checked(scales_, "scales", 'u', 1);
  const void* p = scales.data();
  size_t n = size_t(scales.size());
  py::gil_scoped_release release;
  return n == 0 || std::memchr(p, 255, n) == nullptr;
}

// ---- machine -------------------------------------------------------------------------------------------------------

void set_isa(const std::string& name) {
  const Ops* table = find_isa(name);
  if (table == nullptr) {
    std::string known;
    for (const std::string& s : available_isas()) known += (known.empty() ? "" : ", ") + s;
    refuse("instruction set '" + name + "' is not available here; this machine has: " + known);
  }
  Pool::Lease lease;  // never under a running operation
  set_ops(table);
}

void configure_threads(int64_t n, const std::optional<std::vector<int64_t>>& cpus, int64_t spin_us,
                       const std::optional<std::vector<int64_t>>& homes) {
  if (n < 1 || n > Pool::kMaxThreads) refuse("n: " + std::to_string(n) + " threads is outside 1..1024");
  if (spin_us < 0 || spin_us > 1000000) refuse("spin_us: outside 0..1000000");
  std::vector<int> list;
  if (cpus) {
    if (cpus->empty()) refuse("cpus: empty");
    for (int64_t c : *cpus) {
      if (c < 0 || c > 1 << 20) refuse("cpus: " + std::to_string(c) + " is not a CPU number");
      list.push_back(int(c));
    }
  }
  std::vector<int> home;
  if (homes) {
    if (int64_t(homes->size()) != n) refuse("homes: one for each of the " + std::to_string(n) + " threads");
    bool seen[Pool::kMaxHomes] = {};
    for (int64_t h : *homes) {
      if (h < 0 || h >= Pool::kMaxHomes) refuse("homes: " + std::to_string(h) + " is outside 0..7");
      seen[h] = true;
      home.push_back(int(h));
    }
    for (int h : home)
      if (h > 0 && !seen[h - 1]) refuse("homes: " + std::to_string(h - 1) + " has no thread");
  }
  py::gil_scoped_release release;
  Pool::instance().configure(int(n), list, home);
  Pool::instance().set_spin_us(int(spin_us));
}

void set_widths(int64_t others, int64_t experts) {
  if (others < 0 || others > Pool::kMaxThreads) refuse("others: outside 0..1024");
  if (experts < 0 || experts > Pool::kMaxThreads) refuse("experts: outside 0..1024");
  driver::set_widths(int(others), int(experts));
}

uint64_t read_memory(const py::object& array_) {
  if (!py::isinstance<py::array>(array_)) refuse("array: not a numpy array");
  py::array a = py::reinterpret_borrow<py::array>(array_);
  if (!(a.flags() & py::array::c_style)) refuse("array: not C-contiguous");
  const unsigned char* p = static_cast<const unsigned char*>(a.data());
  int64_t n = a.nbytes();
  py::gil_scoped_release release;
  return driver::read_memory(p, n);
}

// set_mempolicy(2) by number: no libnuma is needed, and a kernel or container without it only means "not touched".
// First touch under a thread's policy and not mbind: a policy of a range splits the mapping, and a cache of thousands
// of slots, each dealt to nodes matrix by matrix, would pass the kernel's limit of mappings.
bool touch_memory(const py::object& array_, int64_t node) {
  if (!py::isinstance<py::array>(array_)) refuse("array: not a numpy array");
  py::array a = py::reinterpret_borrow<py::array>(array_);
  if (!(a.flags() & py::array::c_style)) refuse("array: not C-contiguous");
  if (!a.writeable()) refuse("array: not writeable");
  constexpr int64_t kNodes = 1024, kBits = 8 * sizeof(unsigned long);
  constexpr int kPreferred = 1, kPopulateWrite = 23;
  if (node < 0 || node >= kNodes) refuse("node: " + std::to_string(node) + " is outside 0..1023");
  unsigned long mask[kNodes / kBits] = {}, before[kNodes / kBits] = {};
  mask[node / kBits] = 1ul << (node % kBits);
  uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE)), begin = reinterpret_cast<uintptr_t>(a.data());
  uintptr_t first = (begin + page - 1) / page * page, last = (begin + uintptr_t(a.nbytes())) / page * page;
  if (last <= first) return false;
  py::gil_scoped_release release;
  int mode = 0;
  if (syscall(SYS_get_mempolicy, &mode, before, kNodes + 1, nullptr, 0) != 0) return false;
  if (syscall(SYS_set_mempolicy, kPreferred, mask, kNodes + 1) != 0) return false;
  if (madvise(reinterpret_cast<void*>(first), last - first, kPopulateWrite) != 0)  // Linux before 5.14
    for (uintptr_t at = first; at < last; at += page)
      __atomic_fetch_or(reinterpret_cast<unsigned char*>(at), 0, __ATOMIC_RELAXED);
  syscall(SYS_set_mempolicy, mode, before, kNodes + 1);
  return true;
}

}  // namespace
}  // namespace sluice

PYBIND11_MODULE(_native, m) {
  using namespace sluice;
  m.doc() = "Compiled kernels; sluice.kernels documents them.";
  m.def("matmul", &matmul<false>, py::arg("x"), py::arg("w"), py::arg("out"));
  m.def("matmul_int8", &matmul<true>, py::arg("x"), py::arg("w"), py::arg("out"));
  py::class_<ExpertWeights>(m, "ExpertWeights", py::module_local())
      .def(py::init<py::object, py::object, py::object>(), py::arg("w1"), py::arg("w3"), py::arg("w2"));
  m.def("experts", &experts, py::arg("x"), py::arg("weights"), py::arg("rows"), py::arg("act"), py::arg("slots"),
        py::arg("slot_ids"), py::arg("int8") = false);
  m.def("glu", &glu, py::arg("gate"), py::arg("up"), py::arg("act"), py::arg("out"));
  m.def("rmsnorm", &rmsnorm, py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("out"));
  m.def("l2norm", &l2norm, py::arg("x"), py::arg("eps"), py::arg("scale"), py::arg("out"));
  m.def("sigmoid_mul", &sigmoid_mul, py::arg("x"), py::arg("gate"), py::arg("out"));
  m.def("exp", &elementwise<&Ops::exp>, py::arg("x"), py::arg("out"));
  m.def("sigmoid", &elementwise<&Ops::sigmoid>, py::arg("x"), py::arg("out"));
  m.def("tanh", &elementwise<&Ops::tanh>, py::arg("x"), py::arg("out"));
  m.def("softplus", &elementwise<&Ops::softplus>, py::arg("x"), py::arg("out"));
  m.def("short_conv", &short_conv, py::arg("x"), py::arg("weight"), py::arg("window"), py::arg("out"));
  m.def("kda_decay", &kda_decay, py::arg("z"), py::arg("a_log"), py::arg("dt_bias"), py::arg("lower_bound"),
        py::arg("alpha"));
  m.def("kda_recurrence", &kda_recurrence, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("alpha"), py::arg("beta"),
        py::arg("state"), py::arg("out"));
  m.def("absorb_query", &absorb_query, py::arg("q"), py::arg("w_kvb"), py::arg("dv"), py::arg("out"));
  m.def("expand_values", &expand_values, py::arg("ctx"), py::arg("w_kvb"), py::arg("dn"), py::arg("out"));
  m.def("mla_attention", &mla_attention, py::arg("q"), py::arg("cache"), py::arg("start"), py::arg("scale"),
        py::arg("out"));
  m.def("attnres_mix", &attnres_mix, py::arg("bank"), py::arg("n"), py::arg("prefix"), py::arg("w"), py::arg("eps"),
        py::arg("out"));
  m.def("route", &route, py::arg("logits"), py::arg("bias"), py::arg("k"), py::arg("renormalize"), py::arg("scaling"),
        py::arg("ids"), py::arg("weights"));
  m.def("combine", &combine, py::arg("slots"), py::arg("weights"), py::arg("out"));
  m.def("widen", &widen, py::arg("src"), py::arg("out"));
  m.def("finite", &all_finite, py::arg("x"));
  m.def("mxfp4_scales_valid", &mxfp4_scales_valid, py::arg("scales"));

  m.def("isa", [] { return std::string(ops().name); });
  m.def("available_isas", &available_isas);
  m.def("set_isa", &set_isa, py::arg("name"));
  m.def("configure_threads", &configure_threads, py::arg("n"), py::arg("cpus") = py::none(),
        py::arg("spin_us") = 50, py::arg("homes") = py::none());
  m.def("set_widths", &set_widths, py::arg("others") = 0, py::arg("experts") = 0);
  m.def("read_memory", &read_memory, py::arg("array"));
  m.def("wake_seconds", [] {
    py::gil_scoped_release release;
    return driver::wake_seconds();
  });
  m.def("touch_memory", &touch_memory, py::arg("array"), py::arg("node"));
  m.def("thread_count", [] { return Pool::instance().size(); });
  m.def("scratch_bytes", [] {
    py::gil_scoped_release release;
    Pool::Lease lease;
    return lease.pool().scratch_bytes();
  });

  set_ops(find_isa(available_isas().front()));
}
