// Paged attention: scores of a block of keys, online softmax, weighted sum of the values.

#include <math.h>
#include <string.h>

#define MAX_DEPTH 256  // head dim
#define ROW_GROUP 4  // rows whose values are summed together
#define BLOCK 64  // keys
#define MASKED -1e30f
#define MATERIALIZE(x) __asm__("" : "+m"(x))  // rounds x before its next use

// XLA's exponential on CPU, operation by operation (Cephes polynomial).
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
  // 2^n as two factors, each representable
  const uint32_t power = ((uint32_t)(int32_t)n << 23) + 0x3f800000, most = power < 0x7f000000 ? power : 0x7f000000;
  union { float number; uint32_t bits; } low = {y}, high = {.bits = most};
  low.bits += power - most;
  return low.number * high.number;
}

// Reduces all lanes by OP: combines halves of the lanes repeatedly.
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

// scores[key] <- exp(score - top), 0 outside first .. last. Updates the softmax state (top, total)
// and returns the factor that rescales earlier sums.
INLINE float softmax_step(float *scores, int32_t first, int32_t last, float scale, float *top, float *total) {
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
  const float correction = exponential(*top - most);
  float kept = *total * correction;
  MATERIALIZE(kept);
  *top = most, *total = kept + sums[0];
  return correction;
}

// y[r] += Σ over n_keys keys of weight[r][key] value[key], for n_vecs vectors of outputs and n_rows
// rows.
INLINE void add_values(const int n_vecs, const int n_rows, int64_t n_keys, const float *weights, const float *values,
                int64_t width, PrefetchRange *next, float *y) {
  vec sums[ROW_GROUP][MAX_VECS];
  UNROLL for (int r = 0; r < n_rows; r++) UNROLL for (int v = 0; v < n_vecs; v++) sums[r][v] = (vec){0};
  for (int64_t key = 0; key < n_keys; key++, values += width) {
    prefetch_range(next, 1);
    UNROLL for (int r = 0; r < n_rows; r++)
      UNROLL for (int v = 0; v < n_vecs; v++)
        sums[r][v] += weights[r * BLOCK + key] * *(const memory_vec *)(values + v * LANES);
  }
  UNROLL for (int r = 0; r < n_rows; r++)
    UNROLL for (int v = 0; v < n_vecs; v++) *(memory_vec *)(y + r * width + v * LANES) += sums[r][v];
}

INLINE void add_values_to_rows(const int n_vecs, int64_t n_rows, int64_t n_keys, const float *weights, const float *values,
                     int64_t width, PrefetchRange *next, float *y) {
  for (int64_t r = 0; r < n_rows; r += ROW_GROUP, weights += ROW_GROUP * BLOCK, y += ROW_GROUP * width)
    switch (minimum(ROW_GROUP, n_rows - r)) {
      case 1: add_values(n_vecs, 1, n_keys, weights, values, width, next, y); break;
      case 2: add_values(n_vecs, 2, n_keys, weights, values, width, next, y); break;
      case 3: add_values(n_vecs, 3, n_keys, weights, values, width, next, y); break;
      default: add_values(n_vecs, 4, n_keys, weights, values, width, next, y);
    }
}

static void add_all_values(int64_t n_rows, int64_t n_keys, const float *weights, const float *values, int64_t width,
                       PrefetchRange *next, float *y) {
  int64_t o = 0;
  for (; o + 4 * LANES <= width; o += 4 * LANES) add_values_to_rows(4, n_rows, n_keys, weights, values + o, width, next, y + o);
  for (; o + 2 * LANES <= width; o += 2 * LANES) add_values_to_rows(2, n_rows, n_keys, weights, values + o, width, next, y + o);
  for (; o < width; o += LANES) add_values_to_rows(1, n_rows, n_keys, weights, values + o, width, next, y + o);
}

// Offset in the pages of the keys from `at` on, for one kv head of one sequence.
INLINE int64_t key_offset(const Job *job, int64_t item, int64_t at) {
  const int64_t page = job->pages[item / job->n_heads * job->n_columns + at / job->page_len];
  return ((page * job->n_heads + item % job->n_heads) * job->page_len + at % job->page_len) * job->n_in;
}

// Keys visible to any row of a sequence: from the block of the first key to the last key.
INLINE int64_t visible_keys(const Job *job, int64_t item, int64_t *end) {
  const int64_t from = item / job->n_heads * job->n_rows;
  int64_t low = INT64_MAX;
  *end = 0;
  for (int64_t r = from; r < from + job->n_rows; r++)
    if (job->last[r] >= 0) low = minimum(low, job->first[r]), *end = job->last[r] >= *end ? job->last[r] + 1 : *end;
  return low / BLOCK * BLOCK;
}

// Prefetch range of the block of keys from `at` on that are before `end`.
INLINE PrefetchRange block_range(const Job *job, int64_t item, int64_t at, int64_t end) {
  if (at >= end) return (PrefetchRange){0};
  const int64_t here = key_offset(job, item, at);
  return (PrefetchRange){job->w + here, job->v + here, minimum(BLOCK, end - at) * job->n_in};
}

// One kv head of one sequence, by key blocks, with the steps of kernels/attention/online_softmax.py. The
// next block is prefetched meanwhile: half of it during the scores, a quarter each during the
// softmax and the sum of the values.
static void run_attention(const Job *job, int64_t item) {
  const int64_t n_rows = job->n_rows, width = job->n_in;
  const int32_t *first = job->first + item / job->n_heads * n_rows, *last = job->last + item / job->n_heads * n_rows;
  float x[MAX_DEPTH * MAX_ROWS + LANES] __attribute__((aligned(sizeof(vec))));
  float scores[MAX_ROWS * BLOCK], *numerator = job->y + item * n_rows * width;
  float *top = job->top + item * n_rows, *total = job->total + item * n_rows;
  for (int64_t r = 0; r < n_rows; r++) top[r] = MASKED, total[r] = 0;
  memset(numerator, 0, n_rows * width * sizeof(float));

  int64_t end, next_end = 0, at = visible_keys(job, item, &end);
  if (!end) return;
  interleave_rows(job->x + item * n_rows * width, n_rows, width, x);
  const int64_t next_at = item + 1 < job->n_items ? visible_keys(job, item + 1, &next_end) : 0;
  for (; at < end; at += BLOCK) {
    const int64_t n_keys = minimum(BLOCK, end - at), here = key_offset(job, item, at);
    PrefetchRange next = at + BLOCK < end ? block_range(job, item, at + BLOCK, end) : block_range(job, item + 1, next_at, next_end);
    product(x, job->w + here, width, minimum(BLOCK, (n_keys + LANES - 1) / LANES * LANES), &next, scores, n_rows, BLOCK);
    for (int64_t r = 0; r < n_rows; r++) {
      prefetch_range(&next, BLOCK * width / LINE / 4 / n_rows);
      const float correction = softmax_step(scores + r * BLOCK, first[r] - at, last[r] - at, job->scale, top + r, total + r);
      for (int64_t i = 0; i < width; i++) numerator[r * width + i] *= correction;
    }
    __asm__ volatile("" ::: "memory");  // rounded before the next values are added
    add_all_values(n_rows, n_keys, scores, job->v + here, width, &next, numerator);
    prefetch_range(&next, next.left);
  }
}
