/* Routed experts of a few tokens on the CPU, from their codes as host memory stores them.

   A token reads megabytes of each of its experts and computes two to four FLOPs a byte: so each byte is read once, in
   order, and unpacked in registers. With one to eight tokens 15 cores of an H200's host read 84 to 88 GB/s of MXFP4, of
   the 121 that they read without computing. All tokens that share an expert are multiplied with a row of codes while it
   is in a core's cache. Rows of a matrix are outputs.

   With AVX-512 codes become bf16 by a look-up in registers, best where a processor multiplies bf16 (AVX512-BF16). They
   are exact so: scales, zero points and minimums are applied to sums of a group. Elsewhere rows become float32 first. */

#include <omp.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__FMA__)
#define FAST 1
#else
#define FAST 0
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "cpu_experts.c needs a little-endian processor: it reads bf16 as the upper half of float32"
#endif

#define INLINE static inline __attribute__((always_inline))
#define CHUNK 64          /* columns that registers hold at a time */
#define LANE 16           /* columns whose inputs are summed */
#define TOGETHER 4        /* tokens that share unpacked codes */
#define PAIR 2            /* rows of outputs at a time */
#define ITEM (256 << 10)  /* bytes of codes that a thread takes at a time */
#define AHEAD (8 << 10)   /* bytes by which rows are fetched ahead: 84 GB/s of MXFP4 so; 72 with 16 KiB, 75 with 4 */
#define SUPER 256         /* columns whose scales share a factor of their own */
#define PIECE 128         /* values of a pair, or of a token, that a thread takes at a time between products */
#define AWAY_S 1e-3       /* seconds for which another program has a core */
#define IDLE_S 2e-3       /* seconds without a request after which threads sleep */
#define IDLE_NS 50000     /* nanoseconds that they sleep at a time then */
#define LONG_S 1.0        /* seconds after which they sleep for longer: LONG_NS */
#define LONG_NS 2000000
#define SLEEPY 200        /* calls whose threads sleep while they wait for each other after that */
#define SLEEPY_NS 5000    /* nanoseconds that they sleep at a time */
#define MAX_PAIRS 1024    /* pairs of a token and an expert in a call */

/* Of codes of 5 and 6 bits the low 4 bits of a row come first, as of those of 4; then the others. */
typedef enum { float32, bfloat16, float16, e8m0, e4m3, int16, int8, uint8, codes8, codes4, codes5, codes6 } type;

/* Rows of an expert's matrix: their codes, scales (NULL: all are 1), zero points or minimums (NULL: all are 0), factors
   of these for `SUPER` columns (NULL: all are 1), and number. */
typedef struct {
    const uint8_t *codes, *scales, *zeros;
    const uint16_t *supers; /* of scales, or of scales and minimums by turns */
    int64_t rows;
    float factor, unused; /* of all scales */
} part;

/* A matrix of all experts: `count` parts of each. `columns` are those stored; a scale is for `height` rows and `width`
   columns, in a row of `across`; one scale row or column is for all rows or columns. `table` are the values of codes.
   Zeros of type int16 are subtracted from them, others, minimums, from products with scales. A value is rounded to the
   type `inner`, unless products are fast. */
typedef struct {
    const part *parts;
    const void *const *bias; /* of each expert, of the type of states; NULL: none */
    const float *table;
    int64_t count, rows, columns, row_bytes, height, width, down, across;
    int32_t kind, scale_kind, zero_kind, inner, fast, unused;
} matrix;

/* Experts of a layer. A gate is gate * sigmoid(alpha * gate) * (up + offset), both limited. */
typedef struct {
    matrix up, down;
    int64_t experts;
    int32_t states, interleaved;
    float alpha, limit, offset, unused;
} layer;

/* A call: `each` experts for each of `tokens` tokens, whose `weights` are float32. `sums` has the room that
   `experts_room` tells. */
typedef struct {
    const layer *experts;
    const void *states;
    const int64_t *chosen;
    const float *weights;
    void *out;
    float *sums;
    int64_t tokens, each, threads;
} call;

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE uint16_t to_bf16(float value) {
    uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40; /* NaN */
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

INLINE float from_half(uint16_t half) {
#ifdef __F16C__
    return _cvtsh_ss(half);
#endif
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    if ((half & 0x7c00) == 0x7c00) return from_bits(sign | 0x7f800000 | (half & 0x3ff) << 13);
    return from_bits(sign | to_bits(from_bits((uint32_t)(half & 0x7fff) << 13) * 0x1p112f));
}

/* Rounds to nearest, ties to even, as a processor does. */
INLINE uint16_t to_half(float value) {
    uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size >= 0x47800000) return sign | (size > 0x7f800000 ? 0x7e00 : 0x7c00);
    if (size < 0x38800000) return sign | (to_bits(from_bits(size) + 0.5f) - to_bits(0.5f)); /* subnormal */
    size += 0xc8000fff + (size >> 13 & 1);
    return sign | size >> 13;
}

INLINE float load(type kind, const void *values, int64_t i) {
    const uint8_t byte = kind > float16 ? ((const uint8_t *)values)[i] : 0;
    if (kind == bfloat16) return from_bits((uint32_t)((const uint16_t *)values)[i] << 16);
    if (kind == float16) return from_half(((const uint16_t *)values)[i]);
    if (kind == e8m0) return from_bits(byte ? (uint32_t)byte << 23 : 1 << 22);
    if (kind == e4m3) return (byte & 0x80 ? -0x1p120f : 0x1p120f) * from_bits((uint32_t)(byte & 0x7f) << 20);
    if (kind == int16) return ((const int16_t *)values)[i];
    if (kind == int8) return (int8_t)byte;
    return kind == uint8 ? byte : ((const float *)values)[i];
}

INLINE float rounded(type kind, float value) {
    if (kind == bfloat16) return from_bits((uint32_t)to_bf16(value) << 16);
    return kind == float16 ? from_half(to_half(value)) : value;
}

/* e^x, to a few units in the last place, as Cephes (Moshier) does it. */
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = x * 1.44269504f + 12582912.0f - 12582912.0f, r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float power = 1.9875691500e-4f;
    power = power * r + 1.3981999507e-3f;
    power = power * r + 8.3334519073e-3f;
    power = power * r + 4.1665795894e-2f;
    power = power * r + 1.6666665459e-1f;
    power = power * r + 5.0000001201e-1f;
    power = power * r * r + r + 1.0f;
    return power * from_bits((uint32_t)((int32_t)n + 127) << 23);
}

#ifdef __F16C__
/* Eight values from number `i` on, of types that compilers are slow with. */
INLINE __m256 load_eight(type kind, const void *values, int64_t i) {
    if (kind == float16) return _mm256_cvtph_ps(_mm_loadu_si128((const void *)((const uint16_t *)values + i)));
    __m128i bytes = _mm_loadl_epi64((const void *)((const uint8_t *)values + i));
    __m256i eight = kind == int8 ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
    if (kind != e8m0) return _mm256_cvtepi32_ps(eight);
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(eight, 23), _mm256_set1_epi32(1 << 22)));
}
#endif

/* Values number `first` and on, `count` of them, times a factor. */
INLINE void load_all(type kind, const void *values, int64_t first, int64_t count, float factor, float *restrict out) {
    int64_t i = 0;
#ifdef __F16C__
    const int eights = kind == float16 || kind == e8m0 || kind == int8 || kind == uint8;
    for (const int64_t whole = count / 8 * 8; eights && i < whole; i += 8)
        _mm256_storeu_ps(out + i, _mm256_mul_ps(load_eight(kind, values, first + i), _mm256_set1_ps(factor)));
#endif
    for (; i < count; i++) out[i] = load(kind, values, first + i) * factor;
}

static void values_of(type kind, const void *values, int64_t first, int64_t count, float factor, float *out) {
    switch (kind) {
    case bfloat16: load_all(bfloat16, values, first, count, factor, out); break;
    case float16: load_all(float16, values, first, count, factor, out); break;
    case e8m0: load_all(e8m0, values, first, count, factor, out); break;
    case e4m3: load_all(e4m3, values, first, count, factor, out); break;
    case int16: load_all(int16, values, first, count, factor, out); break;
    case int8: load_all(int8, values, first, count, factor, out); break;
    case uint8: load_all(uint8, values, first, count, factor, out); break;
    default: load_all(float32, values, first, count, factor, out);
    }
}

/* Scales number `first` and on of a part. */
static void scales_of(const matrix *m, const part *p, int64_t first, int64_t count, float *out) {
    if (p->scales) values_of(m->scale_kind, p->scales, first, count, p->factor, out);
    else
        for (int64_t i = 0; i < count; i++) out[i] = p->factor;
}

/* Scales and minimums of a row of super blocks: of type uint8 for 32 columns, or scales of type int8 for 16. */
INLINE void supers_of(const matrix *m, const part *p, int64_t row, float *scales, float *minimums) {
    const int64_t blocks = m->columns / SUPER, each = p->zeros ? 2 : 1;
    float factors[blocks * each];
    load_all(float16, p->supers, row * blocks * each, blocks * each, p->factor, factors);
    for (int64_t b = 0, first = row * m->across; b < blocks; b++)
        if (p->zeros) {
            load_all(uint8, p->scales, first + 8 * b, 8, factors[2 * b], scales + 8 * b);
            load_all(uint8, p->zeros, first + 8 * b, 8, factors[2 * b + 1], minimums + 8 * b);
        } else load_all(int8, p->scales, first + 16 * b, 16, factors[b], scales + 16 * b);
}

/* Scales of a row's groups of columns, and what is subtracted from products with them. */
static void groups_of(const matrix *m, const part *p, int64_t row, float *scales, float *minimums) {
    const int64_t first = m->down > 1 ? row / m->height * m->across : 0;
    if (p->supers) {
        supers_of(m, p, row, scales, minimums);
        return;
    }
    scales_of(m, p, first, m->across, scales);
    if (p->zeros) values_of(m->zero_kind, p->zeros, first, m->across, 1, minimums);
    for (int64_t g = 0; p->zeros && m->zero_kind == int16 && g < m->across; g++) minimums[g] *= scales[g];
}

/* Values of codes of 4 bits, or of the low 4 bits of others, without scales. */
static void look_up(const float *table, const uint8_t *codes, int64_t columns, float *restrict out) {
    int64_t c = 0;
    float values[16];
    memcpy(values, table, sizeof values);
#ifdef __AVX2__
    int8_t halves[16]; /* of all tables these are small whole numbers */
    for (int i = 0; i < 16; i++) halves[i] = (int8_t)(2 * values[i]);
    const __m128i all = _mm_loadu_si128((const void *)halves), low = _mm_set1_epi8(15);
    for (; c + 32 <= columns; c += 32) {
        __m128i bytes = _mm_loadu_si128((const void *)(codes + c / 2));
        __m128i even = _mm_shuffle_epi8(all, _mm_and_si128(bytes, low));
        __m128i odd = _mm_shuffle_epi8(all, _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
        __m128i some[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
        for (int i = 0; i < 4; i++) {
            __m256i eight = _mm256_cvtepi8_epi32(i % 2 ? _mm_srli_si128(some[i / 2], 8) : some[i / 2]);
            _mm256_storeu_ps(out + c + 8 * i, _mm256_mul_ps(_mm256_cvtepi32_ps(eight), _mm256_set1_ps(0.5f)));
        }
    }
#endif
    for (; c < columns; c++) out[c] = values[codes[c / 2] >> c % 2 * 4 & 15];
}

/* Adds the other bits of codes, `bits` of each. */
INLINE void add_high(const uint8_t *high, int bits, int64_t columns, float *restrict out) {
    const int all = (1 << bits) - 1;
    int64_t c = 0;
#ifdef __AVX2__
    const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    for (; c + 8 <= columns; c += 8, high += bits) {
        int32_t some = 0;
        memcpy(&some, high, bits);
        __m256i eight = _mm256_srlv_epi32(_mm256_set1_epi32(some), _mm256_mullo_epi32(lanes, _mm256_set1_epi32(bits)));
        eight = _mm256_slli_epi32(_mm256_and_si256(eight, _mm256_set1_epi32(all)), 4);
        _mm256_storeu_ps(out + c, _mm256_add_ps(_mm256_loadu_ps(out + c), _mm256_cvtepi32_ps(eight)));
    }
#endif
    for (int i = 0; c < columns; c++, i += bits) out[c] += (high[i / 8] >> i % 8 & all) << 4;
}

/* A stored row as float32. */
static void unpack(const matrix *m, const part *p, int64_t row, float *restrict out) {
    float scales[m->across], minimums[m->across];
    const uint8_t *restrict codes = p->codes + row * m->row_bytes;
    const float *restrict table = m->table;
    const int64_t columns = m->columns, groups = m->across, width = groups > 1 ? m->width : columns;
    groups_of(m, p, row, scales, minimums);
    if (!p->zeros) memset(minimums, 0, sizeof minimums);
    if (m->kind >= codes4) look_up(table, codes, columns, out);
    else if (m->kind == codes8 || m->kind == e4m3)
        for (int64_t c = 0; c < columns; c++) out[c] = table[codes[c]];
    else values_of(m->kind, codes, 0, columns, 1, out);
    if (m->kind == codes5) add_high(codes + columns / 2, 1, columns, out);
    if (m->kind == codes6) add_high(codes + columns / 2, 2, columns, out);
    if (width == 1)
        for (int64_t c = 0; c < columns; c++) out[c] = out[c] * scales[c] - minimums[c];
    for (int64_t g = 0; width > 1 && g < groups; g++) {
        const float scale = scales[g], minimum = minimums[g];
        const int64_t end = (g + 1) * width < columns ? (g + 1) * width : columns;
        for (int64_t c = g * width; c < end; c++) out[c] = out[c] * scale - minimum;
    }
    for (int64_t c = 0; m->inner != float32 && c < columns; c++) out[c] = rounded(m->inner, out[c]);
}

/* Inputs of a product: float32; and for fast ones bf16, in the order of unpacked codes, and the sums of each `LANE`. */
typedef struct { float *values, *sums; uint16_t *halves; } input;

/* Prepares values `first` to `end` of an input of a fast product. */
static void prepare(const matrix *m, input in, int64_t first, int64_t end) {
    if (!m->fast) return;
    for (int64_t c = first; c < end; c += CHUNK) {
        if (m->kind < codes4)
            for (int i = 0; i < CHUNK && c + i < end; i++) in.halves[c + i] = to_bf16(in.values[c + i]);
        else
            for (int i = 0; i < CHUNK; i++) in.halves[c + i % 2 * 32 + i / 2] = to_bf16(in.values[c + i]);
        for (int i = 0; i < CHUNK; i += LANE) {
            float sum = 0;
            for (int n = 0; n < LANE; n++) sum += rounded(bfloat16, in.values[c + i + n]);
            in.sums[(c + i) / LANE] = sum;
        }
    }
}

#if FAST

/* Adds products of pairs of bf16 to sums. */
INLINE __m512 dot(__m512 sums, __m512i one, __m512i other) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sums, (__m512bh)one, (__m512bh)other);
#else
    const __m512i high = _mm512_set1_epi32(-65536);
    __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(one, 16));
    __m512 second = _mm512_castsi512_ps(_mm512_and_si512(one, high));
    sums = _mm512_fmadd_ps(first, _mm512_castsi512_ps(_mm512_slli_epi32(other, 16)), sums);
    return _mm512_fmadd_ps(second, _mm512_castsi512_ps(_mm512_and_si512(other, high)), sums);
#endif
}

/* bf16 values of up to 64 codes; of fewer repeatedly, so that what looks one up need not hide other bits. */
INLINE void table_of(const matrix *m, __m512i tables[2]) {
    uint16_t table[64] = {0};
    const int count = m->kind < codes4 ? 0 : 16 << (m->kind - codes4);
    for (int i = 0; count && i < 64; i++) table[i] = to_bf16(m->table[i % count]);
    for (int i = 0; m->kind == e4m3 && i < 8; i++) table[i] = to_bf16(i * 0x1p-9f); /* subnormal numbers */
    tables[0] = _mm512_loadu_si512(table), tables[1] = _mm512_loadu_si512(table + 32);
}

/* Bits above the low 4 of 64 codes, from bit 4 on: in each 32 bits those of a byte pair of low bits. Those of the first
   code of each byte are in their place, those of the second one more to the left. */
INLINE __m512i high_bits(type kind, const uint8_t *high) {
    if (kind == codes6) {
        __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)high));
        return _mm512_or_si512(_mm512_slli_epi32(bytes, 4), _mm512_slli_epi32(bytes, 16));
    }
    __m128i eight = _mm_loadl_epi64((const void *)high);
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(eight, eight));
    return _mm512_or_si512(_mm512_sllv_epi32(bytes, _mm512_set4_epi32(0, 4, 0, 4)),
                           _mm512_sllv_epi32(bytes, _mm512_set4_epi32(14, 18, 14, 18)));
}

/* 32 values of 8 bits. */
INLINE __m512i bytes_to_bf16(type kind, const uint8_t *codes, __m512i table, __m128i flip, __m512 shift) {
    if (kind == e4m3) {
        __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)codes));
        __m512i size = _mm512_and_si512(words, _mm512_set1_epi16(0x7f));
        __m512i value = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(0x3c00));
        __mmask32 tiny = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
        value = _mm512_mask_permutexvar_epi16(value, tiny, size, table);
        return _mm512_or_si512(value, _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7f), words), 8));
    }
    __m256i half[2]; /* whole numbers up to 256 are exact in bf16 */
    for (int i = 0; i < 2; i++) {
        __m128i bytes = _mm_xor_si128(_mm_loadu_si128((const void *)(codes + 16 * i)), flip);
        __m512 values = _mm512_add_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), shift);
        half[i] = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(values), 16));
    }
    return _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
}

/* Products of `count` tokens with `rows` rows (outputs) from `row` on, which share what is read of the tokens. */
INLINE void rows_fast(type kind, const matrix *m, const part *p, const __m512i *table, int64_t row, int rows,
                      int count, const input *in, float *const *out) {
    const int unsigned_bytes = kind == codes8 && m->table[255] >= 0;
    const __m128i flip = _mm_set1_epi8(unsigned_bytes ? -128 : 0);
    const __m512 shift = _mm512_set1_ps(unsigned_bytes ? m->table[128] : 0);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i low = _mm512_set1_epi16(15);
    const int bits = m->across > 1 ? __builtin_ctzll(m->width) : 62;
    const int wide = bits >= 6 || kind < codes4, halves = kind < codes4 && bits == 5; /* a scale for half of a CHUNK */
    const __m512i groups = _mm512_srli_epi32(lanes, bits == 5 ? 3 : 2);
    const int64_t size = kind >= codes4 ? CHUNK / 2 : kind == bfloat16 ? 2 * CHUNK : CHUNK, length = m->across + 16;
    const int more = kind == codes5 ? 1 : 2; /* bits of codes above 4 */
    const uint8_t *codes = p->codes + row * m->row_bytes, *high = codes + m->columns / 2;
    float scales[rows][length], minimums[rows][length];
    __m512 sums[TOGETHER][PAIR];
    for (int r = 0; r < rows; r++) {
        groups_of(m, p, row + r, scales[r], minimums[r]);
        for (int t = 0; t < count; t++) sums[t][r] = _mm512_setzero_ps();
    }
    for (int64_t c = 0; c < m->columns; c += CHUNK, codes += size, high += CHUNK / 8 * more) {
        __m512i first[PAIR], second[PAIR];
        __m512 scale[PAIR], other_scale[PAIR];
        for (int r = 0; r < rows; r++) {
            const uint8_t *own = codes + r * m->row_bytes;
            _mm_prefetch((const void *)(own + AHEAD), _MM_HINT_T1);
            if (kind >= codes4) {
                first[r] = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)own));
                second[r] = _mm512_srli_epi16(first[r], 4);
            }
            if (kind == codes4) {
                first[r] = _mm512_permutexvar_epi16(first[r], table[0]);
                second[r] = _mm512_permutexvar_epi16(second[r], table[0]);
            } else if (kind > codes4) {
                _mm_prefetch((const void *)(high + r * m->row_bytes + AHEAD), _MM_HINT_T1);
                __m512i bits = high_bits(kind, high + r * m->row_bytes); /* 0xca: the second where the first is 1 */
                first[r] = _mm512_ternarylogic_epi32(low, first[r], bits, 0xca);
                second[r] = _mm512_ternarylogic_epi32(low, second[r], _mm512_srli_epi32(bits, more), 0xca);
                first[r] = _mm512_permutex2var_epi16(table[0], first[r], table[1]);
                second[r] = _mm512_permutex2var_epi16(table[0], second[r], table[1]);
            } else if (kind == bfloat16) {
                first[r] = _mm512_loadu_si512(own), second[r] = _mm512_loadu_si512(own + CHUNK);
            } else {
                first[r] = bytes_to_bf16(kind, own, table[0], flip, shift);
                second[r] = bytes_to_bf16(kind, own + CHUNK / 2, table[0], flip, shift);
            }
            const float *s = scales[r] + (c >> bits);
            scale[r] = wide ? _mm512_set1_ps(*s) : _mm512_permutexvar_ps(groups, _mm512_loadu_ps(s));
            other_scale[r] = _mm512_set1_ps(s[halves]);
        }
        for (int t = 0; t < count; t++) {
            const uint16_t *x = in[t].halves + c;
            const __m512i one = _mm512_loadu_si512(x), other = _mm512_loadu_si512(x + 32);
            for (int r = 0; r < rows; r++) {
                __m512 sum = dot(_mm512_setzero_ps(), first[r], one);
                if (halves) sums[t][r] = _mm512_fmadd_ps(sum, scale[r], sums[t][r]), sum = _mm512_setzero_ps();
                sum = dot(sum, second[r], other);
                sums[t][r] = _mm512_fmadd_ps(sum, halves ? other_scale[r] : scale[r], sums[t][r]);
            }
        }
    }
    for (int64_t c = 0; p->zeros && c < m->columns; c += 16 * LANE) {
        const __m512i places = _mm512_srl_epi32(_mm512_slli_epi32(lanes, 4), _mm_cvtsi32_si128(bits));
        const __mmask16 some = m->columns - c < 16 * LANE ? (1 << (m->columns - c) / LANE) - 1 : 0xffff;
        for (int r = 0; r < rows; r++) {
            __m512 minimum = _mm512_permutexvar_ps(places, _mm512_loadu_ps(minimums[r] + (c >> bits)));
            for (int t = 0; t < count; t++) {
                __m512 x = _mm512_maskz_loadu_ps(some, in[t].sums + c / LANE);
                sums[t][r] = _mm512_mask3_fnmadd_ps(minimum, x, sums[t][r], some);
            }
        }
    }
    for (int t = 0; t < count; t++)
        for (int r = 0; r < rows; r++) out[t][row + r] = _mm512_reduce_add_ps(sums[t][r]);
}

#define BY_COUNT(function, ...)                                                                                       \
    do {                                                                                                              \
        if (some == 1) function(__VA_ARGS__, 1, in + t, out + t);                                                     \
        else if (some == 2) function(__VA_ARGS__, 2, in + t, out + t);                                                \
        else if (some == 3) function(__VA_ARGS__, 3, in + t, out + t);                                                \
        else function(__VA_ARGS__, 4, in + t, out + t);                                                               \
    } while (0)

INLINE void rows_of(type kind, const matrix *m, const part *p, const __m512i *table, int64_t row, int64_t rows,
                    int64_t count, const input *in, float *const *out) {
    for (int64_t t = 0; t < count; t += TOGETHER) {
        int64_t some = count - t, r = row;
        for (; r + PAIR <= row + rows; r += PAIR) BY_COUNT(rows_fast, kind, m, p, table, r, PAIR);
        for (; r < row + rows; r++) BY_COUNT(rows_fast, kind, m, p, table, r, 1);
    }
}

static void multiply_fast(const matrix *m, const part *p, int64_t row, int64_t rows, int64_t count, const input *in,
                          float *const *out) {
    __m512i table[2];
    table_of(m, table);
    switch (m->kind) {
    case codes4: rows_of(codes4, m, p, table, row, rows, count, in, out); break;
    case codes5: rows_of(codes5, m, p, table, row, rows, count, in, out); break;
    case codes6: rows_of(codes6, m, p, table, row, rows, count, in, out); break;
    case codes8: rows_of(codes8, m, p, table, row, rows, count, in, out); break;
    case e4m3: rows_of(e4m3, m, p, table, row, rows, count, in, out); break;
    default: rows_of(bfloat16, m, p, table, row, rows, count, in, out);
    }
}

#endif

/* Multiplies `count` inputs with rows of a part. */
static void multiply(const matrix *m, const part *p, int64_t row, int64_t rows, int64_t count, const input *in,
                     float *const *out) {
#if FAST
    if (m->fast) {
        multiply_fast(m, p, row, rows, count, in, out);
        return;
    }
#endif
    float values[m->columns];
    for (int64_t r = row; r < row + rows; r++) {
        unpack(m, p, r, values);
        for (int64_t t = 0; t < count; t++) {
            const float *restrict x = in[t].values;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < m->columns; c++) sum += x[c] * values[c];
            out[t][r] = sum;
        }
    }
}

/* Pairs of a token and an expert, in the order of the experts that have some. `first` are their first places. */
typedef struct {
    int64_t count, experts, number[MAX_PAIRS], first[MAX_PAIRS + 1];
    int32_t order[MAX_PAIRS];
} pairs;

static void sort(const call *c, pairs *all) {
    all->count = all->experts = 0;
    for (int64_t e = 0; e < c->experts->experts; e++) {
        int64_t before = all->count;
        for (int64_t i = 0; i < c->tokens * c->each; i++)
            if (c->chosen[i] == e) all->order[all->count++] = i;
        if (all->count == before) continue;
        all->number[all->experts] = e;
        all->first[all->experts++] = before;
    }
    all->first[all->experts] = all->count;
}

INLINE int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }
INLINE int64_t larger(int64_t one, int64_t other) { return one > other ? one : other; }

/* Does item number `item` of an expert's product, of `items`. */
static void do_item(const matrix *m, const part *p, int64_t item, int64_t items, int64_t count, const input *in,
                    float *const *out) {
    int64_t first = m->rows * item / items, end = m->rows * (item + 1) / items;
    for (int64_t begin = 0; begin < end; begin += p->rows, p++) { /* outputs are counted in the part */
        int64_t row = larger(first, begin) - begin, rows = smaller(end, begin + p->rows) - begin - row;
        if (rows <= 0) continue;
        float *targets[count];
        for (int64_t t = 0; t < count; t++) targets[t] = out[t] + begin;
        multiply(m, p, row, rows, count, in, targets);
    }
}

/* Floats of prepared inputs, and where the parts of one are: each from a line of the cache on. */
INLINE int64_t input_floats(int64_t columns) {
    int64_t whole = (columns + CHUNK - 1) / CHUNK * CHUNK;
    return whole + whole / 2 + whole / 4;
}

INLINE input input_at(float *memory, int64_t columns) {
    int64_t whole = (columns + CHUNK - 1) / CHUNK * CHUNK;
    return (input){memory, memory + whole, (uint16_t *)(memory + whole + whole / 4)};
}

/* Returns the floats that `sums` of a call must have room for. */
int64_t experts_room(const layer *own, int64_t tokens, int64_t each) {
    return tokens * input_floats(own->up.columns) +
           tokens * each * (input_floats(own->down.columns) + own->up.rows + own->down.rows);
}

/* Waits until all threads of a team are here. OpenMP's threads sleep at barriers (`zinfer.worker.process`), and to
   wake 15 of them up takes 0.2 ms. These give their core to whoever needs it. If another program keeps it for long, the
   threads of the next calls sleep; and so they do while nothing is asked for. */
typedef struct { int64_t here, times, idle; } meeting; /* `idle` are nanoseconds to sleep at a time */
static int64_t sleepy; /* calls whose threads will sleep */

INLINE void rest(int64_t nanoseconds) {
    const struct timespec moment = {0, nanoseconds};
    nanosleep(&moment, NULL);
}

static void meet(meeting *all) {
    int64_t times = __atomic_load_n(&all->times, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&all->here, 1, __ATOMIC_ACQ_REL) == omp_get_num_threads()) {
        __atomic_store_n(&all->here, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&all->times, times + 1, __ATOMIC_RELEASE);
    }
    while (__atomic_load_n(&all->times, __ATOMIC_ACQUIRE) == times) {
        const int64_t idle = __atomic_load_n(&all->idle, __ATOMIC_RELAXED);
        if (idle || __atomic_load_n(&sleepy, __ATOMIC_RELAXED) > 0) {
            rest(idle ? idle : SLEEPY_NS);
            continue;
        }
        const double before = omp_get_wtime();
        sched_yield();
        if (omp_get_wtime() - before > AWAY_S) __atomic_store_n(&sleepy, SLEEPY, __ATOMIC_RELAXED);
    }
}

/* Does a product of all pairs; `by_token` if their inputs are those of tokens. `out` are the sums of each pair. All
   threads call it, and have met when it returns. */
static void product(const matrix *m, const pairs *all, int64_t each, int by_token, float *inputs, float *out,
                    meeting *met) {
    const int64_t size = input_floats(m->columns);
    const int64_t items = larger(1, smaller(m->rows, m->rows * m->row_bytes / ITEM));
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < all->experts * items; i++) {
        int64_t e = i / items, item = i % items, first = all->first[e], count = all->first[e + 1] - first;
        input in[count];
        float *targets[count];
        for (int64_t t = 0; t < count; t++) {
            int64_t pair = all->order[first + t];
            in[t] = input_at(inputs + (by_token ? pair / each : pair) * size, m->columns);
            targets[t] = out + (first + t) * m->rows;
        }
        do_item(m, m->parts + all->number[e] * m->count, item, items, count, in, targets);
    }
    meet(met);
}

/* Value number `i` of the product of the pair at `place`, with its bias, in the type of states. */
INLINE float value_at(const matrix *m, type kind, const float *sums, int64_t place, const void *bias, int64_t i) {
    const float sum = sums[place * m->rows + i];
    return rounded(kind, bias ? sum + load(kind, bias, i) : sum);
}

/* What the threads of a team share in a call. */
typedef struct {
    meeting met;
    pairs all;
    int64_t places[MAX_PAIRS], expert[MAX_PAIRS];
} team;

/* Prepares a call, before the team meets. */
static void begin(const call *c, team *own) {
    pairs *all = &own->all;
    sort(c, all);
    for (int64_t i = 0; i < c->tokens * c->each; i++) own->places[i] = -1;
    for (int64_t e = 0; e < all->experts; e++)
        for (int64_t place = all->first[e]; place < all->first[e + 1]; place++)
            own->places[all->order[place]] = place, own->expert[place] = all->number[e];
    if (sleepy > 0) __atomic_store_n(&sleepy, sleepy - 1, __ATOMIC_RELAXED);
}

/* Computes a call. All threads of a team call it, and have met when it returns. */
INLINE void compute(const call *c, type kind, team *own) {
    const layer *experts = c->experts;
    const matrix *up = &experts->up, *down = &experts->down;
    const pairs *all = &own->all;
    const int64_t hidden = up->columns, inner = down->columns, each = c->each;
    const int64_t pieces = (inner + PIECE - 1) / PIECE, parts = (hidden + PIECE - 1) / PIECE;
    float *states = c->sums, *between = states + c->tokens * input_floats(hidden);
    float *up_sums = between + c->tokens * each * input_floats(inner);
    float *down_sums = up_sums + all->count * up->rows;
#pragma omp for nowait
    for (int64_t i = 0; i < c->tokens * parts; i++) {
        int64_t t = i / parts, first = i % parts * PIECE, end = smaller(hidden, first + PIECE);
        input in = input_at(states + t * input_floats(hidden), hidden);
        for (int64_t n = first; n < end; n++) in.values[n] = load(kind, c->states, t * hidden + n);
        prepare(up, in, first, end);
    }
    meet(&own->met);
    product(up, all, each, 1, states, up_sums, &own->met);
#pragma omp for nowait
    for (int64_t i = 0; i < all->count * pieces; i++) {
        int64_t place = i / pieces, first = i % pieces * PIECE, end = smaller(inner, first + PIECE);
        input in = input_at(between + all->order[place] * input_floats(inner), inner);
        const void *bias = up->bias ? up->bias[own->expert[place]] : NULL;
        for (int64_t n = first; n < end; n++) {
            int64_t one = experts->interleaved ? 2 * n : n, other = experts->interleaved ? 2 * n + 1 : inner + n;
            float gate = value_at(up, kind, up_sums, place, bias, one);
            float value = value_at(up, kind, up_sums, place, bias, other);
            gate = gate > experts->limit ? experts->limit : gate;
            value = value > experts->limit ? experts->limit : value < -experts->limit ? -experts->limit : value;
            gate = rounded(kind, gate / (1 + exponential(-experts->alpha * gate)));
            in.values[n] = rounded(kind, gate * (value + experts->offset));
        }
        prepare(down, in, first, end);
    }
    meet(&own->met);
    product(down, all, each, 0, between, down_sums, &own->met);
#pragma omp for nowait
    for (int64_t i = 0; i < c->tokens * parts; i++) {
        int64_t t = i / parts, first = i % parts * PIECE, end = smaller(hidden, first + PIECE);
        for (int64_t n = first; n < end; n++) {
            float sum = 0;
            for (int64_t k = t * each; k < (t + 1) * each; k++) {
                if (own->places[k] < 0) continue;
                const void *bias = down->bias ? down->bias[own->expert[own->places[k]]] : NULL;
                float value = value_at(down, kind, down_sums, own->places[k], bias, n);
                sum += rounded(kind, value * c->weights[k]);
            }
            if (kind == float32) ((float *)c->out)[t * hidden + n] = sum;
            else ((uint16_t *)c->out)[t * hidden + n] = kind == bfloat16 ? to_bf16(sum) : to_half(sum);
        }
    }
    meet(&own->met);
}

static void compute_call(const call *c, team *own) {
    if (c->experts->states == bfloat16) compute(c, bfloat16, own);
    else if (c->experts->states == float16) compute(c, float16, own);
    else compute(c, float32, own);
}

/* Computes the experts of a call. */
void compute_experts(const call *c) {
    team own = {.met = {0, 0, 0}};
    begin(c, &own);
#pragma omp parallel num_threads(c->threads)
    compute_call(c, &own);
}

/* Requests of a device. It writes the number of one of `calls` to `mail[0]`, counted from 1; that is 0 again when the
   call was taken, and `mail[16]` is 1 when it is done. All are in memory that the device sees. `stop` ends it. */
typedef struct {
    int32_t *mail;
    const call *const *calls;
    int64_t threads;
    int32_t stop, unused;
} requests;

/* Waits for a request; returns its call, or NULL at the end. */
static const call *next(requests *all, team *own) {
    double since = omp_get_wtime();
    for (int64_t times = 0;; times++) {
        int32_t number = __atomic_load_n(all->mail, __ATOMIC_ACQUIRE);
        if (number) {
            __atomic_store_n(all->mail, 0, __ATOMIC_RELEASE);
            __atomic_store_n(&own->met.idle, 0, __ATOMIC_RELAXED);
            return all->calls[number - 1];
        }
        if (__atomic_load_n(&all->stop, __ATOMIC_ACQUIRE)) return NULL;
        if (own->met.idle) rest(own->met.idle);
        else sched_yield();
        if (times % 64 == 0 && omp_get_wtime() - since > IDLE_S) {
            int64_t idle = omp_get_wtime() - since > LONG_S ? LONG_NS : IDLE_NS;
            __atomic_store_n(&own->met.idle, idle, __ATOMIC_RELAXED);
        }
    }
}

/* Computes what a device asks for, until the end. */
void serve_experts(requests *all) {
    team own = {.met = {0, 0, 0}};
    const call *c = NULL;
#pragma omp parallel num_threads(all->threads)
    for (prctl(PR_SET_TIMERSLACK, 1L);;) { /* sleeps are 50 us longer otherwise */
#pragma omp master
        if ((c = next(all, &own))) begin(c, &own);
        meet(&own.met);
        if (!c) break;
        compute_call(c, &own);
#pragma omp master
        __atomic_store_n(all->mail + 16, 1, __ATOMIC_RELEASE);
    }
}

/* Tells whether this processor has fast products. */
int32_t experts_fast(void) { return FAST; }
