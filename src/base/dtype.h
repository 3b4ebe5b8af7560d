/* dtype: every element and block format a checkpoint can hold, decoded exactly by plain scalar C. This is the truth
 * that all kernels are tested against; nothing here is tuned.
 *
 * Sources: IEEE 754; OCP "8-bit Floating Point Specification" and "Microscaling Formats (MX)" v1.0; ggml's block
 * layouts (ggml-common.h) for the GGUF types; the ModelOpt and compressed-tensors checkpoints for FP8 and NVFP4. */
#ifndef HEARTH_DTYPE_H
#define HEARTH_DTYPE_H

#include "base.h"

enum dtype {
    DT_NONE = 0,
    DT_F32,
    DT_F16,
    DT_BF16,
    DT_F8_E4M3, /* 1 byte; value * scale, scale by `struct dmat` below */
    DT_MXFP4,   /* safetensors: 16 bytes a 32-block, low nibble = even column; E8M0 scales in a second array */
    DT_NVFP4, /* safetensors: 8 bytes a 16-block, low nibble = even column; E4M3 scales in a second array, one F32 */
    DT_Q4_0,
    DT_Q4_1,
    DT_Q5_0,
    DT_Q5_1,
    DT_Q8_0,
    DT_Q4_K,
    DT_Q5_K,
    DT_Q6_K,
    DT_MXFP4_GGUF, /* 17 bytes a 32-block: E8M0, then nibbles with columns 0..15 low and 16..31 high */
    DT_COUNT
};

struct dtype_info {
    const char *name; /* as users write it: "bf16", "fp8", "mxfp4", "q4_k" ... */
    int block;        /* columns a block (a slice along the columns falls on its border) */
    int block_bytes;  /* bytes of a block in the main array */
    int bscale_block; /* columns a byte of the second array covers; 0: no second array */
};
extern const struct dtype_info dtype_infos[DT_COUNT];

/* A matrix W[rows, cols], row-major, as a checkpoint stores it. Pointers are borrowed (a file map, or an arena of
 * the model). For F8_E4M3 and NVFP4 the element (r, c) is multiplied by
 *     scale[(r / scale_rows) * scale_stride + c / scale_cols]
 * (per tensor: scale_rows = rows, scale_cols = cols; per channel: 1, cols; Qwen: 128, 128), where in a view r and c
 * count from the corner of the whole matrix. scale == NULL means 1. */
struct dmat {
    enum dtype type;
    int64_t rows, cols;
    const uint8_t *data; /* row r begins at data + r * row_stride */
    size_t row_stride; /* bytes; dtype_row_bytes(type, cols), or more where rows interleave or columns are a slice */
    const uint8_t *bscale; /* second array of MXFP4 and NVFP4: row r at bscale + r * bscale_stride */
    size_t bscale_stride;
    const float *scale;
    int64_t scale_rows, scale_cols, scale_stride;
    int64_t scale_row0, scale_col0; /* where row 0 and column 0 of this slice stand inside the scale's grid */
    const struct fmap *map;         /* the file that data lies in, for fmap_drop; NULL where it is not in a map */
};

/* Bytes of `cols` elements in the main array, a begun block counted whole; SIZE_MAX if a size cannot hold them. */
size_t dtype_row_bytes(enum dtype type, int64_t cols);
/* All bytes that the matrix, or the view of one, takes as stored, scales included. */
size_t dmat_bytes(const struct dmat *m);
/* out[0..cols) = row r, exactly as the format defines it, rounded once to float. */
void dmat_row(const struct dmat *m, int64_t r, float *out);
/* Rows [r0, r1) as a view. Columns [c0, c1) as a view: both on block borders (asserted: the plan sees to it). */
struct dmat dmat_rows(const struct dmat *m, int64_t r0, int64_t r1);
struct dmat dmat_cols(const struct dmat *m, int64_t c0, int64_t c1);

/* Scalars, exact. */
float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f); /* round to nearest even, overflow to infinity, NaN stays NaN */
float bf16_to_f32(uint16_t h);
uint16_t f32_to_bf16(float f);
float e4m3_to_f32(uint8_t b);
float e5m2_to_f32(uint8_t b);
float e8m0_to_f32(uint8_t b);
float e2m1_to_f32(uint8_t nibble);
/* Round to nearest, ties to even, saturate to +-448; NaN stays NaN. */
uint8_t f32_to_e4m3(float f);

#endif
