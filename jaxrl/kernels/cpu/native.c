// Decode kernels for CPU, as handlers of XLA's foreign function interface. Arrays are float32 and
// row-major unless noted.
//
// A decode step has a small batch, so it is bound by the bandwidth of reading weights and keys.
//
// A sum is a chain of fused multiply-adds over CHAIN inputs, in order, and then the sum of the
// chains. XLA's products of many rows do the same (tests/kernels/cpu/test_native.py), so no bit
// depends on the number of rows.

#include "product.h"
#include "work.h"
#include "attention.h"

#define STRIP 96  // outputs per work item

static void run_strip(const Job *job, int64_t item) {
  const Weight *weight = job->weights;
  int64_t before = 0;
  while (item >= weight->end) before = weight++->end;
  const int64_t first = (item - before) * STRIP, n_out = minimum(STRIP, weight->n_out - first);
  product(job->x, weight->w + first * job->n_in, job->n_in, n_out, NULL, weight->y + first, job->n_rows,
          weight->n_out);
}

// x [rows, in], then weights w [out, in] -> y [rows, out] = x wᵀ for each weight. At most 64 rows
// and MAX_WEIGHTS weights.
XLA_FFI_Error *skinny_matmul(XLA_FFI_CallFrame *call) {
  if (handled_version_query(call)) return NULL;
  if (call->rets.size > MAX_WEIGHTS) return error(call->api, "skinny_matmul: too many weights");
  const XLA_FFI_Buffer *x = call->args.args[0];
  Job job = {.run = run_strip, .n_rows = x->dims[0], .n_in = x->dims[1]};
  for (int64_t i = 0; i < call->rets.size; i++) {
    const XLA_FFI_Buffer *w = call->args.args[1 + i], *y = call->rets.rets[i];
    job.n_items += (w->dims[0] + STRIP - 1) / STRIP;
    job.weights[i] = (Weight){w->data, y->data, w->dims[0], job.n_items};
  }
  job.x = job.scratch = aligned_alloc(sizeof(vec), (job.n_in * row_lanes(job.n_rows) / LANES + 2) * sizeof(vec));
  if (!job.scratch) return error(call->api, "no memory for the rows of a product");
  interleave_rows(x->data, job.n_rows, job.n_in, job.scratch);
  return run(call, job);
}

// Inputs: q [B, K, rows, H], k_pages and v_pages [P, K, page, H], int32 page_table [B, C], int32
// first and last [B, rows], scale []. With score = q kᵀ * scale over the keys first .. last of each
// row, the outputs are the largest score and Σ exp(score - largest), both [B, K, rows], and Σ
// exp(score - largest) value [B, K, rows, H]; MASKED, 0 and 0 for rows with last = -1. H is a
// multiple of 16 and at most 256; at most 64 rows.
XLA_FFI_Error *paged_attention(XLA_FFI_CallFrame *call) {
  if (handled_version_query(call)) return NULL;
  XLA_FFI_Buffer *const *in = (XLA_FFI_Buffer *const *)call->args.args;
  XLA_FFI_Buffer *const *out = (XLA_FFI_Buffer *const *)call->rets.rets;
  const int64_t *q = in[0]->dims, *pool = in[1]->dims;
  return run(call, (Job){.run = run_attention, .x = in[0]->data, .w = in[1]->data, .v = in[2]->data,
                         .pages = in[3]->data, .first = in[4]->data, .last = in[5]->data,
                         .scale = *(float *)in[6]->data, .top = out[0]->data, .total = out[1]->data,
                         .y = out[2]->data, .n_items = q[0] * q[1], .n_heads = q[1], .n_rows = q[2], .n_in = q[3],
                         .page_len = pool[2], .n_columns = in[3]->dims[1]});
}
