// Product of a small batch with a weight: every weight element is read once, in place, and
// multiplied with all rows at once. The sums of several outputs are kept in registers.

#include <stdint.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#define LANES 16  // rows (or outputs) per vector
#define MAX_VECS 4
#define MAX_ROWS (LANES * MAX_VECS)
#define MAX_OUT 8  // outputs whose sums are in registers at the same time
#define MAX_HALVES 12  // the same for rows that fill half a vector
#define QUAD_SPACING 4  // of every QUAD_SPACING outputs, one loads its inputs by fours
#define CHAIN 512
#define LINE 16  // floats of a cache line

// Cache lines are prefetched PREFETCH_LINES lines in advance. An L1 cache of 32 kB stalls on its
// own prefetches and evicts lines before use, so there the L2 cache is the target.
#ifdef WIDE  // the processor executes AVX-512 vectors in one piece
#define PREFETCH_LINES 10
#define PREFETCH(p) __builtin_prefetch(p, 0, 3)
#else
#define PREFETCH_LINES 26
#define PREFETCH(p) __builtin_prefetch(p, 0, 2)
#endif

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float memory_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }

// Number of outputs that share a vector if the rows fill only half or a quarter of one. (With 2, a
// processor that is not WIDE computes one output in half a vector instead.)
INLINE int sharing(int64_t n_rows) {
#ifdef __AVX512F__
  if (n_rows <= LANES / 4) return 4;
#endif
  return n_rows <= LANES / 2 ? 2 : 1;
}

// The adjacent rows of an input at x, repeated for each output that shares the vector.
INLINE vec rows_of(const int share, const float *x) {
#ifdef __AVX512F__
  if (share == 2) return (vec)_mm512_broadcast_f64x4(_mm256_loadu_pd((const double *)x));
  if (share == 4) return (vec)_mm512_broadcast_f32x4(_mm_loadu_ps(x));
#endif
  return *(const memory_vec *)x;
}

// What attention reads next: `left` floats at keys and at values.
typedef struct {
  const float *keys, *values;
  int64_t left;
} PrefetchRange;

// Prefetches up to n_lines lines of both. Only a few at a time, here and below: a core stalls on
// many outstanding prefetches.
INLINE void prefetch_range(PrefetchRange *next, int64_t n_lines) {
  for (int64_t i = 0; i < n_lines && next->left > 0; i++, next->left -= LINE) {
    PREFETCH(next->keys), next->keys += LINE;
    PREFETCH(next->values), next->values += LINE;
  }
}

// At input k, prefetches PREFETCH_LINES lines ahead for outputs from .. to of n_out; past their
// end, the first inputs of the next outputs.
INLINE void prefetch_lines(const int from, const int to, const int n_out, const float *w, int64_t k, int64_t n_in) {
  const int64_t ahead = k + PREFETCH_LINES * LINE, there = ahead < n_in ? ahead : ahead + (n_out - 1) * n_in;
  UNROLL for (int o = from; o < to; o++) PREFETCH(w + o * n_in + there);
}

// sums[o][v] += x (vector v) times w (output o), over the next `depth` inputs.
INLINE void add(const int share, const int n_vecs, const int n_out, const int depth, const float *x, const float *w,
                int64_t stride, vec (*sums)[MAX_VECS]) {
  const float *row[MAX_OUT];
  UNROLL for (int o = 0; o < n_out; o++) row[o] = w + o * stride;
  UNROLL for (int k = 0; k < depth; k++)
    UNROLL for (int o = 0; o < n_out; o++)
      UNROLL for (int v = 0; v < n_vecs; v++)
        sums[o][v] += rows_of(share, x + (k * n_vecs + v) * LANES / share) * row[o][k];
}

// y[r][o] <- x[r] w[o]ᵀ for n_out outputs and all rows. x: [in][rows], n_vecs vectors or part of
// one.
INLINE void outputs(const int share, const int n_vecs, const int n_out, const float *x, const float *w, int64_t n_in,
                    PrefetchRange *next, float *y, int64_t n_rows, int64_t y_stride) {
  const int width = n_vecs * LANES / share;
  vec total[MAX_OUT][MAX_VECS];
  for (int64_t start = 0; start < n_in; start += CHAIN) {
    const int64_t end = minimum(start + CHAIN, n_in);
    vec chain[MAX_OUT][MAX_VECS];
    UNROLL for (int o = 0; o < n_out; o++) UNROLL for (int v = 0; v < n_vecs; v++) chain[o][v] = (vec){0};
    int64_t k = start;
    for (; k + LINE <= end; k += LINE) {
      next ? prefetch_range(next, n_out / 2) : prefetch_lines(0, n_out, n_out, w, k, n_in);
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
// Four inputs of each of `share` outputs, repeated to fill a vector.
INLINE __m512 input_quads(const int share, const float *w, int64_t stride) {
  __m512 v = _mm512_broadcast_f32x4(_mm_loadu_ps(w));
  UNROLL for (int o = 1; o < share; o++)
    v = _mm512_mask_broadcast_f32x4(v, 0xffff << o * LANES / share, _mm_loadu_ps(w + o * stride));
  return v;
}

// `outputs` for LANES outputs that share vectors; n_in is a multiple of LINE.
INLINE void shared_outputs(const int share, const float *x, const float *w, int64_t n_in, PrefetchRange *next, float *y,
                   int64_t n_rows, int64_t y_stride) {
  const int n_vecs = LANES / share;  // also the number of rows per input
  vec total[LANES / 2];
  for (int64_t start = 0; start < n_in; start += CHAIN) {
    const int64_t end = minimum(start + CHAIN, n_in);
    vec chain[LANES / 2];
    UNROLL for (int v = 0; v < n_vecs; v++) chain[v] = (vec){0};
    for (int64_t k = start; k < end; k += LINE) {
      UNROLL for (int i = 0; i < LINE; i += 4) {
        next ? prefetch_range(next, LANES / 8) : prefetch_lines(i, i + 4, LANES, w, k, n_in);
        const float *inputs = x + (k + i) * n_vecs;
        __m512 four[LANES / 2];
        vec rows[4];
        UNROLL for (int v = 0; v < n_vecs; v++) four[v] = input_quads(share, w + v * share * n_in + k + i, n_in);
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
                        int64_t n_in, int64_t n_out, PrefetchRange *next, float *y, int64_t n_rows, int64_t y_stride) {
  int64_t o = 0;
#ifdef __AVX512F__
  if (share > 1 && n_in % LINE == 0)
    for (; o + LANES <= n_out; o += LANES) shared_outputs(share, x, w + o * n_in, n_in, next, y + o, n_rows, y_stride);
#endif
  for (; o + at_once <= n_out; o += at_once)
    outputs(share, n_vecs, at_once, x, w + o * n_in, n_in, next, y + o, n_rows, y_stride);
  for (; o < n_out; o++) outputs(share, n_vecs, 1, x, w + o * n_in, n_in, next, y + o, n_rows, y_stride);
}

#ifndef WIDE
typedef float half __attribute__((vector_size(2 * LANES)));
typedef float memory_half __attribute__((vector_size(2 * LANES), aligned(4), may_alias));

// Four inputs of an output, twice; and one of four broadcast to all lanes.
INLINE half four_inputs_twice(const float *w) {
#ifdef __AVX__
  return (half)_mm256_broadcast_ps((const __m128 *)w);
#else
  return (half){w[0], w[1], w[2], w[3], w[0], w[1], w[2], w[3]};
#endif
}
INLINE half broadcast_lane(half four, const int i) {
#ifdef __AVX__
  return (half)_mm256_permute_ps((__m256)four, i * 0x55);
#else
  return four[i] - (half){0};
#endif
}

// `outputs` for rows that fill half a vector, on a processor that takes twice as long for a whole
// one. Loads would be the bottleneck, so every QUAD_SPACING-th output loads its inputs by fours.
INLINE void half_outputs(const int n_out, const float *x, const float *w, int64_t n_in, PrefetchRange *next, float *y,
                   int64_t n_rows, int64_t y_stride) {
  const memory_half *rows = (const memory_half *)x;
  half total[MAX_HALVES];
  for (int64_t start = 0; start < n_in; start += CHAIN) {
    const int64_t end = minimum(start + CHAIN, n_in);
    half chain[MAX_HALVES], four[MAX_HALVES];
    UNROLL for (int o = 0; o < n_out; o++) chain[o] = (half){0};
    int64_t k = start;
    for (; k + LINE <= end; k += LINE)
      UNROLL for (int i = 0; i < LINE; i += 4) {
        next ? prefetch_range(next, n_out / 6) : prefetch_lines(i * n_out / LINE, (i + 4) * n_out / LINE, n_out, w, k, n_in);
        UNROLL for (int o = 0; o < n_out; o += QUAD_SPACING) four[o] = four_inputs_twice(w + o * n_in + k + i);
        UNROLL for (int j = 0; j < 4; j++)
          UNROLL for (int o = 0; o < n_out; o++)
            chain[o] += rows[k + i + j] * (o % QUAD_SPACING ? w[o * n_in + k + i + j] - (half){0} : broadcast_lane(four[o], j));
      }
    for (; k < end; k++) UNROLL for (int o = 0; o < n_out; o++) chain[o] += rows[k] * w[o * n_in + k];
    UNROLL for (int o = 0; o < n_out; o++) total[o] = start ? total[o] + chain[o] : chain[o];
  }
  for (int64_t r = 0; r < n_rows; r++) UNROLL for (int o = 0; o < n_out; o++) y[r * y_stride + o] = total[o][r];
}

INLINE void all_half_outputs(const float *x, const float *w, int64_t n_in, int64_t n_out, PrefetchRange *next, float *y,
                       int64_t n_rows, int64_t y_stride) {
  int64_t o = 0;
  for (; o + MAX_HALVES <= n_out; o += MAX_HALVES)
    half_outputs(MAX_HALVES, x, w + o * n_in, n_in, next, y + o, n_rows, y_stride);
  for (; o + 4 <= n_out; o += 4) half_outputs(4, x, w + o * n_in, n_in, next, y + o, n_rows, y_stride);
  for (; o < n_out; o++) half_outputs(1, x, w + o * n_in, n_in, next, y + o, n_rows, y_stride);
}
#endif

static void product(const float *x, const float *w, int64_t n_in, int64_t n_out, PrefetchRange *next, float *y,
                    int64_t n_rows, int64_t y_stride) {
  switch (sharing(n_rows)) {
    case 4: return all_outputs(4, 1, 8, x, w, n_in, n_out, next, y, n_rows, y_stride);
#ifdef WIDE
    case 2: return all_outputs(2, 1, 8, x, w, n_in, n_out, next, y, n_rows, y_stride);
#else
    case 2: return all_half_outputs(x, w, n_in, n_out, next, y, n_rows, y_stride);
#endif
  }
  switch ((n_rows + LANES - 1) / LANES) {
    case 1: return all_outputs(1, 1, 8, x, w, n_in, n_out, next, y, n_rows, y_stride);
    case 2: return all_outputs(1, 2, 8, x, w, n_in, n_out, next, y, n_rows, y_stride);
    case 3: return all_outputs(1, 3, 8, x, w, n_in, n_out, next, y, n_rows, y_stride);
    default: return all_outputs(1, 4, 6, x, w, n_in, n_out, next, y, n_rows, y_stride);
  }
}

// Perfect shuffle; four of them transpose LANES x LANES.
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

// Floats per input in the interleaved rows: whole vectors or part of one. Unused lanes are 0.
INLINE int64_t row_lanes(int64_t n_rows) {
  const int share = sharing(n_rows);
  return share > 1 ? LANES / share : (n_rows + LANES - 1) / LANES * LANES;
}

// out: [in][row_lanes] <- x: [rows][in]. Writes up to LANES floats past the end.
static void interleave_rows(const float *x, int64_t n_rows, int64_t n_in, float *out) {
  const int64_t width = row_lanes(n_rows);
  for (int64_t v = 0; v < width; v += LANES) {
    const int64_t rows = minimum(LANES, n_rows - v);
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
      for (int i = 0; i < minimum(LANES, width); i++) out[k * width + v + i] = i < rows ? first[i * n_in + k] : 0;
  }
}
