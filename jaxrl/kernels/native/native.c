// Kernels for decoding on CPU, as handlers of XLA's foreign function interface. All arrays are float32, row-major.
//
// A decode step has few rows, so it is as fast as weights and keys can be read: every element of them is read once,
// where it lies, and multiplied with all rows at once, some outputs at a time, their sums in registers.
//
// A sum is a chain of fused multiply-adds over CHAIN inputs at a time, in order, and a sum of those chains. That is
// what XLA's own products do for many rows (tests/kernels/test_native.py), and no bit depends on the number of rows.

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "xla/ffi/api/c_api.h"

#define LANES 16  // rows, or outputs, of a vector
#define MAX_VECS 4
#define MAX_ROWS (LANES * MAX_VECS)
#define MAX_OUT 8    // outputs whose sums lie in registers together
#define MAX_DEPTH 256  // of a head
#define CHAIN 512
#define FEW 4  // rows that are mixed together
#define LINE 16   // floats of a cache line
#define AHEAD 12   // lines fetched before they are needed
#define STRIP 96  // outputs of a product that one thread takes at a time
#define BLOCK 64  // keys
#define MASKED -1e30f

#define UNROLL _Pragma("GCC unroll 16")
#define SETTLE(x) __asm__("" : "+m"(x))  // rounds x before anything is computed from it
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float memory_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- the product

// How many outputs share a vector where there are so few rows that they fill half or a quarter of one.
INLINE int sharing(int64_t n_rows) {
#ifdef __AVX512F__
  return n_rows <= LANES / 4 ? 4 : n_rows <= LANES / 2 ? 2 : 1;
#else
  return 1;
#endif
}

// The rows of an input that lie side by side at x, once for each output that shares a vector.
INLINE vec rows_of(const int share, const float *x) {
#ifdef __AVX512F__
  if (share == 2) return (vec)_mm512_broadcast_f64x4(_mm256_loadu_pd((const double *)x));
  if (share == 4) return (vec)_mm512_broadcast_f32x4(_mm_loadu_ps(x));
#endif
  return *(const memory_vec *)x;
}

// Fetches, at input k of n_out outputs, as many lines of what is read later: `then` numbers on, in the order of
// memory; or, where `then` is 0, AHEAD lines on of each output, behind their end the first inputs of the next ones.
INLINE void fetch(const int n_out, const float *w, int64_t k, int64_t n_in, int64_t then) {
  const int64_t next = k + AHEAD * LINE, there = next < n_in ? next : next + (n_out - 1) * n_in;
  UNROLL for (int o = 0; o < n_out; o++)
    __builtin_prefetch(then ? w + then + k * n_out + o * LINE : w + o * n_in + there, 0, 3);
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
                    int64_t then, float *y, int64_t n_rows, int64_t y_stride) {
  const int width = n_vecs * LANES / share;
  vec total[MAX_OUT][MAX_VECS];
  for (int64_t start = 0; start < n_in; start += CHAIN) {
    const int64_t end = least(start + CHAIN, n_in);
    vec chain[MAX_OUT][MAX_VECS];
    UNROLL for (int o = 0; o < n_out; o++) UNROLL for (int v = 0; v < n_vecs; v++) chain[o][v] = (vec){0};
    int64_t k = start;
    for (; k + LINE <= end; k += LINE) {
      fetch(n_out, w, k, n_in, then);
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
INLINE void shared(const int share, const float *x, const float *w, int64_t n_in, int64_t then, float *y,
                   int64_t n_rows, int64_t y_stride) {
  const int n_vecs = LANES / share;  // and the rows of an input
  if (share == 4 && !then) then = LANES * n_in;  // the next outputs
  vec total[LANES / 2];
  for (int64_t start = 0; start < n_in; start += CHAIN) {
    const int64_t end = least(start + CHAIN, n_in);
    vec chain[LANES / 2];
    UNROLL for (int v = 0; v < n_vecs; v++) chain[v] = (vec){0};
    for (int64_t k = start; k < end; k += LINE) {
      fetch(LANES, w, k, n_in, then);
      UNROLL for (int i = 0; i < LINE; i += 4) {
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
                        int64_t n_in, int64_t n_out, int64_t then, float *y, int64_t n_rows, int64_t y_stride) {
  int64_t o = 0;
#ifdef __AVX512F__
  if (share > 1 && n_in % LINE == 0)
    for (; o + LANES <= n_out; o += LANES) shared(share, x, w + o * n_in, n_in, then, y + o, n_rows, y_stride);
#endif
  for (; o + at_once <= n_out; o += at_once)
    outputs(share, n_vecs, at_once, x, w + o * n_in, n_in, then, y + o, n_rows, y_stride);
  for (; o < n_out; o++) outputs(share, n_vecs, 1, x, w + o * n_in, n_in, then, y + o, n_rows, y_stride);
}

static void product(const float *x, const float *w, int64_t n_in, int64_t n_out, int64_t then, float *y,
                    int64_t n_rows, int64_t y_stride) {
  switch (sharing(n_rows)) {
    case 4: return all_outputs(4, 1, 8, x, w, n_in, n_out, then, y, n_rows, y_stride);
    case 2: return all_outputs(2, 1, 8, x, w, n_in, n_out, then, y, n_rows, y_stride);
  }
  switch ((n_rows + LANES - 1) / LANES) {
    case 1: return all_outputs(1, 1, 8, x, w, n_in, n_out, then, y, n_rows, y_stride);
    case 2: return all_outputs(1, 2, 8, x, w, n_in, n_out, then, y, n_rows, y_stride);
    case 3: return all_outputs(1, 3, 8, x, w, n_in, n_out, then, y, n_rows, y_stride);
    default: return all_outputs(1, 4, 6, x, w, n_in, n_out, then, y, n_rows, y_stride);
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

// ---- work shared among XLA's threads

typedef struct Job {
  void (*run)(const struct Job *, int64_t item);
  int64_t n_items;
  const float *x, *w, *v;  // x: the rows of a product side by side, of attention as they came
  const int32_t *pages, *first, *last;
  float *y, *top, *total, *own;  // own: freed with the job
  float scale;
  int64_t n_rows, n_in, n_out, n_heads, n_columns, page_len;
  atomic_long next, done, holders;
} Job;

static void leave(Job *job) {
  if (atomic_fetch_sub(&job->holders, 1) > 1) return;
  free(job->own);
  free(job);
}

// Takes items until none is left. Who called XLA waits for `done`, not for tasks that came too late to find any.
static void work(void *data) {
  Job *job = data;
  for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->n_items; atomic_fetch_add(&job->done, 1))
    job->run(job, i);
  leave(job);
}

static XLA_FFI_Error *error(const XLA_FFI_Api *api, const char *message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, XLA_FFI_Error_Code_INTERNAL};
  return api->XLA_FFI_Error_Create(&args);
}

static void forget(const XLA_FFI_Api *api, XLA_FFI_Error *problem) {
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, problem};
  if (problem) api->XLA_FFI_Error_Destroy(&args);
}

static XLA_FFI_Error *run(XLA_FFI_CallFrame *call, Job filled) {
  Job *job = malloc(sizeof(Job));
  if (!job) return error(call->api, "no memory for a kernel");
  *job = filled;
  int64_t n_threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args ask = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, call->ctx,
                                            &n_threads};
  forget(call->api, call->api->XLA_FFI_ThreadPool_NumThreads(&ask));
  const int64_t n_items = job->n_items, n_tasks = least(n_threads, n_items) - 1;
  atomic_init(&job->next, 0), atomic_init(&job->done, 0);
  atomic_init(&job->holders, 2 + (n_tasks > 0 ? n_tasks : 0));
  for (int64_t i = 0; i < n_tasks; i++) {
    XLA_FFI_ThreadPool_Schedule_Args task = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, call->ctx, work, job};
    XLA_FFI_Error *problem = call->api->XLA_FFI_ThreadPool_Schedule(&task);
    if (problem) forget(call->api, problem), leave(job);
  }
  work(job);
  while (atomic_load(&job->done) < n_items) sched_yield();
  leave(job);
  return NULL;
}

// XLA asks a new handler for its version before the first call.
static int told_version(const XLA_FFI_CallFrame *call) {
  if (!call->extension_start || call->extension_start->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *about = ((XLA_FFI_Metadata_Extension *)call->extension_start)->metadata;
  about->api_version.major_version = XLA_FFI_API_MAJOR;
  about->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}

// ---- the handlers

static void run_strip(const Job *job, int64_t strip) {
  const int64_t first = strip * STRIP;
  product(job->x, job->w + first * job->n_in, job->n_in, least(STRIP, job->n_out - first), 0, job->y + first,
          job->n_rows, job->n_out);
}

// x [rows, in], w [out, in] -> y [rows, out] = x wᵀ, for up to 64 rows.
XLA_FFI_Error *few_rows(XLA_FFI_CallFrame *call) {
  if (told_version(call)) return NULL;
  const XLA_FFI_Buffer *x = call->args.args[0], *w = call->args.args[1], *y = call->rets.rets[0];
  Job job = {.run = run_strip, .w = w->data, .y = y->data, .n_rows = x->dims[0], .n_in = x->dims[1]};
  job.n_out = w->dims[0], job.n_items = (job.n_out + STRIP - 1) / STRIP;
  job.x = job.own = aligned_alloc(sizeof(vec), (job.n_in * row_lanes(job.n_rows) / LANES + 2) * sizeof(vec));
  if (!job.own) return error(call->api, "no memory for the rows of a product");
  side_by_side(x->data, job.n_rows, job.n_in, job.own);
  return run(call, job);
}

// ---- attention over pages

// XLA's exponential on CPU, operation by operation: Cephes' polynomial.
INLINE float exponential(float x) {
  x = -87.8f > x ? -87.8f : x;
  x = 88.8f < x ? 88.8f : x;
  float n = floorf(__builtin_fmaf(x, 1.44269502f, 0.5f));
  n = -127 > n ? -127 : n;
  n = 128 < n ? 128 : n;
  x = __builtin_fmaf(-n, 0.693145752f, x);
  x = __builtin_fmaf(-n, 1.42860677e-6f, x);
  float y = __builtin_fmaf(1.98756912e-4f, x, 1.39819994e-3f);
  y = __builtin_fmaf(y, x, 8.33345205e-3f);
  y = __builtin_fmaf(y, x, 4.16657962e-2f);
  y = __builtin_fmaf(y, x, 0.166666657f);
  y = __builtin_fmaf(y, x, 0.5f);
  y = __builtin_fmaf(y, x * x, x) + 1;
  // 2^n in two factors: the second is below 2^128
  const uint32_t power = ((uint32_t)(int32_t)n << 23) + 0x3f800000, most = power < 0x7f000000 ? power : 0x7f000000;
  union { float number; uint32_t bits; } low = {y}, high = {.bits = most};
  low.bits += power - most;
  return low.number * high.number;
}

// The largest lane, and the sum of all: halves of the lanes by each other, as often as it takes.
#define HALVES(v, OP)                                                                                    \
  v = OP(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)),        \
  v = OP(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)),        \
  v = OP(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)),        \
  v = OP(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))

INLINE vec larger(vec a, vec b) {
  for (int i = 0; i < LANES; i++) a[i] = b[i] > a[i] ? b[i] : a[i];
  return a;
}
INLINE vec plus(vec a, vec b) { return a + b; }

// scores[key] <- exp(score - top), 0 outside first .. last; the state takes them in and returns what scales the mean.
INLINE float soften(float *scores, int32_t first, int32_t last, float scale, float *top, float *total) {
  vec s[BLOCK / LANES], largest;
  for (int i = 0; i < BLOCK; i++) {
    const float score = scores[i] * scale;
    scores[i] = i < first || i > last ? MASKED : score;
  }
  for (int v = 0; v < BLOCK / LANES; v++) s[v] = *(const memory_vec *)(scores + v * LANES);
  largest = larger(larger(s[0], s[1]), larger(s[2], s[3]));
  HALVES(largest, larger);
  const float most = largest[0] > *top ? largest[0] : *top;
  for (int i = 0; i < BLOCK; i++) scores[i] = exponential(scores[i] - most);
  for (int v = 0; v < BLOCK / LANES; v++) s[v] = *(const memory_vec *)(scores + v * LANES);
  vec sums = s[0] + s[1] + s[2] + s[3];
  HALVES(sums, plus);
  const float keep = exponential(*top - most);
  float kept = *total * keep;
  SETTLE(kept);
  *top = most, *total = kept + sums[0];
  return keep;
}

// n_vecs vectors of outputs of n_rows rows: y[r] += Σ over the first keys of weight[r][key] value[key].
INLINE void mix(const int n_vecs, const int n_rows, int64_t n_keys, const float *weights, const float *values,
                int64_t width, int64_t then, float *y) {
  vec sums[FEW][MAX_VECS];
  UNROLL for (int r = 0; r < n_rows; r++) UNROLL for (int v = 0; v < n_vecs; v++) sums[r][v] = (vec){0};
  for (int64_t key = 0; key < n_keys; key++, values += width) {
    UNROLL for (int v = 0; v < n_vecs; v++) __builtin_prefetch(values + v * LANES + then, 0, 3);
    UNROLL for (int r = 0; r < n_rows; r++)
      UNROLL for (int v = 0; v < n_vecs; v++)
        sums[r][v] += weights[r * BLOCK + key] * *(const memory_vec *)(values + v * LANES);
  }
  UNROLL for (int r = 0; r < n_rows; r++)
    UNROLL for (int v = 0; v < n_vecs; v++) *(memory_vec *)(y + r * width + v * LANES) += sums[r][v];
}

INLINE void mix_rows(const int n_vecs, int64_t n_rows, int64_t n_keys, const float *weights, const float *values,
                     int64_t width, int64_t then, float *y) {
  for (int64_t r = 0; r < n_rows; r += FEW, weights += FEW * BLOCK, y += FEW * width)
    switch (least(FEW, n_rows - r)) {
      case 1: mix(n_vecs, 1, n_keys, weights, values, width, then, y); break;
      case 2: mix(n_vecs, 2, n_keys, weights, values, width, then, y); break;
      case 3: mix(n_vecs, 3, n_keys, weights, values, width, then, y); break;
      default: mix(n_vecs, 4, n_keys, weights, values, width, then, y);
    }
}

static void mix_values(int64_t n_rows, int64_t n_keys, const float *weights, const float *values, int64_t width,
                       int64_t then, float *y) {
  int64_t o = 0;
  for (; o + 4 * LANES <= width; o += 4 * LANES) mix_rows(4, n_rows, n_keys, weights, values + o, width, then, y + o);
  for (; o + 2 * LANES <= width; o += 2 * LANES) mix_rows(2, n_rows, n_keys, weights, values + o, width, then, y + o);
  for (; o < width; o += LANES) mix_rows(1, n_rows, n_keys, weights, values + o, width, then, y + o);
}

// Where the keys from `at` on lie in the pages, for one kv head of one sequence.
INLINE int64_t place(const Job *job, int64_t item, int64_t at) {
  const int64_t page = job->pages[item / job->n_heads * job->n_columns + at / job->page_len];
  return ((page * job->n_heads + item % job->n_heads) * job->page_len + at % job->page_len) * job->n_in;
}

// The keys that any row of a sequence sees: from the block of the first on, to the last.
INLINE int64_t seen(const Job *job, int64_t item, int64_t *end) {
  const int64_t from = item / job->n_heads * job->n_rows;
  int64_t low = INT64_MAX;
  *end = 0;
  for (int64_t r = from; r < from + job->n_rows; r++)
    if (job->last[r] >= 0) low = least(low, job->first[r]), *end = job->last[r] >= *end ? job->last[r] + 1 : *end;
  return low / BLOCK * BLOCK;
}

// One kv head of one sequence, block by block of its keys: the steps of kernels/attention/blocks.py. Keys and values of
// the next block are fetched meanwhile.
static void run_attention(const Job *job, int64_t item) {
  const int64_t n_rows = job->n_rows, width = job->n_in;
  const int32_t *first = job->first + item / job->n_heads * n_rows, *last = job->last + item / job->n_heads * n_rows;
  float x[MAX_DEPTH * MAX_ROWS + LANES] __attribute__((aligned(sizeof(vec))));
  float scores[MAX_ROWS * BLOCK], *mixed = job->y + item * n_rows * width;
  float *top = job->top + item * n_rows, *total = job->total + item * n_rows;
  for (int64_t r = 0; r < n_rows; r++) top[r] = MASKED, total[r] = 0;
  memset(mixed, 0, n_rows * width * sizeof(float));

  int64_t end, next_end = 0, at = seen(job, item, &end);
  if (!end) return;
  side_by_side(job->x + item * n_rows * width, n_rows, width, x);
  const int64_t next = item + 1 < job->n_items ? seen(job, item + 1, &next_end) : 0;
  for (; at < end; at += BLOCK) {
    const int64_t n_keys = least(BLOCK, end - at), here = place(job, item, at);
    const int64_t there = at + BLOCK < end ? place(job, item, at + BLOCK) : next_end ? place(job, item + 1, next) : here;
    const int64_t then = there - here;
    product(x, job->w + here, width, least(BLOCK, (n_keys + LANES - 1) / LANES * LANES), then, scores, n_rows, BLOCK);
    for (int64_t r = 0; r < n_rows; r++) {
      const float keep = soften(scores + r * BLOCK, first[r] - at, last[r] - at, job->scale, top + r, total + r);
      for (int64_t i = 0; i < width; i++) mixed[r * width + i] *= keep;
    }
    __asm__ volatile("" ::: "memory");  // rounded before the next values are added
    mix_values(n_rows, n_keys, scores, job->v + here, width, then, mixed);
  }
}

// q [B, K, rows, H], k_pages and v_pages [P, K, page, H], page_table [B, C], first and last [B, rows], scale [] ->
// over the keys first .. last of each row: the largest score = q kᵀ * scale and Σ exp(score - largest), both
// [B, K, rows], and Σ exp(score - largest) value [B, K, rows, H]; MASKED, 0 and 0 where last is -1.
// H divides by 16 and is at most 256; up to 64 rows.
XLA_FFI_Error *paged_attention(XLA_FFI_CallFrame *call) {
  if (told_version(call)) return NULL;
  XLA_FFI_Buffer *const *in = (XLA_FFI_Buffer *const *)call->args.args;
  XLA_FFI_Buffer *const *out = (XLA_FFI_Buffer *const *)call->rets.rets;
  const int64_t *q = in[0]->dims, *pool = in[1]->dims;
  return run(call, (Job){.run = run_attention, .x = in[0]->data, .w = in[1]->data, .v = in[2]->data,
                         .pages = in[3]->data, .first = in[4]->data, .last = in[5]->data,
                         .scale = *(float *)in[6]->data, .top = out[0]->data, .total = out[1]->data,
                         .y = out[2]->data, .n_items = q[0] * q[1], .n_heads = q[1], .n_rows = q[2], .n_in = q[3],
                         .page_len = pool[2], .n_columns = in[3]->dims[1]});
}
