// The product of few rows with a weight: every element of the weight is read once, where it lies, and multiplied with
// all rows at once, some outputs at a time, their sums in registers.

#include <stdint.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#define LANES 16  // rows, or outputs, of a vector
#define MAX_VECS 4
#define MAX_ROWS (LANES * MAX_VECS)
#define MAX_OUT 8  // outputs whose sums lie in registers together
#define MAX_HALVES 12  // and of as many rows as half a vector holds
#define SPREAD 4  // of so many outputs of these, one is loaded by fours
#define CHAIN 512
#define LINE 16  // floats of a cache line

// Lines are fetched AHEAD before they are needed. A first cache of 32 kB soon waits for its own fetches and drops lines
// before they are read: there the second is fetched into.
#ifdef WIDE  // a processor that computes vectors of AVX-512 whole
#define AHEAD 10
#define FETCH(p) __builtin_prefetch(p, 0, 3)
#else
#define AHEAD 26
#define FETCH(p) __builtin_prefetch(p, 0, 2)
#endif

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float memory_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// How many outputs share a vector where there are so few rows that they fill half or a quarter of one. (Of two, a
// processor that is not WIDE computes one, in half a vector.)
INLINE int sharing(int64_t n_rows) {
#ifdef __AVX512F__
  if (n_rows <= LANES / 4) return 4;
#endif
  return n_rows <= LANES / 2 ? 2 : 1;
}

// The rows of an input that lie side by side at x, once for each output that shares a vector.
INLINE vec rows_of(const int share, const float *x) {
#ifdef __AVX512F__
  if (share == 2) return (vec)_mm512_broadcast_f64x4(_mm256_loadu_pd((const double *)x));
  if (share == 4) return (vec)_mm512_broadcast_f32x4(_mm_loadu_ps(x));
#endif
  return *(const memory_vec *)x;
}

// What attention reads next: `left` numbers at keys, and at values.
typedef struct {
  const float *keys, *values;
  int64_t left;
} Next;

// Fetches up to so many lines of both. Here as below a few at a time: a core waits where many are on their way.
INLINE void fetch_next(Next *next, int64_t n_lines) {
  for (int64_t i = 0; i < n_lines && next->left > 0; i++, next->left -= LINE) {
    FETCH(next->keys), next->keys += LINE;
    FETCH(next->values), next->values += LINE;
  }
}

// Fetches, at input k, AHEAD lines on of outputs from .. to of n_out; behind their end the first inputs of the next.
INLINE void fetch(const int from, const int to, const int n_out, const float *w, int64_t k, int64_t n_in) {
  const int64_t ahead = k + AHEAD * LINE, there = ahead < n_in ? ahead : ahead + (n_out - 1) * n_in;
  UNROLL for (int o = from; o < to; o++) FETCH(w + o * n_in + there);
}

// sums[o][v] += x of vector v times w of output o, over the next `depth` inputs.
INLINE void add(const int share, const int n_vecs, const int n_out, const int depth, const float *x, const float *w,
                int64_t stride, vec (*sums)[MAX_VECS]) {
  const float *row[MAX_OUT];
  UNROLL for (int o = 0; o < n_out; o++) row[o] = w + o * stride;
  UNROLL for (int k = 0; k < depth; k++)
    UNROLL for (int o = 0; o < n_out; o++)
      UNROLL for (int v = 0; v < n_vecs; v++)
        sums[o][v] += rows_of(share, x + (k * n_vecs + v) * LANES / share) * row[o][k];
}

// y[r][o] <- x[r] w[o]ᵀ of n_out outputs and all rows. x: [in][rows], in n_vecs vectors or a part of one.
INLINE void outputs(const int share, const int n_vecs, const int n_out, const float *x, const float *w, int64_t n_in,
                    Next *next, float *y, int64_t n_rows, int64_t y_stride) {
  const int width = n_vecs * LANES / share;
  vec total[MAX_OUT][MAX_VECS];
  for (int64_t start = 0; start < n_in; start += CHAIN) {
    const int64_t end = least(start + CHAIN, n_in);
    vec chain[MAX_OUT][MAX_VECS];
    UNROLL for (int o = 0; o < n_out; o++) UNROLL for (int v = 0; v < n_vecs; v++) chain[o][v] = (vec){0};
    int64_t k = start;
    for (; k + LINE <= end; k += LINE) {
      next ? fetch_next(next, n_out / 2) : fetch(0, n_out, n_out, w, k, n_in);
      add(share, n_vecs, n_out, LINE, x + k * width, w + k, n_in, chain);
    }
    for (; k < end; k++) add(share, n_vecs, n_out, 1, x + k * width, w + k, n_in, chain);
    UNROLL for (int o = 0; o < n_out; o++)
      UNROLL for (int v = 0; v < n_vecs; v++) total[o][v] = start ? total[o][v] + chain[o][v] : chain[o][v];
  }
  for (int64_t r = 0; r < n_rows; r++)
    UNROLL for (int o = 0; o < n_out; o++) y[r * y_stride + o] = total[o][r / LANES][r % LANES];
}

#ifdef __AVX512F__
// Four inputs of `share` outputs, side by side, each as often as it takes to fill a vector.
INLINE __m512 quads(const int share, const float *w, int64_t stride) {
  __m512 v = _mm512_broadcast_f32x4(_mm_loadu_ps(w));
  UNROLL for (int o = 1; o < share; o++)
    v = _mm512_mask_broadcast_f32x4(v, 0xffff << o * LANES / share, _mm_loadu_ps(w + o * stride));
  return v;
}

// `outputs` of LANES outputs that share vectors, for whole lines of inputs.
INLINE void shared(const int share, const float *x, const float *w, int64_t n_in, Next *next, float *y,
                   int64_t n_rows, int64_t y_stride) {
  const int n_vecs = LANES / share;  // and the rows of an input
  vec total[LANES / 2];
  for (int64_t start = 0; start < n_in; start += CHAIN) {
    const int64_t end = least(start + CHAIN, n_in);
    vec chain[LANES / 2];
    UNROLL for (int v = 0; v < n_vecs; v++) chain[v] = (vec){0};
    for (int64_t k = start; k < end; k += LINE) {
      UNROLL for (int i = 0; i < LINE; i += 4) {
        next ? fetch_next(next, LANES / 8) : fetch(i, i + 4, LANES, w, k, n_in);
        const float *inputs = x + (k + i) * n_vecs;
        __m512 four[LANES / 2];
        vec rows[4];
        UNROLL for (int v = 0; v < n_vecs; v++) four[v] = quads(share, w + v * share * n_in + k + i, n_in);
        UNROLL for (int j = 0; j < 4; j++) rows[j] = rows_of(share, inputs + j * n_vecs);
        UNROLL for (int v = 0; v < n_vecs; v++) chain[v] += (vec)_mm512_permute_ps(four[v], 0x00) * rows[0];
        UNROLL for (int v = 0; v < n_vecs; v++) chain[v] += (vec)_mm512_permute_ps(four[v], 0x55) * rows[1];
        UNROLL for (int v = 0; v < n_vecs; v++) chain[v] += (vec)_mm512_permute_ps(four[v], 0xaa) * rows[2];
        UNROLL for (int v = 0; v < n_vecs; v++) chain[v] += (vec)_mm512_permute_ps(four[v], 0xff) * rows[3];
      }
    }
    UNROLL for (int v = 0; v < n_vecs; v++) total[v] = start ? total[v] + chain[v] : chain[v];
  }
  for (int64_t r = 0; r < n_rows; r++)
    UNROLL for (int o = 0; o < LANES; o++) y[r * y_stride + o] = total[o / share][o % share * n_vecs + r];
}
#endif

INLINE void all_outputs(const int share, const int n_vecs, const int at_once, const float *x, const float *w,
                        int64_t n_in, int64_t n_out, Next *next, float *y, int64_t n_rows, int64_t y_stride) {
  int64_t o = 0;
#ifdef __AVX512F__
  if (share > 1 && n_in % LINE == 0)
    for (; o + LANES <= n_out; o += LANES) shared(share, x, w + o * n_in, n_in, next, y + o, n_rows, y_stride);
#endif
  for (; o + at_once <= n_out; o += at_once)
    outputs(share, n_vecs, at_once, x, w + o * n_in, n_in, next, y + o, n_rows, y_stride);
  for (; o < n_out; o++) outputs(share, n_vecs, 1, x, w + o * n_in, n_in, next, y + o, n_rows, y_stride);
}

#ifndef WIDE
typedef float half __attribute__((vector_size(2 * LANES)));
typedef float memory_half __attribute__((vector_size(2 * LANES), aligned(4), may_alias));

// Four inputs of an output, twice, and one of them in all lanes.
INLINE half twice(const float *w) {
#ifdef __AVX__
  return (half)_mm256_broadcast_ps((const __m128 *)w);
#else
  return (half){w[0], w[1], w[2], w[3], w[0], w[1], w[2], w[3]};
#endif
}
INLINE half everywhere(half four, const int i) {
#ifdef __AVX__
  return (half)_mm256_permute_ps((__m256)four, i * 0x55);
#else
  return four[i] - (half){0};
#endif
}

// `outputs` of rows that fill half a vector, for a processor that takes twice as long for a whole one. It would wait
// for loads: every SPREAD-th output's inputs are loaded by fours.
INLINE void halves(const int n_out, const float *x, const float *w, int64_t n_in, Next *next, float *y,
                   int64_t n_rows, int64_t y_stride) {
  const memory_half *rows = (const memory_half *)x;
  half total[MAX_HALVES];
  for (int64_t start = 0; start < n_in; start += CHAIN) {
    const int64_t end = least(start + CHAIN, n_in);
    half chain[MAX_HALVES], four[MAX_HALVES];
    UNROLL for (int o = 0; o < n_out; o++) chain[o] = (half){0};
    int64_t k = start;
    for (; k + LINE <= end; k += LINE)
      UNROLL for (int i = 0; i < LINE; i += 4) {
        next ? fetch_next(next, n_out / 6) : fetch(i * n_out / LINE, (i + 4) * n_out / LINE, n_out, w, k, n_in);
        UNROLL for (int o = 0; o < n_out; o += SPREAD) four[o] = twice(w + o * n_in + k + i);
        UNROLL for (int j = 0; j < 4; j++)
          UNROLL for (int o = 0; o < n_out; o++)
            chain[o] += rows[k + i + j] * (o % SPREAD ? w[o * n_in + k + i + j] - (half){0} : everywhere(four[o], j));
      }
    for (; k < end; k++) UNROLL for (int o = 0; o < n_out; o++) chain[o] += rows[k] * w[o * n_in + k];
    UNROLL for (int o = 0; o < n_out; o++) total[o] = start ? total[o] + chain[o] : chain[o];
  }
  for (int64_t r = 0; r < n_rows; r++) UNROLL for (int o = 0; o < n_out; o++) y[r * y_stride + o] = total[o][r];
}

INLINE void all_halves(const float *x, const float *w, int64_t n_in, int64_t n_out, Next *next, float *y,
                       int64_t n_rows, int64_t y_stride) {
  int64_t o = 0;
  for (; o + MAX_HALVES <= n_out; o += MAX_HALVES)
    halves(MAX_HALVES, x, w + o * n_in, n_in, next, y + o, n_rows, y_stride);
  for (; o + 4 <= n_out; o += 4) halves(4, x, w + o * n_in, n_in, next, y + o, n_rows, y_stride);
  for (; o < n_out; o++) halves(1, x, w + o * n_in, n_in, next, y + o, n_rows, y_stride);
}
#endif

static void product(const float *x, const float *w, int64_t n_in, int64_t n_out, Next *next, float *y,
                    int64_t n_rows, int64_t y_stride) {
  switch (sharing(n_rows)) {
    case 4: return all_outputs(4, 1, 8, x, w, n_in, n_out, next, y, n_rows, y_stride);
#ifdef WIDE
    case 2: return all_outputs(2, 1, 8, x, w, n_in, n_out, next, y, n_rows, y_stride);
#else
    case 2: return all_halves(x, w, n_in, n_out, next, y, n_rows, y_stride);
#endif
  }
  switch ((n_rows + LANES - 1) / LANES) {
    case 1: return all_outputs(1, 1, 8, x, w, n_in, n_out, next, y, n_rows, y_stride);
    case 2: return all_outputs(1, 2, 8, x, w, n_in, n_out, next, y, n_rows, y_stride);
    case 3: return all_outputs(1, 3, 8, x, w, n_in, n_out, next, y, n_rows, y_stride);
    default: return all_outputs(1, 4, 6, x, w, n_in, n_out, next, y, n_rows, y_stride);
  }
}

// The perfect shuffle that, done four times, transposes LANES x LANES.
INLINE void shuffle(const vec *a, vec *b) {
  UNROLL for (int i = 0; i < LANES / 2; i++) {
    const vec low = a[i], high = a[i + LANES / 2];
    b[2 * i] = __builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    b[2 * i + 1] = __builtin_shufflevector(low, high, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
}

INLINE void transpose(vec *a, vec *scratch) {
  shuffle(a, scratch), shuffle(scratch, a), shuffle(a, scratch), shuffle(scratch, a);
}

// The floats that an input's rows take: whole vectors, or a part of one. Lanes without a row are 0.
INLINE int64_t row_lanes(int64_t n_rows) {
  const int share = sharing(n_rows);
  return share > 1 ? LANES / share : (n_rows + LANES - 1) / LANES * LANES;
}

// out: [in][row_lanes] <- x: [rows][in]. Writes up to LANES floats behind the end.
static void side_by_side(const float *x, int64_t n_rows, int64_t n_in, float *out) {
  const int64_t width = row_lanes(n_rows);
  for (int64_t v = 0; v < width; v += LANES) {
    const int64_t rows = least(LANES, n_rows - v);
    const float *first = x + v * n_in;
    int64_t k = 0;
    for (; k + LANES <= n_in; k += LANES) {
      vec a[LANES], b[LANES];
      for (int i = 0; i < LANES; i++) a[i] = (vec){0};
      for (int i = 0; i < rows; i++) a[i] = *(const memory_vec *)(first + i * n_in + k);
      transpose(a, b);
      UNROLL for (int i = 0; i < LANES; i++) *(memory_vec *)(out + (k + i) * width + v) = a[i];
    }
    for (; k < n_in; k++)
      for (int i = 0; i < least(LANES, width); i++) out[k * width + v + i] = i < rows ? first[i * n_in + k] : 0;
  }
}
