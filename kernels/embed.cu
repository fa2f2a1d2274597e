// Embedding: one row of the table per token.
//
// Macro SHARD: 1 if the table is a part of the vocabulary's rows; other tokens get zeros, to be summed with other ranks' rows.
//
// Launch: grid (tokens, 1, 1), block (128, 1, 1), no dynamic shared memory. hidden is a multiple of 8.

#include "common.cuh"

#ifndef SHARD
#define SHARD 0
#endif

KERNEL __launch_bounds__(128) embed_gather(const elem *__restrict__ table,   // [vocabulary, hidden]; SHARD: [rows, hidden]
                                           const int *__restrict__ token_ids, // [tokens]
                                           elem *__restrict__ out,           // [tokens, hidden]
                                           int hidden
#if SHARD
                                           , int first, int rows // the table's rows are those of ids from `first` on
#endif
) {
    pdl_wait();
    pdl_launch();
    int token = blockIdx.x, id = token_ids[token];
    elem *dst = out + (i64)token * hidden;
    int units = hidden / 8;
#if SHARD
    id -= first;
    if (id < 0 || id >= rows) {
        for (int u = threadIdx.x; u < units; u += 128) store16(dst + u * 8, make_uint4(0, 0, 0, 0));
        return;
    }
#endif
    const elem *row = table + (i64)id * hidden;
    for (int u = threadIdx.x; u < units; u += 128) store16(dst + u * 8, load16_stream(row + u * 8));
}
