/* Attention of a few query rows to keys and values in host memory, each of which is read once.

   Attention to one new token is two products of a few rows with a long matrix: 2 FLOPs for each bf16 value with one
   row, 16 with eight rows, which share a key in grouped-query attention. The products of libraries are made for many
   rows. Here a core keeps several sums of vectors in its registers and uses each widened vector for four rows, so that
   memory is the only limit.

   int8 rows are followed, in memory, by their scale, a float32.

   `attend` computes all of attention for rows of several micro-batches at once, without their scores ever leaving a
   core's cache; a core takes a head of a row, or where these are few, a part of its tokens. Queries and results are
   float32 and contiguous. */

#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "attend.c needs a little-endian processor: it splits pairs of bf16"
#endif

#if defined(__AVX512F__)
#define LANES 16   /* floats in a register */
#define TOGETHER 4 /* rows that share a widened vector: their sums take half of the registers */
#define QUADS(one) one(0), one(4), one(8), one(12)
#elif defined(__AVX2__) && defined(__F16C__)
#define LANES 8
#define TOGETHER 2
#define QUADS(one) one(0), one(4)
#else
#define LANES 4
#define TOGETHER 2
#define QUADS(one) one(0)
#endif

#define CHUNK (2 * LANES) /* elements widened at a time, into two registers */
#define KEYS 4            /* keys multiplied with the rows at a time */
#define SPAN 256   /* maximum of columns of values */
#define TOKENS 128 /* tokens that a thread takes at a time: still in its cache when rows 5 and on read them again */
#define AHEAD 16   /* distance, in tokens, at which keys and values are prefetched: no core looks that far by itself */
#define ROWS 128   /* maximum of query rows */
#define WIDTH 1024 /* maximum of elements in a key */

#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef float quads __attribute__((vector_size(16)));
typedef uint32_t pairs __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));

typedef enum { bfloat16, float16, float32, int8 } type;

INLINE int64_t size_of(type kind) { return kind == float32 ? 4 : kind == int8 ? 1 : 2; }

INLINE float scale_of(type kind, const char *behind) {
    float scale = 1;
    if (kind == int8) memcpy(&scale, behind, sizeof scale);
    return scale;
}

INLINE floats load(const void *from) {
    floats found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE floats widen_float16(const char *from) {
    shorts narrow;
    memcpy(&narrow, from, sizeof narrow);
#if LANES == 16
    return (floats)_mm512_cvtph_ps((__m256i)narrow);
#elif LANES == 8
    return (floats)_mm256_cvtph_ps((__m128i)narrow);
#else
    pairs wide = __builtin_convertvector(narrow, pairs), magnitude = (wide & 0x7fff) << 13;
    pairs special = (pairs)(magnitude >= 0x0f800000); /* infinity or NaN */
    pairs finite = (pairs)((floats)magnitude * 0x1p112f);
    return (floats)((wide & 0x8000) << 16 | (special & (magnitude | 0x7f800000)) | (~special & finite));
#endif
}

/* True if widening puts the two elements of a pair into different registers: shifts split the pair, which is fast on
   every processor. Bytes are split so where no instruction widens them. */
INLINE int parted(type kind) { return kind == bfloat16 || (kind == int8 && LANES == 4); }

INLINE void widen_int8(const char *from, floats *first, floats *second) {
#if LANES == 16
    *first = (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
    *second = (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + LANES))));
#elif LANES == 8
    *first = (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
    *second = (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from + LANES))));
#else
    shorts both;
    memcpy(&both, from, sizeof both);
    pairs wide = __builtin_convertvector(both, pairs);
    *first = __builtin_convertvector((ints)(wide << 24) >> 24, floats);
    *second = __builtin_convertvector((ints)(wide << 16) >> 24, floats);
#endif
}

/* Widens a chunk. With parted pairs `first` has the even elements and `second` the odd ones; else each has a half. */
INLINE void widen(type kind, const char *from, floats *first, floats *second) {
    if (kind == bfloat16) {
        pairs both;
        memcpy(&both, from, sizeof both);
        *first = (floats)(both << 16);
        *second = (floats)(both & 0xffff0000);
    } else if (kind == int8) {
        widen_int8(from, first, second);
    } else if (kind == float16) {
        *first = widen_float16(from);
        *second = widen_float16(from + sizeof(shorts));
    } else {
        *first = load(from);
        *second = load(from + sizeof *first);
    }
}

/* Widens the last `left` elements of a row, without reading beyond it: the memory may be another's, or not mapped. */
INLINE void widen_some(type kind, const char *from, int64_t left, floats *first, floats *second) {
    if (left >= CHUNK) {
        widen(kind, from, first, second);
    } else {
        char padded[4 * CHUNK] = {0};
        memcpy(padded, from, left * size_of(kind));
        widen(kind, padded, first, second);
    }
}

/* Reorders `size` elements of a row as widened chunks have them, padded with zeros; unlay restores the order. */
INLINE void lay(type kind, const float *row, int64_t size, float *laid) {
    for (int64_t d = 0; d < size; d += CHUNK) {
        float padded[CHUNK] = {0};
        memcpy(padded, row + d, (size - d < CHUNK ? size - d : CHUNK) * sizeof(float));
        for (int i = 0; i < LANES; i++) {
            laid[d + i] = padded[parted(kind) ? 2 * i : i];
            laid[d + LANES + i] = padded[parted(kind) ? 2 * i + 1 : LANES + i];
        }
    }
}

INLINE void unlay(type kind, const float *laid, int64_t size, float *row) {
    for (int64_t d = 0; d < size; d++) {
        int64_t i = d % CHUNK;
        row[d] = laid[d - i + (parted(kind) ? i % 2 * LANES + i / 2 : i)];
    }
}

/* Sums the lanes of each of four registers: lanes of two registers are interleaved before each sum, so none is idle. */
#define EVEN(i) a[i], b[i], a[i + 2], b[i + 2]
#define ODD(i) a[i + 1], b[i + 1], a[i + 3], b[i + 3]
#define LOW(i) a[i], a[i + 1], b[i], b[i + 1]
#define HIGH(i) a[i + 2], a[i + 3], b[i + 2], b[i + 3]

INLINE floats side_by_side(floats a, floats b) { return (floats){QUADS(EVEN)} + (floats){QUADS(ODD)}; }

INLINE void totals(const floats *sums, float *four) {
    floats a = side_by_side(sums[0], sums[1]), b = side_by_side(sums[2], sums[3]);
    floats all = (floats){QUADS(LOW)} + (floats){QUADS(HIGH)};
    quads part[LANES / 4];
    memcpy(part, &all, sizeof all);
    for (int i = 1; i < LANES / 4; i++) part[0] += part[i];
    memcpy(four, part, sizeof part[0]);
}

INLINE void prefetch(const char *from, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line);
}

/* Multiplies `count` rows with KEYS keys; the rows are in the order of `lay`, WIDTH apart. */
INLINE void dots_of(type kind, int count, const float *rows, const char *const *keys, int64_t width,
                    float products[][KEYS]) {
    floats sums[4][KEYS];
    for (int r = 0; r < count; r++)
        for (int k = 0; k < KEYS; k++) sums[r][k] = (floats){0};
    for (int64_t d = 0; d < width; d += CHUNK) {
        floats wide[KEYS][2];
        for (int k = 0; k < KEYS; k++)
            widen_some(kind, keys[k] + d * size_of(kind), width - d, &wide[k][0], &wide[k][1]);
        for (int r = 0; r < count; r++) {
            floats first = load(rows + r * WIDTH + d), second = load(rows + r * WIDTH + d + LANES);
            for (int k = 0; k < KEYS; k++) sums[r][k] += first * wide[k][0];
            for (int k = 0; k < KEYS; k++) sums[r][k] += second * wide[k][1];
        }
    }
    for (int r = 0; r < count; r++) totals(sums[r], products[r]);
}

/* out[r][t] = sum over d of rows[r][d] * keys[t][d], for `tokens` keys; rows of `out` are TOKENS apart. */
INLINE void dots(type kind, const float *rows, const char *keys, float *out, int64_t stride, int64_t count,
                 int64_t tokens, int64_t width) {
    for (int64_t r = 0; r < count; r += TOGETHER) {
        int block = count - r < TOGETHER ? count - r : TOGETHER;
        float laid[TOGETHER * WIDTH];
        for (int i = 0; i < block; i++) lay(kind, rows + (r + i) * width, width, laid + i * WIDTH);
        for (int64_t t = 0; t < tokens; t += KEYS) {
            const char *own[KEYS];
            float products[4][KEYS];
            for (int k = 0; k < KEYS; k++) own[k] = keys + (t + k < tokens ? t + k : tokens - 1) * stride * size_of(kind);
            for (int k = 0; k < KEYS && !r; k++)
                prefetch(own[k] + AHEAD * stride * size_of(kind), width * size_of(kind));
            if (block == 1) dots_of(kind, 1, laid, own, width, products);
            else if (block == 2) dots_of(kind, 2, laid, own, width, products);
            else if (block == 3) dots_of(kind, 3, laid, own, width, products);
            else dots_of(kind, 4, laid, own, width, products);
            for (int k = 0; k < KEYS && t + k < tokens; k++) {
                float scale = scale_of(kind, own[k] + width * size_of(kind));
                for (int i = 0; i < block; i++) out[(r + i) * TOKENS + t + k] = scale * products[i][k];
            }
        }
    }
}

/* Adds `tokens` values, weighted by `parts` and by `scales` (those of int8 rows), to `chunks` chunks of the sums of `count` rows,
   SPAN apart. Prefetches the first `ahead` bytes of later values. */
INLINE void mix_of(type kind, int count, int chunks, int64_t left, int64_t ahead, float *sums, const float *parts,
                   const char *values, const char *scales, int64_t stride, int64_t tokens) {
    floats own[4][8];
    for (int r = 0; r < count; r++) memcpy(own[r], sums + r * SPAN, chunks * CHUNK * sizeof(float));
    for (int64_t t = 0; t < tokens; t++) {
        prefetch(values + (t + AHEAD) * stride * size_of(kind), ahead);
        float scale = scale_of(kind, scales + t * stride * size_of(kind)), part[4];
        for (int r = 0; r < count; r++) part[r] = scale * parts[r * TOKENS + t];
        for (int c = 0; c < chunks; c++) {
            floats first, second;
            widen_some(kind, values + (t * stride + c * CHUNK) * size_of(kind), left, &first, &second);
            for (int r = 0; r < count; r++) {
                own[r][2 * c] += part[r] * first;
                own[r][2 * c + 1] += part[r] * second;
            }
        }
    }
    for (int r = 0; r < count; r++) memcpy(sums + r * SPAN, own[r], chunks * CHUNK * sizeof(float));
}

/* Runs mix_of over all chunks of `columns` columns, as many chunks at a time as there are registers for. */
INLINE void mix_all(type kind, int count, int64_t columns, float *sums, const float *parts, const char *values,
                    const char *scales, int64_t stride, int64_t tokens) {
    const int chunks = count > 2 ? 2 : count > 1 ? TOGETHER : 4;
    const int64_t size = size_of(kind);
    int64_t d = 0, ahead = columns * size;
    for (; d + chunks * CHUNK <= columns; d += chunks * CHUNK, ahead = 0)
        mix_of(kind, count, chunks, CHUNK, ahead, sums + d, parts, values + d * size, scales, stride, tokens);
    for (; d + CHUNK <= columns; d += CHUNK, ahead = 0)
        mix_of(kind, count, 1, CHUNK, ahead, sums + d, parts, values + d * size, scales, stride, tokens);
    if (d < columns)
        mix_of(kind, count, 1, columns - d, ahead, sums + d, parts, values + d * size, scales, stride, tokens);
}

INLINE floats either(ints which, floats one, floats other) {
    return (floats)((which & (ints)one) | (~which & (ints)other));
}

#define LOWEST -87.3f /* e to anything below is less than the smallest normal number: it counts as 0 */

/* e^x of numbers up to 0, to 2 units in the last place; NaN stays NaN. As Cephes (Moshier) does it: 2^n e^r, |r| <=
   ln(2) / 2, with a polynomial for e^r. */
INLINE floats exponential(floats x) {
    ints tiny = x < LOWEST;
    floats zero = {0}, own = either(tiny, zero + LOWEST, x);
    floats n = own * 1.44269504f + 12582912.0f - 12582912.0f; /* rounded: 1.5 * 2^23 has no digits behind the point */
    floats r = own - n * 0.693359375f + n * 2.12194440e-4f, power = zero + 1.9875691500e-4f;
    power = power * r + 1.3981999507e-3f;
    power = power * r + 8.3334519073e-3f;
    power = power * r + 4.1665795894e-2f;
    power = power * r + 1.6666665459e-1f;
    power = power * r + 5.0000001201e-1f;
    power = power * r * r + r + 1.0f;
    /* The integer of n + 127, in the place of an exponent. */
    floats shifted = n + 12583039.0f;
    return either(tiny, zero, power * (floats)((pairs)shifted << 23));
}

/* cap * tanh(x / cap) of `count` scores. The room behind them is filled. */
INLINE void limit(float *scores, int64_t count, float cap) {
    for (int64_t t = 0; t < count; t += LANES) {
        floats x = load(scores + t) / cap, power = exponential(either(x > 0, -2 * x, 2 * x));
        floats share = cap * (1 - power) / (1 + power);
        share = either(x < 0, -share, share);
        memcpy(scores + t, &share, sizeof share);
    }
}

/* State of a softmax over all tokens so far: the largest score, and the sum of what its powers are. */
typedef struct { float most, total; } softmax;

/* Makes of `count` scores of new tokens their shares of a softmax, relative to the largest score so far; returns the
   factor for what was computed relative to the largest one before. The room behind the scores is filled. */
INLINE float shares(softmax *state, float *scores, int64_t count) {
    const float none = -__builtin_inff();
    floats best = (floats){0} + none, sum = {0};
    for (int64_t t = count; t % LANES; t++) scores[t] = none;
    for (int64_t t = 0; t < count; t += LANES) {
        floats some = load(scores + t);
        best = either(some > best, some, best);
    }
    float most = state->most, total = 0;
    for (int i = 0; i < LANES; i++) most = best[i] > most ? best[i] : most;
    int hidden = most == none; /* all of them so far: their shares are 0, but NaN stays what it is */
    for (int64_t t = 0; t < count; t += LANES) {
        floats some = load(scores + t), share = hidden ? some : exponential(some - most);
        share = either(some == none, (floats){0}, share);
        sum += share;
        memcpy(scores + t, &share, sizeof share);
    }
    for (int i = 0; i < LANES; i++) total += sum[i];
    float factor = hidden || state->most == none ? 0 : exponential((floats){0} + (state->most - most))[0];
    if (state->most == most) factor = 1;
    state->total = state->total * factor + total;
    state->most = most;
    return factor;
}

/* Rows of a micro-batch. Each has `heads` heads of keys and values, to which as many queries as the call says attend;
   `tokens` of each are seen. Strides are in elements: of rows, of heads, and of tokens or (bias) of queries. */
typedef struct {
    const char *keys, *values;
    const float *bias[2]; /* added to the scores of the first query of the first row; NULL from the end */
    int64_t rows, heads, tokens, of_keys[3], of_values[3], of_bias[2][3];
} block;

/* out[r] = softmax over t of (scale * (query[r] . keys[t]) + biases) times values[t], for all queries of a head. Before
   biases are added, scores are limited by `cap`, unless it is 0. A sink of each query, if given, is a score that takes
   its part of the softmax. Of `parts` equal parts of the tokens it takes number `part`; if there are several, `out` gets
   sums and `states`, which `join` makes the same of. */
INLINE void attend(type kind, const block *own, int64_t row, int64_t head, const float *query, const float *sinks,
                   float *out, softmax *states, int64_t count, int64_t width, int64_t columns, float scale, float cap,
                   int64_t part, int64_t parts) {
    float scores[ROWS * TOKENS], sums[ROWS * SPAN];
    const int64_t tiles = (own->tokens + TOKENS - 1) / TOKENS, first = tiles * part / parts * TOKENS;
    const int64_t last = tiles * (part + 1) / parts * TOKENS, end = last < own->tokens ? last : own->tokens;
    const int64_t size = size_of(kind), key = own->of_keys[2] * size, value = own->of_values[2] * size;
    const char *keys = own->keys + (row * own->of_keys[0] + head * own->of_keys[1]) * size;
    const char *values = own->values + (row * own->of_values[0] + head * own->of_values[1]) * size;
    memset(sums, 0, count * SPAN * sizeof(float));
    for (int64_t r = 0; r < count; r++)
        states[r] = sinks && !part ? (softmax){sinks[head * count + r], 1} : (softmax){-__builtin_inff(), 0};
    for (int64_t begin = first; begin < end; begin += TOKENS) {
        int64_t some = end - begin < TOKENS ? end - begin : TOKENS;
        const char *tile = values + begin * value, *behind = tile + columns * size;
        dots(kind, query, keys + begin * key, scores, own->of_keys[2], count, some, width);
        for (int64_t r = 0; r < count; r++) {
            float *part = scores + r * TOKENS;
            for (int64_t t = 0; t < some; t++) part[t] *= scale;
            if (cap != 0) limit(part, some, cap);
            for (int i = 0; i < 2 && own->bias[i]; i++) {
                const int64_t *stride = own->of_bias[i];
                const float *bias = own->bias[i] + row * stride[0] + head * stride[1] + r * stride[2] + begin;
                for (int64_t t = 0; t < some; t++) part[t] += bias[t];
            }
            float factor = shares(&states[r], part, some);
            for (int64_t d = 0; factor != 1 && d < SPAN; d++) sums[r * SPAN + d] *= factor;
        }
        for (int64_t r = 0; r < count; r += TOGETHER) {
            int together = count - r < TOGETHER ? count - r : TOGETHER;
            float *sum = sums + r * SPAN, *parts = scores + r * TOKENS;
            if (together == 1) mix_all(kind, 1, columns, sum, parts, tile, behind, own->of_values[2], some);
            else if (together == 2) mix_all(kind, 2, columns, sum, parts, tile, behind, own->of_values[2], some);
            else if (together == 3) mix_all(kind, 3, columns, sum, parts, tile, behind, own->of_values[2], some);
            else mix_all(kind, 4, columns, sum, parts, tile, behind, own->of_values[2], some);
        }
    }
    for (int64_t r = 0; r < count; r++) {
        float share = parts > 1 ? 1 : states[r].total == 0 ? 0 : 1 / states[r].total;
        unlay(kind, sums + r * SPAN, columns, out + r * columns);
        for (int64_t d = 0; d < columns; d++) out[r * columns + d] *= share;
    }
}

/* Makes of the sums of one query in all parts, `apart` floats from each other, the softmax over all of its tokens. Their
   states are `count` from each other. */
static void join(const float *sums, const softmax *states, float *out, int64_t apart, int64_t count, int64_t columns,
                 int64_t parts) {
    const float none = -__builtin_inff();
    float most = none, total = 0;
    for (int64_t p = 0; p < parts; p++) most = states[p * count].most > most ? states[p * count].most : most;
    for (int64_t d = 0; d < columns; d++) out[d] = 0;
    for (int64_t p = 0; p < parts; p++) {
        softmax state = states[p * count];
        float factor = state.most == none ? 0 : exponential((floats){0} + (state.most - most))[0];
        total += factor * state.total;
        for (int64_t d = 0; d < columns; d++) out[d] += factor * sums[p * apart + d];
    }
    for (int64_t d = 0; d < columns; d++) out[d] = total == 0 ? 0 : out[d] / total;
}

/* Returns how many of `tasks` a thread takes at a time, `most` at most. Threads take new ones as they end: one whose CPU
   other programs use, as on shared machines, does fewer, and the others need not wait for it. */
static int64_t grain(int64_t tasks, int threads, int64_t most) {
    int64_t fair = tasks / (16 * threads);
    return fair < 1 ? 1 : fair < most ? fair : most;
}

#define EXPORT(kind)                                                                                                  \
    void attend_##kind(const float *queries, const block *blocks, const float *sinks, float *out, float *sums,        \
                       softmax *states, int64_t all, int64_t parts, int64_t count, int64_t width,                     \
                       int64_t columns, float scale, float cap, int threads) {                                        \
        int64_t share = grain(all * parts, threads, 4), apart = count * columns;                                      \
        _Pragma("omp parallel for schedule(dynamic, share) num_threads(threads)")                                     \
        for (int64_t task = 0; task < all * parts; task++) {                                                          \
            const block *own = blocks;                                                                                \
            int64_t b = task / parts, place = b;                                                                      \
            for (; place >= own->rows * own->heads; own++) place -= own->rows * own->heads;                           \
            attend(kind, own, place / own->heads, place % own->heads, queries + b * count * width, sinks,             \
                   (parts > 1 ? sums : out) + task * apart, states + task * count, count, width, columns, scale,      \
                   cap, task % parts, parts);                                                                         \
        }                                                                                                             \
        if (parts > 1)                                                                                                \
            for (int64_t i = 0; i < all * count; i++) {                                                               \
                int64_t from = i / count * parts * count + i % count;                                                 \
                join(sums + from * columns, states + from, out + i * columns, apart, count, columns, parts);          \
            }                                                                                                         \
    }

EXPORT(bfloat16)
EXPORT(float16)
EXPORT(float32)
EXPORT(int8)
