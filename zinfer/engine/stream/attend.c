/* A few query rows against keys and values in host memory, each of which is read once.

   Attention to one new token is two products of a few rows with a long matrix: 2 FLOPs a byte of bf16, so a core that
   widens and multiplies a vector at a time waits for memory. Libraries' products are made for many rows, and do not.

   int8 rows are followed, in memory, by their scale, a float32.

   Matrix b of `outer * inner` begins `(b / inner) * stride_outer + (b % inner) * stride_inner` elements on; its rows,
   one a token, are `width` elements side by side and `stride` elements apart. Rows that meet it, and results, are
   float32 and contiguous. */

#include <stdint.h>
#include <string.h>

#define COLUMNS 32  /* of values that a thread sums at a time: a cache line of bf16 */
#define TOKENS 256  /* of keys that a thread takes at a time */
#define ROWS 64     /* at most */
#define WIDTH 1024  /* of keys, at most */

static inline float from_bfloat16(uint16_t value) {
    uint32_t wide = (uint32_t)value << 16;
    float result;
    memcpy(&result, &wide, sizeof result);
    return result;
}

static inline float from_float16(_Float16 value) { return (float)value; }

static inline float from_float32(float value) { return value; }

static inline float from_int8(int8_t value) { return (float)value; }

static inline float scale_of(const int8_t *row, int64_t width) {
    float scale;
    memcpy(&scale, row + width, sizeof scale);
    return scale;
}

#define UNSCALED(row, width) 1.0f
#define KERNELS(NAME, TYPE, SCALE)                                                                                    \
    /* out[b][r][t] = sum over d of rows[b][r][d] * keys[b][t][d] */                                                  \
    void dots_##NAME(const float *rows, const TYPE *keys, float *out, int64_t outer, int64_t inner,                   \
                     int64_t stride_outer, int64_t stride_inner, int64_t stride, int64_t count, int64_t tokens,       \
                     int64_t width, int threads) {                                                                    \
        _Pragma("omp parallel for collapse(2) schedule(static) num_threads(threads)")                                 \
        for (int64_t b = 0; b < outer * inner; b++) {                                                                 \
            for (int64_t begin = 0; begin < tokens; begin += TOKENS) {                                                \
                const TYPE *own = keys + b / inner * stride_outer + b % inner * stride_inner;                         \
                int64_t end = begin + TOKENS < tokens ? begin + TOKENS : tokens;                                      \
                for (int64_t t = begin; t < end; t++) {                                                               \
                    const TYPE *key = own + t * stride;                                                               \
                    float wide[WIDTH], scale = SCALE(key, width);                                                     \
                    for (int64_t d = 0; d < width; d++) wide[d] = scale * from_##NAME(key[d]);                        \
                    int64_t r = 0;                                                                                    \
                    for (; r + 4 <= count; r += 4) { /* what is widened once serves four rows */                      \
                        const float *row = rows + (b * count + r) * width;                                            \
                        float sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;                                                 \
                        _Pragma("omp simd reduction(+ : sum0, sum1, sum2, sum3)")                                     \
                        for (int64_t d = 0; d < width; d++) {                                                         \
                            sum0 += row[d] * wide[d];                                                                 \
                            sum1 += row[d + width] * wide[d];                                                         \
                            sum2 += row[d + 2 * width] * wide[d];                                                     \
                            sum3 += row[d + 3 * width] * wide[d];                                                     \
                        }                                                                                             \
                        float *place = out + (b * count + r) * tokens + t;                                            \
                        place[0] = sum0, place[tokens] = sum1, place[2 * tokens] = sum2, place[3 * tokens] = sum3;    \
                    }                                                                                                 \
                    for (; r < count; r++) {                                                                          \
                        const float *row = rows + (b * count + r) * width;                                            \
                        float sum = 0;                                                                                \
                        _Pragma("omp simd reduction(+ : sum)")                                                        \
                        for (int64_t d = 0; d < width; d++) sum += row[d] * wide[d];                                  \
                        out[(b * count + r) * tokens + t] = sum;                                                      \
                    }                                                                                                 \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
                                                                                                                      \
    /* out[b][r][d] = sum over t of rows[b][r][t] * values[b][t][d] */                                                \
    void mix_##NAME(const float *rows, const TYPE *values, float *out, int64_t outer, int64_t inner,                  \
                    int64_t stride_outer, int64_t stride_inner, int64_t stride, int64_t count, int64_t tokens,        \
                    int64_t width, int threads) {                                                                     \
        int64_t columns = outer * inner < 4 * threads ? COLUMNS : width;                                              \
        if (columns > 256) columns = 256;                                                                             \
        _Pragma("omp parallel for collapse(2) schedule(static) num_threads(threads)")                                 \
        for (int64_t b = 0; b < outer * inner; b++) {                                                                 \
            for (int64_t begin = 0; begin < width; begin += columns) {                                                \
                const TYPE *own = values + b / inner * stride_outer + b % inner * stride_inner;                       \
                int64_t size = begin + columns < width ? columns : width - begin;                                     \
                float sums[ROWS][256];                                                                                \
                for (int64_t r = 0; r < count; r++) memset(sums[r], 0, size * sizeof(float));                         \
                for (int64_t t = 0; t < tokens; t++) {                                                                \
                    const TYPE *value = own + t * stride + begin;                                                     \
                    for (int64_t r = 0; r < count; r++) {                                                             \
                        float part = rows[(b * count + r) * tokens + t] * SCALE(own + t * stride, width);             \
                        _Pragma("omp simd")                                                                           \
                        for (int64_t d = 0; d < size; d++) sums[r][d] += part * from_##NAME(value[d]);                \
                    }                                                                                                 \
                }                                                                                                     \
                for (int64_t r = 0; r < count; r++)                                                                   \
                    memcpy(out + (b * count + r) * width + begin, sums[r], size * sizeof(float));                     \
            }                                                                                                         \
        }                                                                                                             \
    }

KERNELS(bfloat16, uint16_t, UNSCALED)
KERNELS(float16, _Float16, UNSCALED)
KERNELS(float32, float, UNSCALED)
KERNELS(int8, int8_t, scale_of)
