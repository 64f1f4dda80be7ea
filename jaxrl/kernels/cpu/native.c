// Kernels for decoding on CPU, as handlers of XLA's foreign function interface. All arrays are float32, row-major.
//
// A decode step has few rows, so it is as fast as weights and keys can be read.
//
// A sum is a chain of fused multiply-adds over CHAIN inputs at a time, in order, and a sum of those chains. That is
// what XLA's own products do for many rows (tests/kernels/cpu/test_native.py), and no bit depends on the number of rows.

#include "product.h"
#include "work.h"
#include "attention.h"

#define STRIP 96  // outputs of a product that one thread takes at a time

static void run_strip(const Job *job, int64_t item) {
  const Weight *weight = job->weights;
  int64_t before = 0;
  while (item >= weight->end) before = weight++->end;
  const int64_t first = (item - before) * STRIP, n_out = least(STRIP, weight->n_out - first);
  product(job->x, weight->w + first * job->n_in, job->n_in, n_out, NULL, weight->y + first, job->n_rows,
          weight->n_out);
}

// x [rows, in], then weights w [out, in] -> of each y [rows, out] = x wᵀ, for up to 64 rows and MAX_WEIGHTS weights.
XLA_FFI_Error *skinny_matmul(XLA_FFI_CallFrame *call) {
  if (told_version(call)) return NULL;
  if (call->rets.size > MAX_WEIGHTS) return error(call->api, "skinny_matmul: too many weights");
  const XLA_FFI_Buffer *x = call->args.args[0];
  Job job = {.run = run_strip, .n_rows = x->dims[0], .n_in = x->dims[1]};
  for (int64_t i = 0; i < call->rets.size; i++) {
    const XLA_FFI_Buffer *w = call->args.args[1 + i], *y = call->rets.rets[i];
    job.n_items += (w->dims[0] + STRIP - 1) / STRIP;
    job.weights[i] = (Weight){w->data, y->data, w->dims[0], job.n_items};
  }
  job.x = job.own = aligned_alloc(sizeof(vec), (job.n_in * row_lanes(job.n_rows) / LANES + 2) * sizeof(vec));
  if (!job.own) return error(call->api, "no memory for the rows of a product");
  side_by_side(x->data, job.n_rows, job.n_in, job.own);
  return run(call, job);
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
