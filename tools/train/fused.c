/* The parts of the training pass that PyTorch does in dozens of small passes over memory, each in one.
 *
 * Owns forward and backward of: the KDA layer between its matrix products (convolution, SiLU, normalisation, decay,
 * delta rule as a recurrence, output norm and gate), the attention-residual mix with the norm that follows it, and
 * SiTU. The definitions are those of network.py, which also runs without this file; a test holds one against the
 * other. float32, contiguous; built at start by fused.py with -O3 -ffast-math; training only.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define D 32 /* head dim: a constant, so that a state row is four vectors */
#define C 16 /* positions between kept states */
#define TAPS 4

/* Beyond +-80 both functions are at their limits, and e^x would overflow: under -ffast-math a division by infinity
 * goes through an approximate reciprocal and gives NaN. */
static inline float held(float x) { return x < -80 ? -80 : x > 80 ? 80 : x; }
static inline float sigmoidf_(float x) { return 1.0f / (1.0f + expf(-held(x))); }
static inline float tanhf_(float x) { return 1 - 2 / (1 + expf(held(2 * x))); }

/* a[T][D]: convolution of channel block `col` of head h before SiLU */
static void conv_block(int T, int W, const float *ev, const float *taps, float *a) {
  for (int t = 0; t < T; t++)
    for (int d = 0; d < D; d++) {
      float s = 0;
      for (int j = 0; j < TAPS; j++) {
        int u = t - (TAPS - 1) + j;
        if (u >= 0) s += taps[d * TAPS + j] * ev[(size_t)u * W + d];
      }
      a[t * D + d] = s;
    }
}

static void silu_l2(int T, const float *a, float scale, int normalise, float *x) {
  for (int t = 0; t < T; t++) {
    const float *at = a + t * D;
    float *xt = x + t * D, sum = 0;
    for (int d = 0; d < D; d++) xt[d] = at[d] * sigmoidf_(at[d]);
    if (!normalise) continue;
    for (int d = 0; d < D; d++) sum += xt[d] * xt[d];
    float r = scale / sqrtf(sum + 1e-6f);
    for (int d = 0; d < D; d++) xt[d] *= r;
  }
}

/* one step: S' = alpha S; u = S'^T k; w = beta (v - u); S = S' + k w^T. keeps S' and w if asked */
static inline void step(float *restrict S, const float *restrict al, const float *restrict k, const float *restrict v,
                        float beta, float *restrict w) {
  float u[D] = {0};
  for (int i = 0; i < D; i++) {
    float a = al[i], ki = k[i];
    for (int j = 0; j < D; j++) {
      S[i * D + j] *= a;
      u[j] += S[i * D + j] * ki;
    }
  }
  for (int j = 0; j < D; j++) w[j] = beta * (v[j] - u[j]);
}

static inline void rank1(float *restrict S, const float *restrict k, const float *restrict w) {
  for (int i = 0; i < D; i++)
    for (int j = 0; j < D; j++) S[i * D + j] += k[i] * w[j];
}

/* ev [B,T,W]: q | k | v | gate | low | beta. keep: per (b,h) 5 blocks of [T][D]: q k v alpha o. marks: [B,H,T/C,D,D] */
void kda_forward(int B, int T, int H, int W, const float *ev, const float *taps, const float *z, const float *dt,
                 const float *a_log, const float *o_norm, float eps, float lower, float *y, float *keep, float *marks) {
  float *a = malloc(sizeof(float) * T * D);
  int HD = H * D;
  for (int b = 0; b < B; b++)
    for (int h = 0; h < H; h++) {
      const float *base = ev + (size_t)b * T * W;
      float *q = keep + (size_t)(b * H + h) * 5 * T * D, *k = q + T * D, *v = k + T * D, *al = v + T * D, *o = al + T * D;
      float *dst[3] = {q, k, v};
      for (int m = 0; m < 3; m++) {
        int col = m * HD + h * D;
        conv_block(T, W, base + col, taps + col * TAPS, a);
        silu_l2(T, a, m == 0 ? 1.0f / sqrtf(D) : 1.0f, m < 2, dst[m]);
      }
      float rate = expf(a_log[h]);
      for (int t = 0; t < T; t++) {
        const float *zt = z + ((size_t)b * T + t) * HD + h * D;
        for (int d = 0; d < D; d++) al[t * D + d] = expf(lower * sigmoidf_(rate * (zt[d] + dt[h * D + d])));
      }
      float S[D * D] = {0}, w[D];
      float *mark = marks + (size_t)(b * H + h) * (T / C) * D * D;
      for (int t = 0; t < T; t++) {
        if (t % C == 0) memcpy(mark + (t / C) * D * D, S, sizeof S);
        float beta = sigmoidf_(base[(size_t)t * W + 4 * HD + D + h]);
        step(S, al + t * D, k + t * D, v + t * D, beta, w);
        rank1(S, k + t * D, w);
        float ot[D] = {0}, sum = 0;
        for (int i = 0; i < D; i++)
          for (int j = 0; j < D; j++) ot[j] += S[i * D + j] * q[t * D + i];
        for (int j = 0; j < D; j++) sum += ot[j] * ot[j];
        float inv = 1.0f / sqrtf(sum / D + eps);
        const float *g = base + (size_t)t * W + 3 * HD + h * D;
        float *yt = y + ((size_t)b * T + t) * HD + h * D;
        for (int j = 0; j < D; j++) {
          o[t * D + j] = ot[j];
          yt[j] = ot[j] * inv * o_norm[j] * sigmoidf_(g[j]);
        }
      }
    }
  free(a);
}

/* d_ev: every column but `low` is written. d_taps, d_dt, d_alog, d_onorm are added to. */
void kda_backward(int B, int T, int H, int W, const float *ev, const float *taps, const float *z, const float *dt,
                  const float *a_log, const float *o_norm, float eps, float lower, const float *keep, const float *marks,
                  const float *dy, float *d_ev, float *dz, float *d_taps, float *d_dt, float *d_alog, float *d_onorm) {
  int HD = H * D;
  size_t block = (size_t)T * D;
  float *buf = malloc(sizeof(float) * block * 6);
  float *dq = buf, *dk = dq + block, *dv = dk + block, *dg = dv + block, *dO = dg + block, *a = dO + block;
  float *Sp = malloc(sizeof(float) * C * D * D), *ws = malloc(sizeof(float) * C * D);
  for (int b = 0; b < B; b++)
    for (int h = 0; h < H; h++) {
      const float *base = ev + (size_t)b * T * W;
      float *d_base = d_ev + (size_t)b * T * W;
      const float *q = keep + (size_t)(b * H + h) * 5 * block, *k = q + block, *v = k + block, *al = v + block, *o = al + block;
      for (int t = 0; t < T; t++) { /* output norm and gate */
        const float *g = base + (size_t)t * W + 3 * HD + h * D, *ot = o + t * D;
        const float *dyt = dy + ((size_t)b * T + t) * HD + h * D;
        float *dgate = d_base + (size_t)t * W + 3 * HD + h * D;
        float sum = 0, dot = 0, dn[D];
        for (int j = 0; j < D; j++) sum += ot[j] * ot[j];
        float inv = 1.0f / sqrtf(sum / D + eps);
        for (int j = 0; j < D; j++) {
          float s = sigmoidf_(g[j]), n = ot[j] * inv;
          dgate[j] = dyt[j] * n * o_norm[j] * s * (1 - s);
          d_onorm[j] += dyt[j] * s * n;
          dn[j] = dyt[j] * s * o_norm[j];
          dot += dn[j] * ot[j];
        }
        float c = dot * inv * inv / D;
        for (int j = 0; j < D; j++) dO[t * D + j] = inv * (dn[j] - ot[j] * c);
      }
      float dS[D * D] = {0}, S[D * D];
      const float *mark = marks + (size_t)(b * H + h) * (T / C) * D * D;
      for (int chunk = T / C - 1; chunk >= 0; chunk--) {
        memcpy(S, mark + chunk * D * D, sizeof S);
        for (int i = 0; i < C; i++) { /* replay, keeping S' and w of each position */
          int t = chunk * C + i;
          float beta = sigmoidf_(base[(size_t)t * W + 4 * HD + D + h]);
          step(S, al + t * D, k + t * D, v + t * D, beta, ws + i * D);
          memcpy(Sp + i * D * D, S, sizeof S);
          rank1(S, k + t * D, ws + i * D);
        }
        for (int i = C - 1; i >= 0; i--) {
          int t = chunk * C + i;
          const float *restrict P = Sp + i * D * D, *restrict w = ws + i * D, *restrict kt = k + t * D;
          const float *restrict qt = q + t * D, *restrict dot = dO + t * D, *restrict at = al + t * D;
          float raw = base[(size_t)t * W + 4 * HD + D + h], beta = sigmoidf_(raw);
          float wdo = 0, dw[D] = {0}, du[D], dbeta = 0;
          for (int j = 0; j < D; j++) wdo += w[j] * dot[j];
          for (int r = 0; r < D; r++) {
            float s1 = 0, s2 = 0, qr = qt[r], kr = kt[r];
            float *restrict row = dS + r * D;
            const float *restrict prow = P + r * D;
            for (int j = 0; j < D; j++) {
              s1 += prow[j] * dot[j];
              row[j] += qr * dot[j];
              s2 += row[j] * w[j];
              dw[j] += row[j] * kr;
            }
            dq[t * D + r] = s1 + kr * wdo; /* S = S' + k w^T */
            dk[t * D + r] = s2;
          }
          for (int j = 0; j < D; j++) {
            dv[t * D + j] = beta * dw[j];
            du[j] = -beta * dw[j];
            dbeta += dw[j] * w[j];
          }
          /* w = beta (v - u): d beta / raw = dw.(v-u) beta (1-beta) = dw.w (1-beta) */
          d_base[(size_t)t * W + 4 * HD + D + h] = dbeta * (1 - beta);
          for (int r = 0; r < D; r++) {
            float s1 = 0, s2 = 0, kr = kt[r], ar = at[r];
            float *restrict row = dS + r * D;
            const float *restrict prow = P + r * D;
            for (int j = 0; j < D; j++) {
              s1 += prow[j] * du[j];
              row[j] += kr * du[j];
              s2 += row[j] * prow[j];
              row[j] *= ar;
            }
            dk[t * D + r] += s1;
            dg[t * D + r] = s2;
          }
        }
      }
      float rate = expf(a_log[h]);
      for (int t = 0; t < T; t++) {
        size_t at = ((size_t)b * T + t) * HD + h * D;
        for (int d = 0; d < D; d++) {
          float zz = z[at + d] + dt[h * D + d], s = sigmoidf_(rate * zz);
          float e = dg[t * D + d] * lower * s * (1 - s) * rate;
          dz[at + d] = e;
          d_dt[h * D + d] += e;
          d_alog[h] += e * zz;
        }
      }
      float *dxs[3] = {dq, dk, dv};
      for (int m = 0; m < 3; m++) {
        int col = m * HD + h * D;
        float *dx = dxs[m], scale = m == 0 ? 1.0f / sqrtf(D) : 1.0f;
        conv_block(T, W, base + col, taps + col * TAPS, a);
        for (int t = 0; t < T; t++) {
          float *at = a + t * D, *dt_ = dx + t * D;
          float s[D], x[D], sum = 0, dot = 0;
          for (int d = 0; d < D; d++) {
            s[d] = sigmoidf_(at[d]);
            x[d] = at[d] * s[d];
          }
          if (m < 2) {
            for (int d = 0; d < D; d++) {
              sum += x[d] * x[d];
              dot += x[d] * dt_[d];
            }
            float r2 = 1.0f / (sum + 1e-6f), r = scale * sqrtf(r2);
            for (int d = 0; d < D; d++) dt_[d] = r * (dt_[d] - x[d] * r2 * dot);
          }
          for (int d = 0; d < D; d++) dt_[d] *= s[d] * (1 + at[d] * (1 - s[d]));
        }
        for (int t = 0; t < T; t++) {
          float *out = d_base + (size_t)t * W + col;
          const float *in = base + (size_t)t * W + col;
          for (int d = 0; d < D; d++) {
            float sum = 0;
            for (int j = 0; j < TAPS; j++) {
              int u = t + (TAPS - 1) - j;
              if (u < T) {
                sum += taps[(col + d) * TAPS + j] * dx[u * D + d];
                d_taps[(col + d) * TAPS + j] += in[d] * dx[u * D + d];
              }
            }
            out[d] = sum;
          }
        }
      }
    }
  free(buf);
  free(Sp);
  free(ws);
}

/* x = rms(sum_i c_i v_i) * w, c = softmax_i(rms(v_i) . key). sources: n pointers to [N,H]. shares: [N,n]. */
void mix_forward(int N, int H, int n, const float **v, const float *key, const float *w, float eps, float *x, float *shares) {
  float *h = malloc(sizeof(float) * H);
  for (int r = 0; r < N; r++) {
    float s[16], top = -INFINITY, total = 0;
    for (int i = 0; i < n; i++) {
      const float *vi = v[i] + (size_t)r * H;
      float sq = 0, dot = 0;
      for (int d = 0; d < H; d++) {
        sq += vi[d] * vi[d];
        dot += vi[d] * key[d];
      }
      s[i] = dot / sqrtf(sq / H + eps);
      if (s[i] > top) top = s[i];
    }
    for (int i = 0; i < n; i++) total += s[i] = expf(s[i] - top);
    memset(h, 0, sizeof(float) * H);
    for (int i = 0; i < n; i++) {
      const float *vi = v[i] + (size_t)r * H;
      float c = shares[(size_t)r * n + i] = s[i] / total;
      for (int d = 0; d < H; d++) h[d] += c * vi[d];
    }
    float sq = 0;
    for (int d = 0; d < H; d++) sq += h[d] * h[d];
    float inv = 1.0f / sqrtf(sq / H + eps);
    float *xr = x + (size_t)r * H;
    for (int d = 0; d < H; d++) xr[d] = h[d] * inv * w[d];
  }
  free(h);
}

/* dv: n pointers, written. d_key, d_w: added to. */
void mix_backward(int N, int H, int n, const float **v, const float *key, const float *w, float eps, const float *shares,
                  const float *dx, float **dv, float *d_key, float *d_w) {
  float *h = malloc(sizeof(float) * H * 2), *dh = h + H;
  for (int r = 0; r < N; r++) {
    const float *c = shares + (size_t)r * n, *dxr = dx + (size_t)r * H;
    memset(h, 0, sizeof(float) * H);
    for (int i = 0; i < n; i++) {
      const float *vi = v[i] + (size_t)r * H;
      for (int d = 0; d < H; d++) h[d] += c[i] * vi[d];
    }
    float sq = 0, dot = 0;
    for (int d = 0; d < H; d++) {
      sq += h[d] * h[d];
      dot += dxr[d] * w[d] * h[d];
    }
    float inv = 1.0f / sqrtf(sq / H + eps), back = dot * inv * inv / H;
    for (int d = 0; d < H; d++) {
      d_w[d] += dxr[d] * h[d] * inv;
      dh[d] = inv * (dxr[d] * w[d] - h[d] * back);
    }
    float a[16], rr[16], kd[16], mean = 0;
    for (int i = 0; i < n; i++) {
      const float *vi = v[i] + (size_t)r * H;
      float s = 0, k = 0, g = 0;
      for (int d = 0; d < H; d++) {
        s += vi[d] * vi[d];
        k += vi[d] * key[d];
        g += vi[d] * dh[d];
      }
      rr[i] = 1.0f / sqrtf(s / H + eps);
      kd[i] = k;
      a[i] = g;
      mean += c[i] * g;
    }
    for (int i = 0; i < n; i++) {
      const float *vi = v[i] + (size_t)r * H;
      float *o = dv[i] + (size_t)r * H;
      float ds = c[i] * (a[i] - mean) * rr[i], pull = kd[i] * rr[i] * rr[i] / H;
      for (int d = 0; d < H; d++) {
        o[d] = c[i] * dh[d] + ds * (key[d] - vi[d] * pull);
        d_key[d] += ds * vi[d];
      }
    }
  }
  free(h);
}

/* gu [N, 2I]: gate half, up half */
void situ_forward(int N, int I, float b1, float b2, const float *gu, float *y) {
  for (int r = 0; r < N; r++) {
    const float *g = gu + (size_t)r * 2 * I, *u = g + I;
    float *o = y + (size_t)r * I;
    for (int i = 0; i < I; i++) {
      float t = tanhf_(g[i] / b1), s = sigmoidf_(g[i]), v = tanhf_(u[i] / b2);
      o[i] = b1 * t * s * b2 * v;
    }
  }
}

void situ_backward(int N, int I, float b1, float b2, const float *gu, const float *dy, float *d) {
  for (int r = 0; r < N; r++) {
    const float *g = gu + (size_t)r * 2 * I, *u = g + I, *e = dy + (size_t)r * I;
    float *dg = d + (size_t)r * 2 * I, *du = dg + I;
    for (int i = 0; i < I; i++) {
      float t = tanhf_(g[i] / b1), s = sigmoidf_(g[i]), v = tanhf_(u[i] / b2);
      dg[i] = e[i] * b2 * v * ((1 - t * t) * s + b1 * t * s * (1 - s));
      du[i] = e[i] * b1 * t * s * (1 - v * v);
    }
  }
}
