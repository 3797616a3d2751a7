/* Routed experts of a few tokens on the CPU, from their codes as host memory stores them.

   A token reads megabytes of each of its experts and computes two to four FLOPs a byte: so each byte is read once, in
   order, and unpacked in registers. With one to eight tokens 15 cores of an H200's host read 95 to 107 GB/s of MXFP4,
   of the 122 to 132 that they read without computing. All tokens that share an expert are multiplied with a row of
   codes while it is in a core's cache. Rows of a matrix are outputs.

   Codes of up to 8 bits are whole numbers, or halves of some. So inputs become whole numbers of 16 bits, too, with a
   factor for every few columns. Processors multiply bytes best: each code with the upper half of a number, and with the
   lower one. Sums of these are exact, and scales, zero points and minimums are applied to them. With AVX-512 the other
   types are multiplied in bf16 (best with AVX512-BF16). Elsewhere rows become float32 first. */

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
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__) && defined(__FMA__)
#define FAST 2 /* all products */
#define LANES 16
#define EACH(name, ...) _mm512_##name(__VA_ARGS__)
#define WHOLE(name, ...) _mm512_##name##_si512(__VA_ARGS__)
typedef __m512i bytes;
typedef __m512 floats;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FAST 1 /* those of codes of 4 to 6 bits */
#define LANES 8
#define EACH(name, ...) _mm256_##name(__VA_ARGS__)
#define WHOLE(name, ...) _mm256_##name##_si256(__VA_ARGS__)
typedef __m256i bytes;
typedef __m256 floats;
#else
#define FAST 0
#define LANES 8
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "cpu_experts.c needs a little-endian processor: it reads bf16 as the upper half of float32"
#endif

#define INLINE static inline __attribute__((always_inline))
#define CHUNK 64          /* columns of floating-point numbers that registers hold at a time */
#define LANE 16           /* columns whose inputs are summed */
#define ROOM 256          /* columns of which the memory of inputs is a multiple */
#define TOGETHER 4        /* tokens that share unpacked codes */
#define PAIR 2            /* rows of outputs at a time */
#define OWN 50            /* percent of a product's rows that threads have for certain */
#define ITEM (64 << 10)   /* bytes of codes that a thread takes of the others at a time */
#define AHEAD (8 << 10)   /* bytes by which rows are fetched ahead */
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

INLINE int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }
INLINE int64_t larger(int64_t one, int64_t other) { return one > other ? one : other; }

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
    return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 /* NaN */ : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
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

#if FAST > 1
INLINE bytes quarter(const void *from) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(from)); }
INLINE bytes signed_quarter(const void *from) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(from)); }
INLINE floats half_floats(const void *from) { return _mm512_cvtph_ps(_mm256_loadu_si256(from)); }
#elif FAST
INLINE bytes quarter(const void *from) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(from)); }
INLINE bytes signed_quarter(const void *from) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(from)); }
INLINE floats half_floats(const void *from) { return _mm256_cvtph_ps(_mm_loadu_si128(from)); }
#endif

#if FAST
/* A register of values from number `i` on, of types that compilers are slow with. */
INLINE floats load_lanes(type kind, const void *values, int64_t i) {
    const uint8_t *from = values;
    if (kind == float16) return half_floats(from + 2 * i);
    bytes numbers = kind == int8 ? signed_quarter(from + i) : quarter(from + i);
    if (kind != e8m0) return EACH(cvtepi32_ps, numbers);
    return (floats)EACH(max_epi32, EACH(slli_epi32, numbers, 23), EACH(set1_epi32, 1 << 22));
}
#endif

/* Values number `first` and on, `count` of them, times a factor. */
INLINE void load_all(type kind, const void *values, int64_t first, int64_t count, float factor, float *restrict out) {
    int64_t i = 0;
#if FAST
    const int known = kind == float16 || kind == e8m0 || kind == int8 || kind == uint8;
    for (; known && count >= LANES && i < count; i += LANES) {
        const int64_t at = smaller(i, count - LANES); /* the last ones overlap */
        EACH(storeu_ps, out + at, EACH(mul_ps, load_lanes(kind, values, first + at), EACH(set1_ps, factor)));
    }
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

/* Values of codes of 4 to 6 bits, without scales: `more` bits of each are behind the low 4 of all. */
static void look_up(const float *table, const uint8_t *codes, int more, int64_t columns, float *restrict out) {
    const uint8_t *high = codes + columns / 2;
    for (int64_t c = 0; c < columns; c++) {
        int code = codes[c / 2] >> c % 2 * 4 & 15;
        if (more) code |= (high[c * more / 8] >> c * more % 8 & ((1 << more) - 1)) << 4;
        out[c] = table[code];
    }
}

/* A stored row as float32. */
static void unpack(const matrix *m, const part *p, int64_t row, float *restrict out) {
    float scales[m->across], minimums[m->across];
    const uint8_t *restrict codes = p->codes + row * m->row_bytes;
    const float *restrict table = m->table;
    const int64_t columns = m->columns, groups = m->across, width = groups > 1 ? m->width : columns;
    groups_of(m, p, row, scales, minimums);
    if (!p->zeros) memset(minimums, 0, sizeof minimums);
    if (m->kind >= codes4) look_up(table, codes, m->kind - codes4, columns, out);
    else if (m->kind == codes8 || m->kind == e4m3)
        for (int64_t c = 0; c < columns; c++) out[c] = table[codes[c]];
    else values_of(m->kind, codes, 0, columns, 1, out);
    if (width == 1)
        for (int64_t c = 0; c < columns; c++) out[c] = out[c] * scales[c] - minimums[c];
    for (int64_t g = 0; width > 1 && g < groups; g++) {
        const float scale = scales[g], minimum = minimums[g];
        const int64_t end = (g + 1) * width < columns ? (g + 1) * width : columns;
        for (int64_t c = g * width; c < end; c++) out[c] = out[c] * scale - minimum;
    }
    for (int64_t c = 0; m->inner != float32 && c < columns; c++) out[c] = rounded(m->inner, out[c]);
}

/* Inputs of a product: float32; and for fast ones what they multiply. For codes these are whole numbers of 16 bits in
   halves of 8: of the columns in a register first the upper ones, those of even columns before those of odd ones if
   codes have fewer than 8 bits. Lanes of a register have a factor and a first sum; `LANE` columns have a sum. */
typedef struct {
    float *values, *factors, *sums;
    int32_t *starts;
    union { uint16_t *halves; int8_t *parts; };
} input;

INLINE int64_t padded(int64_t columns) { return (columns + ROOM - 1) / ROOM * ROOM; }

/* Floats of prepared inputs, and where the parts of one are: each from a line of the cache on. */
INLINE int64_t input_floats(int64_t columns) { return 9 * padded(columns) / 4; }

INLINE input input_at(float *memory, int64_t columns) {
    const int64_t room = padded(columns);
    float *parts = memory + room, *factors = parts + room / 2, *starts = factors + room / 4;
    return (input){memory, factors, starts + room / 4, (int32_t *)starts, {(uint16_t *)parts}};
}

INLINE int is_whole(const matrix *m) { return m->kind >= codes8; } /* tells whether codes are whole numbers */

/* What is added to a matrix's codes, so that they are bytes without a sign; and what one of these is worth. */
INLINE int offset_of(const matrix *m, float *unit) {
    int least = 0;
    *unit = m->kind == codes4 ? 0.5f : 1.0f;
    if (m->kind == codes8) return m->table[255] == 255 ? 0 : 128;
    if (m->kind != codes4) return (int)-m->table[0];
    for (int i = 0; i < 16; i++) least = 2 * m->table[i] < least ? (int)(2 * m->table[i]) : least;
    return -least;
}

/* Prepares `LANE` values of an input that codes multiply: as x = number * factor, of the `each` columns of a lane. A
   factor is a power of 2 that gives the largest number 15 bits: bf16 is exact where it is above 1/128 of that. */
INLINE void prepare_lanes(int each, input in, int64_t first, int offset, float unit) {
    const int64_t columns = each * LANES, at = first % columns;
    int8_t *upper = in.parts + 2 * (first - at) + (each == 8 ? at / 2 : at), *lower = upper + columns;
    float total = 0;
    for (int lane = 0; lane < LANE / each; lane++) {
        const float *x = in.values + first + lane * each;
        uint32_t largest = 0;
        int32_t number[8], sum = 0;
        for (int i = 0; i < each; i++) {
            const uint32_t size = to_bits(x[i]) & 0x7fffffff;
            largest = size > largest ? size : largest;
        }
        const int finite = largest < 0x7f800000, power = larger(largest >> 23, 15);
        const float by = finite ? from_bits((268 - power) << 23) : 0, factor = from_bits((power - 14) << 23);
        for (int i = 0; i < each; i++) number[i] = finite ? smaller(__builtin_rintf(x[i] * by), 32639) : 0;
        for (int i = 0; i < each; i++) {
            const int place = each == 8 ? 4 * lane + i / 2 + i % 2 * (int)(columns / 2) : 4 * lane + i;
            lower[place] = (int8_t)number[i];
            upper[place] = (int8_t)((number[i] - (int8_t)number[i]) >> 8);
            sum += number[i];
        }
        in.starts[first / each + lane] = -offset * sum;
        in.factors[first / each + lane] = finite ? factor * unit : from_bits(0x7fc00000);
        total += sum * factor;
    }
    in.sums[first / LANE] = total;
}

/* Prepares values `first` to `end` of an input of a fast product. */
static void prepare(const matrix *m, input in, int64_t first, int64_t end) {
    if (!m->fast) return;
    if (!is_whole(m)) {
        for (int64_t c = first; c < end; c++) in.halves[c] = to_bf16(in.values[c]);
        return;
    }
    float unit;
    const int offset = offset_of(m, &unit);
    if (end == m->columns)
        for (const int64_t all = padded(end); end < all; end++) in.values[end] = 0;
    for (int64_t c = first; c < end; c += LANE)
        if (m->kind == codes8) prepare_lanes(4, in, c, offset, unit);
        else prepare_lanes(8, in, c, offset, unit);
}

#if FAST

#if FAST > 1
INLINE bytes load_bytes(const void *from, int64_t left) { /* of at most `left` columns of 4 bits; others are 0 */
    return _mm512_maskz_loadu_epi32(left >= 8 * LANES ? 0xffff : 0xff, from);
}
INLINE floats spread(floats values, bytes places) { return _mm512_permutexvar_ps(places, values); }
INLINE bytes looked_up(const int8_t *table) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table)); }
INLINE bytes low_half(const uint8_t *from) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)from)); }
INLINE bytes dot_bytes(bytes sums, bytes codes, bytes numbers) { return _mm512_dpbusd_epi32(sums, codes, numbers); }
INLINE float sum_of(floats values) { return _mm512_reduce_add_ps(values); }
#else
INLINE bytes load_bytes(const void *from, int64_t left) { return _mm256_loadu_si256(from); }
INLINE floats spread(floats values, bytes places) { return _mm256_permutevar8x32_ps(values, places); }
INLINE bytes looked_up(const int8_t *table) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table));
}
INLINE bytes low_half(const uint8_t *from) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)from)); }
INLINE bytes dot_bytes(bytes sums, bytes codes, bytes numbers) { /* of pairs below 64 * 128 * 2 */
    bytes pairs = _mm256_maddubs_epi16(codes, numbers);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE float sum_of(floats values) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
#endif

/* Bits above the low 4 of codes of 5 or 6 bits: those of even columns, then of odd ones, each in its byte. */
INLINE void high_bits(type kind, const uint8_t *high, bytes out[2]) {
    bytes all = kind == codes6 ? low_half(high) : quarter(high);
    for (int odd = 0; odd < 2; odd++) {
        if (kind == codes6) {
            out[odd] = WHOLE(or, EACH(slli_epi16, all, 4), EACH(slli_epi16, all, 8));
            out[odd] = WHOLE(and, out[odd], EACH(set1_epi16, 0x3030));
            all = EACH(srli_epi16, all, 2);
        } else { /* a bit in two of each byte goes to bit 4 of a byte; carries to bit 3 of others */
            out[odd] = WHOLE(and, all, EACH(set1_epi32, 0x55));
            out[odd] = EACH(mullo_epi32, out[odd], EACH(set1_epi32, 1 << 4 | 1 << 10 | 1 << 16 | 1 << 22));
            out[odd] = WHOLE(and, out[odd], EACH(set1_epi32, 0x10101010));
            all = EACH(srli_epi32, all, 1);
        }
    }
}

/* What products of a matrix have in registers: values of codes of 4 bits, or the subnormal ones of e4m3; what is added
   to codes of 8 bits; and of each lane the group of columns whose scale, and whose minimum, it takes. */
typedef struct { bytes values, flip, scales, minimums; } constants;

INLINE int columns_of(type kind) { return kind == codes8 ? 4 : 8; } /* of a lane */
INLINE int bits_of(const matrix *m) { return m->across > 1 ? __builtin_ctzll(m->width) : 62; } /* of a group's width */

static constants constants_of(const matrix *m) {
    int32_t scales[LANES], minimums[LANES];
    int8_t table[16];
    float unit;
    const int offset = offset_of(m, &unit), bits = bits_of(m);
    for (int i = 0; i < 16; i++) table[i] = m->kind == codes4 ? (int8_t)(2 * m->table[i] + offset) : 0;
    for (int64_t i = 0; i < LANES; i++) scales[i] = i * columns_of(m->kind) >> bits, minimums[i] = i * LANE >> bits;
    bytes values = looked_up(table), flip = EACH(set1_epi8, m->kind == codes8 && m->table[255] < 0 ? -128 : 0);
#if FAST > 1
    uint16_t tiny[32] = {0};
    for (int i = 0; i < 8; i++) tiny[i] = to_bf16(i * 0x1p-9f);
    if (m->kind == e4m3) values = _mm512_loadu_si512(tiny);
#endif
    return (constants){values, flip, WHOLE(loadu, (const void *)scales), WHOLE(loadu, (const void *)minimums)};
}

/* Products of `count` tokens with `rows` rows (outputs) of codes from `row` on, which share what is read of the tokens.
   They are sums of whole numbers, exact, times the factors of groups of columns. */
INLINE void rows_of_codes(type kind, const matrix *m, const constants *all, const part *p, int64_t row, int rows,
                          int count, const input *in, float *const *out) {
    const int each = columns_of(kind), halves = each / 4, more = kind == codes5 ? 1 : 2; /* bits above 4 */
    const int bits = bits_of(m);
    const int64_t length = m->across + LANES;
    const uint8_t *codes = p->codes + row * m->row_bytes, *high = codes + m->columns / 2;
    const bytes low = EACH(set1_epi8, 15);
    float scales[rows][length], minimums[rows][length];
    floats sums[TOGETHER][PAIR];
    for (int r = 0; r < rows; r++) {
        EACH(storeu_ps, scales[r] + m->across, EACH(setzero_ps)); /* what is behind them is multiplied by 0 */
        if (p->zeros) EACH(storeu_ps, minimums[r] + m->across, EACH(setzero_ps));
        groups_of(m, p, row + r, scales[r], minimums[r]);
        for (int t = 0; t < count; t++) sums[t][r] = EACH(setzero_ps);
    }
    for (int64_t c = 0; c < m->columns; c += each * LANES, codes += 4 * LANES, high += LANES * more) {
        bytes own[PAIR][2], above[2];
        floats scale[PAIR];
        for (int r = 0; r < rows; r++) {
            const uint8_t *from = codes + r * m->row_bytes;
            _mm_prefetch((const void *)(from + AHEAD), _MM_HINT_T1);
            const bytes read = kind == codes8 ? WHOLE(loadu, (const void *)from) : load_bytes(from, m->columns - c);
            own[r][0] = kind == codes8 ? WHOLE(xor, read, all->flip) : WHOLE(and, read, low);
            own[r][1] = WHOLE(and, EACH(srli_epi16, read, 4), low);
            if (kind == codes4)
                for (int i = 0; i < 2; i++) own[r][i] = EACH(shuffle_epi8, all->values, own[r][i]);
            else if (kind != codes8) {
                _mm_prefetch((const void *)(high + r * m->row_bytes + AHEAD), _MM_HINT_T1);
                high_bits(kind, high + r * m->row_bytes, above);
                for (int i = 0; i < 2; i++) own[r][i] = WHOLE(or, own[r][i], above[i]);
            }
            scale[r] = spread(EACH(loadu_ps, scales[r] + (c >> bits)), all->scales);
        }
        for (int t = 0; t < count; t++) {
            const int8_t *x = in[t].parts + 2 * c;
            const floats factor = EACH(loadu_ps, in[t].factors + c / each);
            bytes upper[2], lower[2];
            for (int i = 0; i < halves; i++) {
                upper[i] = WHOLE(loadu, (const void *)(x + 4 * LANES * i));
                lower[i] = WHOLE(loadu, (const void *)(x + 4 * LANES * (halves + i)));
            }
            for (int r = 0; r < rows; r++) {
                bytes sum = WHOLE(setzero), rest = WHOLE(loadu, (const void *)(in[t].starts + c / each));
                for (int i = 0; i < halves; i++) {
                    sum = dot_bytes(sum, own[r][i], upper[i]);
                    rest = dot_bytes(rest, own[r][i], lower[i]);
                }
                sum = EACH(add_epi32, EACH(slli_epi32, sum, 8), rest);
                sums[t][r] = EACH(fmadd_ps, EACH(cvtepi32_ps, sum), EACH(mul_ps, scale[r], factor), sums[t][r]);
            }
        }
    }
    for (int64_t c = 0; p->zeros && c < m->columns; c += LANES * LANE)
        for (int r = 0; r < rows; r++) {
            floats minimum = spread(EACH(loadu_ps, minimums[r] + (c >> bits)), all->minimums);
            for (int t = 0; t < count; t++)
                sums[t][r] = EACH(fnmadd_ps, minimum, EACH(loadu_ps, in[t].sums + c / LANE), sums[t][r]);
        }
    for (int t = 0; t < count; t++)
        for (int r = 0; r < rows; r++) out[t][row + r] = sum_of(sums[t][r]);
}

#if FAST > 1
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

/* 32 values of type e4m3 as bf16. `table` has the subnormal ones. */
INLINE __m512i bytes_to_bf16(const uint8_t *codes, __m512i table) {
    __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)codes));
    __m512i size = _mm512_and_si512(words, _mm512_set1_epi16(0x7f));
    __m512i value = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(0x3c00));
    __mmask32 tiny = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
    value = _mm512_mask_permutexvar_epi16(value, tiny, size, table);
    return _mm512_or_si512(value, _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7f), words), 8));
}

/* As `rows_of_codes`, of floating-point numbers: bf16, which e4m3 become in registers. */
INLINE void rows_of_floats(type kind, const matrix *m, const constants *all, const part *p, int64_t row, int rows,
                           int count, const input *in, float *const *out) {
    const int bits = bits_of(m), halves = bits == 5; /* a scale for half of a CHUNK */
    const int64_t size = kind == bfloat16 ? 2 * CHUNK : CHUNK;
    const uint8_t *codes = p->codes + row * m->row_bytes;
    float scales[rows][m->across + 1];
    __m512 sums[TOGETHER][PAIR];
    for (int r = 0; r < rows; r++) {
        groups_of(m, p, row + r, scales[r], NULL);
        for (int t = 0; t < count; t++) sums[t][r] = _mm512_setzero_ps();
    }
    for (int64_t c = 0; c < m->columns; c += CHUNK, codes += size) {
        __m512i first[PAIR], second[PAIR];
        __m512 scale[PAIR], other_scale[PAIR];
        for (int r = 0; r < rows; r++) {
            const uint8_t *own = codes + r * m->row_bytes;
            const float *s = scales[r] + (c >> bits);
            _mm_prefetch((const void *)(own + AHEAD), _MM_HINT_T1);
            if (kind == bfloat16) first[r] = _mm512_loadu_si512(own), second[r] = _mm512_loadu_si512(own + CHUNK);
            else first[r] = bytes_to_bf16(own, all->values), second[r] = bytes_to_bf16(own + CHUNK / 2, all->values);
            scale[r] = _mm512_set1_ps(*s), other_scale[r] = _mm512_set1_ps(s[halves]);
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
    for (int t = 0; t < count; t++)
        for (int r = 0; r < rows; r++) out[t][row + r] = _mm512_reduce_add_ps(sums[t][r]);
}
#endif

#define BY_COUNT(function, ...)                                                                                       \
    do {                                                                                                              \
        if (some == 1) function(__VA_ARGS__, 1, in + t, out + t);                                                     \
        else if (some == 2) function(__VA_ARGS__, 2, in + t, out + t);                                                \
        else if (some == 3) function(__VA_ARGS__, 3, in + t, out + t);                                                \
        else function(__VA_ARGS__, 4, in + t, out + t);                                                               \
    } while (0)
#define ROWS(function, kind)                                                                                          \
    for (int64_t t = 0; t < count; t += TOGETHER) {                                                                   \
        int64_t some = count - t, r = row;                                                                            \
        for (; r + PAIR <= row + rows; r += PAIR) BY_COUNT(function, kind, m, &all, p, r, PAIR);                      \
        for (; r < row + rows; r++) BY_COUNT(function, kind, m, &all, p, r, 1);                                       \
    }                                                                                                                 \
    break

static void multiply_fast(const matrix *m, const part *p, int64_t row, int64_t rows, int64_t count, const input *in,
                          float *const *out) {
    const constants all = constants_of(m);
    switch (m->kind) {
    case codes4: ROWS(rows_of_codes, codes4);
    case codes5: ROWS(rows_of_codes, codes5);
    case codes6: ROWS(rows_of_codes, codes6);
#if FAST > 1
    case codes8: ROWS(rows_of_codes, codes8);
    case e4m3: ROWS(rows_of_floats, e4m3);
    default: ROWS(rows_of_floats, bfloat16);
#endif
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

/* Does rows `first` to `end` of an expert's product. Outputs are counted in the expert. */
static void do_expert(const matrix *m, const part *p, int64_t first, int64_t end, int64_t count, const input *in,
                      float *const *out) {
    for (int64_t begin = 0; begin < end; begin += p->rows, p++) { /* outputs are counted in the part */
        int64_t row = larger(first, begin) - begin, rows = smaller(end, begin + p->rows) - begin - row;
        if (rows <= 0) continue;
        float *targets[count];
        for (int64_t t = 0; t < count; t++) targets[t] = out[t] + begin;
        multiply(m, p, row, rows, count, in, targets);
    }
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

/* Does rows `first` to `end` of a product of all pairs, counted over all experts. */
static void do_rows(const matrix *m, const pairs *all, int64_t each, int by_token, float *inputs, float *out,
                    int64_t first, int64_t end) {
    const int64_t size = input_floats(m->columns);
    while (first < end) {
        int64_t e = first / m->rows, start = e * m->rows, last = smaller(end, start + m->rows);
        int64_t place = all->first[e], count = all->first[e + 1] - place;
        input in[count];
        float *targets[count];
        for (int64_t t = 0; t < count; t++) {
            int64_t pair = all->order[place + t];
            in[t] = input_at(inputs + (by_token ? pair / each : pair) * size, m->columns);
            targets[t] = out + (place + t) * m->rows;
        }
        do_expert(m, m->parts + all->number[e] * m->count, first - start, last - start, count, in, targets);
        first = last;
    }
}

/* Does a product of all pairs; `by_token` if their inputs are those of tokens. `out` are the sums of each pair. All
   threads call it, and have met when it returns. Each has rows of its own, which it reads in order; who is done with
   them takes some of the others. */
static void product(const matrix *m, const pairs *all, int64_t each, int by_token, float *inputs, float *out,
                    meeting *met) {
    const int64_t total = all->experts * m->rows, threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t own = total * OWN / 100 / threads / PAIR * PAIR;
    const int64_t step = larger(PAIR, ITEM / m->row_bytes / PAIR * PAIR);
    do_rows(m, all, each, by_token, inputs, out, own * thread, own * (thread + 1));
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t first = own * threads; first < total; first += step)
        do_rows(m, all, each, by_token, inputs, out, first, smaller(total, first + step));
    meet(met);
}

/* Values of the product of the pair at `place`, with its bias, in the type of states: `count` from number `first` on,
   `step` from each other. */
INLINE void values_at(const matrix *m, type kind, const float *sums, int64_t place, const void *bias, int64_t first,
                      int64_t step, int64_t count, float *restrict out) {
    const float *restrict own = sums + place * m->rows + first;
    for (int64_t i = 0; i < count; i++) out[i] = own[i * step];
    for (int64_t i = 0; bias && i < count; i++) out[i] += load(kind, bias, first + i * step);
#pragma omp simd
    for (int64_t i = 0; i < count; i++) out[i] = rounded(kind, out[i]);
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
        float gates[PIECE], values[PIECE];
        const int64_t step = experts->interleaved ? 2 : 1, other = experts->interleaved ? 1 : inner;
        const int64_t count = end - first;
        values_at(up, kind, up_sums, place, bias, first * step, step, count, gates);
        values_at(up, kind, up_sums, place, bias, first * step + other, step, count, values);
#pragma omp simd
        for (int64_t n = 0; n < count; n++) {
            float gate = gates[n] > experts->limit ? experts->limit : gates[n];
            float value = values[n] > experts->limit ? experts->limit : values[n];
            value = value < -experts->limit ? -experts->limit : value;
            gate = rounded(kind, gate / (1 + exponential(-experts->alpha * gate)));
            in.values[first + n] = rounded(kind, gate * (value + experts->offset));
        }
        prepare(down, in, first, end);
    }
    meet(&own->met);
    product(down, all, each, 0, between, down_sums, &own->met);
#pragma omp for nowait
    for (int64_t i = 0; i < c->tokens * parts; i++) {
        int64_t t = i / parts, first = i % parts * PIECE, end = smaller(hidden, first + PIECE);
        float sums[PIECE] = {0}, values[PIECE];
        for (int64_t k = t * each; k < (t + 1) * each; k++) {
            const int64_t place = own->places[k];
            if (place < 0) continue;
            const void *bias = down->bias ? down->bias[own->expert[place]] : NULL;
            values_at(down, kind, down_sums, place, bias, first, 1, end - first, values);
#pragma omp simd
            for (int64_t n = 0; n < end - first; n++) sums[n] += rounded(kind, values[n] * c->weights[k]);
        }
        for (int64_t n = first; n < end; n++) {
            const float sum = sums[n - first];
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
