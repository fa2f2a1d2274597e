// Embedding: one row of the table per token.
//
// Launch: grid (tokens, 1, 1), block (128, 1, 1), no dynamic shared memory. hidden is a multiple of 8.

#include "common.cuh"

KERNEL __launch_bounds__(128) embed_gather(const elem *__restrict__ table,   // [vocabulary, hidden]
                                           const int *__restrict__ token_ids, // [tokens]
                                           elem *__restrict__ out,           // [tokens, hidden]
                                           int hidden) {
    pdl_wait();
    pdl_launch();
    int token = blockIdx.x;
    const elem *row = table + (i64)token_ids[token] * hidden;
    elem *dst = out + (i64)token * hidden;
    int units = hidden / 8;
    for (int u = threadIdx.x; u < units; u += 128) store16(dst + u * 8, load16_stream(row + u * 8));
}
