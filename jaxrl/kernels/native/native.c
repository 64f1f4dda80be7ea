// Kernels for decoding on CPU, as handlers of XLA's foreign function interface. All arrays are float32, row-major.
//
// A decode step has few rows, so it is as fast as weights and keys can be read: every element of them is read once,
// where it lies, and multiplied with all rows at once, some outputs at a time, their sums in registers.
//
// A sum is a chain of fused multiply-adds over CHAIN inputs at a time, in order, and a sum of those chains. That is
// what XLA's own products do for many rows (tests/kernels/test_native.py), and no bit depends on the number of rows.

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "xla/ffi/api/c_api.h"

#define LANES 16  // rows, or outputs, of a vector
#define MAX_VECS 4
#define MAX_OUT 8    // outputs whose sums lie in registers together
#define MAX_DEPTH 256  // of a head
#define CHAIN 512
#define FEW 4  // rows that are mixed together
#define LINE 16   // floats of a cache line
#define AHEAD 16   // lines fetched before they are needed
#define STRIP 96  // outputs of a product that one thread takes at a time
#define BLOCK 64  // keys

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float memory_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- the product

// sums[o][v] += x of vector v times w of output o, over the next `depth` inputs.
INLINE void add(const int n_vecs, const int n_out, const int depth, const vec *x, const float *w, int64_t stride,
                vec (*sums)[MAX_VECS]) {
  const float *row[MAX_OUT];
  UNROLL for (int o = 0; o < n_out; o++) row[o] = w + o * stride;
  UNROLL for (int k = 0; k < depth; k++)
    UNROLL for (int o = 0; o < n_out; o++)
      UNROLL for (int v = 0; v < n_vecs; v++) sums[o][v] += x[k * n_vecs + v] * row[o][k];
}

// Fetches what is read AHEAD lines after input k of n_out outputs: behind their end the first inputs of the next ones.
INLINE void fetch(const int n_out, const float *w, int64_t k, int64_t n_in) {
  const int64_t next = k + AHEAD * LINE, there = next < n_in ? next : next + (n_out - 1) * n_in;
  UNROLL for (int o = 0; o < n_out; o++) __builtin_prefetch(w + o * n_in + there, 0, 3);
}

// y[r][o] <- x[r] w[o]ᵀ of n_out outputs and all rows. x: [in][n_vecs], the rows side by side.
INLINE void outputs(const int n_vecs, const int n_out, const vec *x, const float *w, int64_t n_in, float *y,
                    int64_t n_rows, int64_t y_stride) {
  vec total[MAX_OUT][MAX_VECS];
  for (int64_t start = 0; start < n_in; start += CHAIN) {
    const int64_t end = least(start + CHAIN, n_in);
    vec chain[MAX_OUT][MAX_VECS];
    UNROLL for (int o = 0; o < n_out; o++) UNROLL for (int v = 0; v < n_vecs; v++) chain[o][v] = (vec){0};
    int64_t k = start;
    for (; k + LINE <= end; k += LINE) {
      fetch(n_out, w, k, n_in);
      add(n_vecs, n_out, LINE, x + k * n_vecs, w + k, n_in, chain);
    }
    for (; k < end; k++) add(n_vecs, n_out, 1, x + k * n_vecs, w + k, n_in, chain);
    UNROLL for (int o = 0; o < n_out; o++)
      UNROLL for (int v = 0; v < n_vecs; v++) total[o][v] = start ? total[o][v] + chain[o][v] : chain[o][v];
  }
  for (int64_t r = 0; r < n_rows; r++)
    UNROLL for (int o = 0; o < n_out; o++) y[r * y_stride + o] = total[o][r / LANES][r % LANES];
}

INLINE void all_outputs(const int n_vecs, const int at_once, const vec *x, const float *w, int64_t n_in, int64_t n_out,
                        float *y, int64_t n_rows, int64_t y_stride) {
  int64_t o = 0;
  for (; o + at_once <= n_out; o += at_once) outputs(n_vecs, at_once, x, w + o * n_in, n_in, y + o, n_rows, y_stride);
  for (; o < n_out; o++) outputs(n_vecs, 1, x, w + o * n_in, n_in, y + o, n_rows, y_stride);
}

// How many outputs share a vector where there are so few rows that they fill half or a quarter of one.
INLINE int sharing(int64_t n_rows) { return n_rows <= LANES / 4 ? 4 : n_rows <= LANES / 2 ? 2 : 1; }

#ifdef __AVX512F__
// Four inputs of `share` outputs, side by side, each as often as it takes to fill a vector.
INLINE __m512 quads(const int share, const float *w, int64_t stride) {
  __m512 v = _mm512_broadcast_f32x4(_mm_loadu_ps(w));
  UNROLL for (int o = 1; o < share; o++)
    v = _mm512_mask_broadcast_f32x4(v, 0xffff << o * LANES / share, _mm_loadu_ps(w + o * stride));
  return v;
}

// `outputs` of LANES outputs for whole lines of inputs; x has the rows of each output that shares a vector.
INLINE void shared(const int share, const vec *x, const float *w, int64_t n_in, float *y, int64_t n_rows,
                   int64_t y_stride) {
  const int n_vecs = LANES / share;
  vec total[LANES / 2];
  for (int64_t start = 0; start < n_in; start += CHAIN) {
    const int64_t end = least(start + CHAIN, n_in);
    vec chain[LANES / 2];
    UNROLL for (int v = 0; v < n_vecs; v++) chain[v] = (vec){0};
    for (int64_t k = start; k < end; k += LINE) {
      fetch(LANES, w, k, n_in);
      UNROLL for (int i = 0; i < LINE; i += 4) {
        __m512 four[LANES / 2];
        UNROLL for (int v = 0; v < n_vecs; v++) four[v] = quads(share, w + v * share * n_in + k + i, n_in);
        UNROLL for (int v = 0; v < n_vecs; v++) chain[v] += (vec)_mm512_permute_ps(four[v], 0x00) * x[k + i];
        UNROLL for (int v = 0; v < n_vecs; v++) chain[v] += (vec)_mm512_permute_ps(four[v], 0x55) * x[k + i + 1];
        UNROLL for (int v = 0; v < n_vecs; v++) chain[v] += (vec)_mm512_permute_ps(four[v], 0xaa) * x[k + i + 2];
        UNROLL for (int v = 0; v < n_vecs; v++) chain[v] += (vec)_mm512_permute_ps(four[v], 0xff) * x[k + i + 3];
      }
    }
    UNROLL for (int v = 0; v < n_vecs; v++) total[v] = start ? total[v] + chain[v] : chain[v];
  }
  for (int64_t r = 0; r < n_rows; r++)
    UNROLL for (int o = 0; o < LANES; o++) y[r * y_stride + o] = total[o / share][o % share * n_vecs + r];
}

// The first outputs, where they can share vectors; returns their number.
INLINE int64_t shared_outputs(const vec *x, const float *w, int64_t n_in, int64_t n_out, float *y, int64_t n_rows,
                              int64_t y_stride) {
  const int share = sharing(n_rows);
  int64_t o = 0;
  if (share > 1 && n_in % LINE == 0)
    for (; o + LANES <= n_out; o += LANES)
      if (share == 2) shared(2, x, w + o * n_in, n_in, y + o, n_rows, y_stride);
      else shared(4, x, w + o * n_in, n_in, y + o, n_rows, y_stride);
  return o;
}
#else
INLINE int64_t shared_outputs(const vec *x, const float *w, int64_t n_in, int64_t n_out, float *y, int64_t n_rows,
                              int64_t y_stride) {
  return 0;
}
#endif

static void product(const vec *x, const float *w, int64_t n_in, int64_t n_out, float *y, int64_t n_rows,
                    int64_t y_stride) {
  const int64_t done = shared_outputs(x, w, n_in, n_out, y, n_rows, y_stride);
  w += done * n_in, n_out -= done, y += done;
  switch ((n_rows + LANES - 1) / LANES) {
    case 1: return all_outputs(1, 8, x, w, n_in, n_out, y, n_rows, y_stride);
    case 2: return all_outputs(2, 8, x, w, n_in, n_out, y, n_rows, y_stride);
    case 3: return all_outputs(3, 8, x, w, n_in, n_out, y, n_rows, y_stride);
    default: return all_outputs(4, 6, x, w, n_in, n_out, y, n_rows, y_stride);
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

// out: [in][vectors of rows] <- x: [rows][in]; few rows come once for each output that shares a
// vector, other lanes without a row are 0.
static void side_by_side(const float *x, int64_t n_rows, int64_t n_in, vec *out) {
  const int64_t n_vecs = (n_rows + LANES - 1) / LANES, share = sharing(n_rows);
  for (int64_t v = 0; v < n_vecs; v++) {
    const int64_t rows = least(LANES, n_rows - v * LANES);
    const float *first = x + v * LANES * n_in;
    int64_t k = 0;
    for (; k + LANES <= n_in; k += LANES) {
      vec a[LANES], b[LANES];
      for (int i = 0; i < LANES; i++) a[i] = (vec){0};
      for (int i = 0; i < rows; i++) a[i] = *(const memory_vec *)(first + i * n_in + k);
      for (int i = LANES / share; i < LANES; i++) a[i] = a[i % (LANES / share)];
      transpose(a, b);
      UNROLL for (int i = 0; i < LANES; i++) out[(k + i) * n_vecs + v] = a[i];
    }
    for (; k < n_in; k++)
      for (int i = 0; i < LANES; i++) out[k * n_vecs + v][i] = i < rows ? first[i * n_in + k] : 0;
  }
}

// ---- work shared among XLA's threads

typedef struct Job {
  void (*run)(const struct Job *, int64_t item);
  int64_t n_items;
  const float *x, *w;  // x: the rows of a product side by side, of attention as they came
  const int32_t *pages;
  float *y, *own;  // own: freed with the job
  int64_t n_rows, n_in, n_out, n_heads, page_len, offset;
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
  product((const vec *)job->x, job->w + first * job->n_in, job->n_in, least(STRIP, job->n_out - first), job->y + first,
          job->n_rows, job->n_out);
}

// x [rows, in], w [out, in] -> y [rows, out] = x wᵀ, for up to 64 rows.
XLA_FFI_Error *few_rows(XLA_FFI_CallFrame *call) {
  if (told_version(call)) return NULL;
  const XLA_FFI_Buffer *x = call->args.args[0], *w = call->args.args[1], *y = call->rets.rets[0];
  Job job = {.run = run_strip, .w = w->data, .y = y->data, .n_rows = x->dims[0], .n_in = x->dims[1]};
  job.n_out = w->dims[0], job.n_items = (job.n_out + STRIP - 1) / STRIP;
  const int64_t n_vecs = (job.n_rows + LANES - 1) / LANES;
  job.x = job.own = aligned_alloc(sizeof(vec), job.n_in * n_vecs * sizeof(vec));
  if (!job.own) return error(call->api, "no memory for the rows of a product");
  side_by_side(x->data, job.n_rows, job.n_in, (vec *)job.own);
  return run(call, job);
}

// What a sequence and kv head have in a block of keys, NULL where the sequence does not see it.
INLINE const float *block(const Job *job, int64_t item, int64_t width) {
  const int64_t page = job->pages[item / job->n_heads], head = item % job->n_heads;
  return page < 0 ? NULL : job->w + ((page * job->n_heads + head) * job->page_len + job->offset) * width;
}

static void run_scores(const Job *job, int64_t item) {
  const float *keys = block(job, item, job->n_in), *q = job->x + item * job->n_rows * job->n_in;
  float *y = job->y + item * job->n_rows * BLOCK;
  if (!keys) {
    for (int64_t i = 0; i < job->n_rows * BLOCK; i++) y[i] = 0;
  } else {
    vec x[MAX_DEPTH * MAX_VECS];
    side_by_side(q, job->n_rows, job->n_in, x);
    product(x, keys, job->n_in, BLOCK, y, job->n_rows, BLOCK);
  }
}

// n_vecs vectors of outputs of n_rows rows: y[r] <- Σ over the keys of weight[r][key] value[key].
INLINE void mix(const int n_vecs, const int n_rows, const float *weights, const float *values, int64_t width,
                float *y) {
  vec sums[FEW][MAX_VECS];
  UNROLL for (int r = 0; r < n_rows; r++) UNROLL for (int v = 0; v < n_vecs; v++) sums[r][v] = (vec){0};
  for (int64_t key = 0; key < BLOCK; key++, values += width)
    UNROLL for (int r = 0; r < n_rows; r++)
      UNROLL for (int v = 0; v < n_vecs; v++)
        sums[r][v] += weights[r * BLOCK + key] * *(const memory_vec *)(values + v * LANES);
  UNROLL for (int r = 0; r < n_rows; r++)
    UNROLL for (int v = 0; v < n_vecs; v++) *(memory_vec *)(y + r * width + v * LANES) = sums[r][v];
}

INLINE void mix_rows(const int n_vecs, int64_t n_rows, const float *weights, const float *values, int64_t width,
                     float *y) {
  for (int64_t r = 0; r < n_rows; r += FEW, weights += FEW * BLOCK, y += FEW * width)
    switch (least(FEW, n_rows - r)) {
      case 1: mix(n_vecs, 1, weights, values, width, y); break;
      case 2: mix(n_vecs, 2, weights, values, width, y); break;
      case 3: mix(n_vecs, 3, weights, values, width, y); break;
      default: mix(n_vecs, 4, weights, values, width, y);
    }
}

static void run_mix(const Job *job, int64_t item) {
  const int64_t width = job->n_out;
  const float *values = block(job, item, width), *weights = job->x + item * job->n_rows * BLOCK;
  float *y = job->y + item * job->n_rows * width;
  if (!values) {
    for (int64_t i = 0; i < job->n_rows * width; i++) y[i] = 0;
    return;
  }
  int64_t o = 0;
  for (; o + 4 * LANES <= width; o += 4 * LANES) mix_rows(4, job->n_rows, weights, values + o, width, y + o);
  for (; o + 2 * LANES <= width; o += 2 * LANES) mix_rows(2, job->n_rows, weights, values + o, width, y + o);
  for (; o < width; o += LANES) mix_rows(1, job->n_rows, weights, values + o, width, y + o);
}

INLINE Job attention_job(const XLA_FFI_CallFrame *call) {
  const XLA_FFI_Buffer *x = call->args.args[0], *pool = call->args.args[1], *y = call->rets.rets[0];
  const XLA_FFI_Buffer *pages = call->args.args[2], *offset = call->args.args[3];
  return (Job){.x = x->data, .w = pool->data, .y = y->data, .pages = pages->data, .offset = *(int32_t *)offset->data,
               .n_items = x->dims[0] * x->dims[1], .n_heads = x->dims[1], .n_rows = x->dims[2],
               .page_len = pool->dims[2], .n_in = x->dims[3], .n_out = y->dims[3]};
}

// q [B, K, rows, H], k_pages [P, K, page, H], pages [B], offset [] -> q kᵀ [B, K, rows, 64] with the keys from `offset`
// on in a page of each sequence; zeros where its page is -1. H divides by 16 and is at most 256.
XLA_FFI_Error *page_scores(XLA_FFI_CallFrame *call) {
  if (told_version(call)) return NULL;
  Job job = attention_job(call);
  job.run = run_scores;
  return run(call, job);
}

// weights [B, K, rows, 64], v_pages [P, K, page, H], pages [B], offset [] -> weights v [B, K, rows, H], likewise.
XLA_FFI_Error *page_mix(XLA_FFI_CallFrame *call) {
  if (told_version(call)) return NULL;
  Job job = attention_job(call);
  job.run = run_mix;
  return run(call, job);
}
