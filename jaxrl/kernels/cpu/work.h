// Distribution of a call's work items over XLA's threads, and glue for its foreign function
// interface.

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "xla/ffi/api/c_api.h"

#define MAX_WEIGHTS 4  // per input

typedef struct {
  const float *w;
  float *y;
  int64_t n_out, end;  // end: first item after this weight's items
} Weight;

typedef struct Job {
  void (*run)(const struct Job *, int64_t item);
  int64_t n_items;
  const float *x, *w, *v;  // x: interleaved rows of a product, or attention's q
  const int32_t *pages, *first, *last;
  float *y, *top, *total, *scratch;  // scratch: freed with the job
  Weight weights[MAX_WEIGHTS];
  float scale;
  int64_t n_rows, n_in, n_heads, n_columns, page_len;
  atomic_long next, done, holders;
} Job;

static void release(Job *job) {
  if (atomic_fetch_sub(&job->holders, 1) > 1) return;
  free(job->scratch);
  free(job);
}

// Processes items until none is left. The caller waits for `done`, not for tasks that started too
// late to get an item.
static void run_items(void *data) {
  Job *job = data;
  for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->n_items; atomic_fetch_add(&job->done, 1))
    job->run(job, i);
  release(job);
}

static XLA_FFI_Error *error(const XLA_FFI_Api *api, const char *message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, XLA_FFI_Error_Code_INTERNAL};
  return api->XLA_FFI_Error_Create(&args);
}

static void destroy(const XLA_FFI_Api *api, XLA_FFI_Error *problem) {
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
  destroy(call->api, call->api->XLA_FFI_ThreadPool_NumThreads(&ask));
  const int64_t n_items = job->n_items, n_tasks = minimum(n_threads, n_items) - 1;
  atomic_init(&job->next, 0), atomic_init(&job->done, 0);
  atomic_init(&job->holders, 2 + (n_tasks > 0 ? n_tasks : 0));
  for (int64_t i = 0; i < n_tasks; i++) {
    XLA_FFI_ThreadPool_Schedule_Args task = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, call->ctx, run_items, job};
    XLA_FFI_Error *problem = call->api->XLA_FFI_ThreadPool_Schedule(&task);
    if (problem) destroy(call->api, problem), release(job);
  }
  run_items(job);
  while (atomic_load(&job->done) < n_items) sched_yield();
  release(job);
  return NULL;
}

// Before the first call, XLA queries a new handler's API version. Returns 1 if this was the query.
static int handled_version_query(const XLA_FFI_CallFrame *call) {
  if (!call->extension_start || call->extension_start->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *about = ((XLA_FFI_Metadata_Extension *)call->extension_start)->metadata;
  about->api_version.major_version = XLA_FFI_API_MAJOR;
  about->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}
