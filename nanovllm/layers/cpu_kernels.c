/* What a decoder-only model does on a CPU: a whole decode step in one call, and the small operators of other steps.
 *
 * Why: between two products, each of which streams some MB of weights through the cache, a layer runs dozens of small
 * operators. Called one by one from Python each finds its code evicted, and a norm that takes 6 us by itself takes 80.
 * In a decode step all layers are one call: keys and values are read where they lie in their blocks, nothing is gathered
 * or allocated, and what is left is the time to read the weights. In a step with prompts products and attention stay
 * PyTorch's, and what lies between them is one pass over memory instead of a dozen.
 *
 * The plain twins are models/decoder.py with attention/torch_backend.py; the tests compare the two. layers/compiled.py
 * builds this file, with -DBFLOAT16=1 (weights and cache in bfloat16) or 0 (float32) and with -DINT8=1 for int8 weights
 * with a scale per output. Sums are float32, or, where both factors are int8, int32, which is exact.
 *
 * Letters: T rows (one token each), N heads, K kv heads, H head dim, D model dim, F mlp dim, V vocabulary. H is a
 * multiple of 32; D, F and N * H are multiples of 64. Weights are [out, in], as PyTorch keeps them.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
static int omp_get_max_threads(void) { return 1; }
#endif

/* AMX: tiles of 16 x 64 bytes, multiplied with each other by one instruction. */
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if BFLOAT16 && defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1
#else
#define TILES 0
#endif

#define MAX_ROWS 64 /* in a step: AMX has eight tiles, of which four hold the sums of 16 rows each */
#define AT_ONCE 4   /* outputs, rows or heads whose sums are kept in registers */

/* How far ahead of its use memory is fetched. A core alone asks only for the next lines of what it reads; to use the
 * memory's bandwidth it must be told of more. PERF: all products of a row in 6.8 ms instead of 9.4. */
#define AHEAD_BYTES (8 << 10) /* of a weight */
#define AHEAD_KEYS 12         /* of a row's context */

#define inline static inline __attribute__((always_inline))

/* ---- sixteen numbers at a time; the compiler maps them to what the CPU has ----
 * The digits count numbers, not bits: v16 is 16 floats, i16 and u16 are 16 integers of 32 bits, h16 of 16 bits. */

typedef float v16 __attribute__((vector_size(64)));
typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));

inline v16 splat(float x) { return (v16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline v16 load(const float *p) {
    v16 x;
    memcpy(&x, p, sizeof x);
    return x;
}
inline void store(float *p, v16 x) { memcpy(p, &x, sizeof x); }
inline float sum(v16 x) {
    union { v16 whole; v8 half[2]; } a = {x};
    union { v8 whole; v4 half[2]; } b = {a.half[0] + a.half[1]};
    v4 c = b.half[0] + b.half[1];
    return (c[0] + c[2]) + (c[1] + c[3]);
}
inline v16 larger(v16 a, v16 b) {
    i16 first = a > b;
    return (v16)(((i16)a & first) | ((i16)b & ~first));
}
inline v16 exponential(v16 x) { /* e^x = 2^n e^r with |r| <= ln 2 / 2, to 2e-7; below -87 it is as good as 0 */
    x = larger(x, splat(-87.0f));
    v16 t = x * 1.44269504f;
    v16 half = (v16)((i16)splat(0.5f) | ((i16)t & (i16)splat(-0.0f))); /* has the sign of t; n is t rounded */
    i16 n = __builtin_convertvector(t + half, i16);
    v16 whole = __builtin_convertvector(n, v16);
    v16 r = x - whole * 0.693359375f + whole * 2.12194440e-4f, p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * (v16)((n + 127) << 23);
}

/* Elements of the cache and of plain weights, read GROUP at a time into vectors. A bfloat16 is the upper half of a
 * float, so of a 32-bit word with two of them the odd one is the word itself with its lower half cleared, and the even
 * one the word shifted left: two vectors of 16 in *dealt* order, the even elements and then the odd ones. A sum of
 * products does not mind the order, as long as its other factor is dealt the same way. */
#if BFLOAT16
typedef uint16_t element;
inline void split(const element *p, v16 *x) {
    u16 words;
    memcpy(&words, p, sizeof words);
    x[0] = (v16)(words << 16);
    x[1] = (v16)(words & 0xffff0000u);
}
inline void put16(element *p, v16 x) { /* to the nearest, ties to even */
#ifdef __AVX512BF16__
    __m256bh upper = _mm512_cvtneps_pbh((__m512)x);
#else
    u16 bits = (u16)x;
    h16 upper = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, h16);
#endif
    memcpy(p, &upper, sizeof upper);
}
inline v16 get16(const element *p) {
    h16 upper;
    memcpy(&upper, p, sizeof upper);
    return (v16)(__builtin_convertvector(upper, u16) << 16);
}
#define DEALT 2 /* ways in which 32 elements are dealt */
#else
typedef float element;
inline void split(const element *p, v16 *x) {
    x[0] = load(p);
    x[1] = load(p + 16);
}
inline void put16(element *p, v16 x) { store(p, x); }
inline v16 get16(const element *p) { return load(p); }
#define DEALT 1
#endif

inline void put(element *p, float x) {
    element copies[16];
    put16(copies, splat(x));
    *p = copies[0];
}
/* 16 numbers of an array of elements (`rounded`, a constant) or of floats. */
inline v16 numbers(const void *x, int64_t i, int rounded) {
    return rounded ? get16((const element *)x + i) : load((const float *)x + i);
}

/* Weights, WEIGHTS at a time. Four int8 lie in a 32-bit word and are dealt in four ways. */
#if INT8
typedef int8_t weight;
#define WEIGHTS 64
#define WEIGHTS_DEALT 4
inline void split_weights(const weight *p, v16 *x) {
    i16 words;
    memcpy(&words, p, sizeof words);
    for (int i = 0; i < 4; i++) x[i] = __builtin_convertvector(words << (24 - 8 * i) >> 24, v16);
}
#else
typedef element weight;
#define WEIGHTS 32
#define WEIGHTS_DEALT DEALT
inline void split_weights(const weight *p, v16 *x) { split(p, x); }
#endif

/* Deal `size` numbers (a multiple of 16 * ways) in groups of 16 * ways: with 2 ways, 0 2 4 ... 30 and then 1 3 ... 31. */
inline void deal(const float *from, float *to, int64_t size, int ways) {
    for (int64_t group = 0; group < size; group += 16 * ways)
        for (int way = 0; way < ways; way++)
            for (int i = 0; i < 16; i++) to[group + way * 16 + i] = from[group + i * ways + way];
}
inline void undeal(const float *from, float *to, int64_t size, int ways) {
    for (int64_t group = 0; group < size; group += 16 * ways)
        for (int way = 0; way < ways; way++)
            for (int i = 0; i < 16; i++) to[group + i * ways + way] = from[group + way * 16 + i];
}

/* ---- what Python fills in ---- */

typedef struct {
    const weight *w;
    const float *scale, *bias; /* [out]; scale only with INT8; bias or NULL */
    int64_t in, out;
} Linear;

typedef struct {
    Linear qkv, o, gate_up, down;
    const float *input_norm, *post_norm, *q_norm, *k_norm; /* the last two or NULL */
} Layer;

typedef struct {
    const element *embedding;               /* [V, D] */
    const float *final_norm, *cos_sin;      /* [D]; [positions, H]: H / 2 cosines, then H / 2 sines */
    const Layer *layers;
    int64_t num_layers, D, F, N, K, H, block_size;
    float eps, scale;
} Model;

typedef struct { /* places in the caller's memory, see `lay_out` */
    float *x, *h, *qkv, *gate_up, *scores, *packed;
    int64_t scores_size, bytes;
} Work;

/* ---- products: y [T, out] = x [T, in] w' + bias, by all threads of the region together ---- */

enum Goes { SET, ADD, ROUND }; /* to y: floats that are set, floats that are added to, or elements */

inline void finish(const Linear *l, void *y, int goes, int64_t t, int64_t o, float value) {
    float *to = (float *)y + t * l->out + o;
#if INT8
    value *= l->scale[o];
#endif
    if (l->bias) value += l->bias[o];
    if (goes == ROUND) put((element *)y + t * l->out + o, value);
    else *to = goes == ADD ? *to + value : value;
}

/* `outs` outputs from `o` on for `rows` rows from `t` on; both are constants where this is called. */
inline void dots(const Linear *l, const float *dealt, void *y, int goes, int64_t o, int64_t t, int outs, int rows) {
    v16 acc[AT_ONCE][AT_ONCE] = {0};
    for (int64_t k = 0; k < l->in; k += WEIGHTS)
        for (int i = 0; i < outs; i++) {
            v16 w[WEIGHTS / 16];
            const weight *at = l->w + (o + i) * l->in + k;
            split_weights(at, w);
            if (t == 0) __builtin_prefetch((const char *)at + AHEAD_BYTES);
            for (int j = 0; j < rows; j++)
                for (int part = 0; part < WEIGHTS / 16; part++)
                    acc[i][j] += w[part] * load(dealt + (t + j) * l->in + k + 16 * part);
        }
    for (int i = 0; i < outs; i++)
        for (int j = 0; j < rows; j++) finish(l, y, goes, t + j, o + i, sum(acc[i][j]));
}

static void dot_products(const Linear *l, const float *dealt, void *y, int goes, int T) {
#pragma omp for schedule(static)
    for (int64_t o = 0; o < l->out; o += AT_ONCE)
        for (int t = 0; t < T; t += AT_ONCE) {
            if (l->out - o < AT_ONCE) {
                for (int64_t i = o; i < l->out; i++)
                    for (int j = t; j < T && j < t + AT_ONCE; j++) dots(l, dealt, y, goes, i, j, 1, 1);
            } else if (T - t == 1) dots(l, dealt, y, goes, o, t, AT_ONCE, 1);
            else if (T - t == 2) dots(l, dealt, y, goes, o, t, AT_ONCE, 2);
            else if (T - t == 3) dots(l, dealt, y, goes, o, t, AT_ONCE, 3);
            else dots(l, dealt, y, goes, o, t, AT_ONCE, AT_ONCE);
        }
}

#if TILES
static void tiles_on(void) {
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
}

/* A product by tiles: sums [16 outputs, 16 rows] += tile of weights * tile of x. The first lies in memory as it is, 16
 * outputs of 64 bytes, that is of TILE_INPUTS inputs. The second is packed: 16 words of inputs x 16 rows, where a word of
 * 32 bits has two bfloat16 or four int8.
 *
 * Rows for int8 weights become int8 as well, in two parts: a number is scale * q, q an integer of 16 bits, and q is
 * 256 * part 0 + part 1, where part 0 has the sign. -3 is 256 * -1 + 253. That is as exact as bfloat16 for numbers down
 * to 1/128 of the row's largest. */
#if INT8
#define TILE_INPUTS 64
#define PARTS 2
#else
#define TILE_INPUTS 32
#define PARTS 1
#endif

/* rows[i][j] becomes rows[j][i]: in turn blocks of 1, 2, 4 and 8 change places across the diagonal. Unrolled, so that all
 * rows are in registers; as a loop over memory it took longer than the product. */
inline void transpose(v16 *rows) {
    const i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    v16 r[16];
    memcpy(r, rows, sizeof r);
#pragma GCC unroll 4
    for (int size = 1; size < 16; size *= 2) {
        i16 second = (lane & size) != 0; /* -1 in lanes of a block's second half */
        __m512i upper = (__m512i)((~second & lane) | (second & (lane - size + 16)));
        __m512i lower = (__m512i)((~second & (lane + size)) | (second & (lane + 16)));
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            if (!(i & size)) {
                __m512 a = (__m512)r[i], b = (__m512)r[i + size];
                r[i] = (v16)_mm512_permutex2var_ps(a, upper, b);
                r[i + size] = (v16)_mm512_permutex2var_ps(a, lower, b);
            }
    }
    memcpy(rows, r, sizeof r);
}

/* The factor between a row's numbers and its 16-bit integers, at most 127 * 256, so that part 0 does not overflow. */
static void row_scales(const void *x, int rounded, float *scales, int T, int64_t in) {
#pragma omp for schedule(static)
    for (int t = 0; t < T; t++) {
        v16 most = splat(0.0f);
        for (int64_t i = 0; i < in; i += 16) {
            v16 value = numbers(x, t * in + i, rounded);
            most = larger(most, larger(value, -value));
        }
        float top = most[0];
        for (int i = 1; i < 16; i++) top = most[i] > top ? most[i] : top;
        scales[t] = top / (127 * 256);
    }
}

/* 16 outputs of row t, from `o` on. sums: of part 0, and 16 vectors further on of part 1. */
inline void finish_row(const Linear *l, const v16 *sums, float scale, void *y, int goes, int64_t t, int64_t o) {
#if INT8
    v16 value = __builtin_convertvector((i16)sums[0], v16) * 256.0f + __builtin_convertvector((i16)sums[16], v16);
    value *= load(l->scale + o) * scale;
#else
    v16 value = sums[0];
#endif
    if (l->bias) value += load(l->bias + o);
    int64_t at = t * l->out + o;
    if (goes == ROUND) put16((element *)y + at, value);
    else store((float *)y + at, goes == ADD ? load((float *)y + at) + value : value);
}

/* x packed: [inputs / TILE_INPUTS][16 rows each][PARTS][16 words][16 rows]. */
inline void pack_rows(const void *x, int rounded, const float *scales, char *packed, int T, int64_t in) {
    int64_t groups = (T + 15) / 16;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < in / TILE_INPUTS * groups; i++) {
        v16 words[PARTS][16] = {0}; /* 64 bytes of each row */
        for (int64_t t = i % groups * 16, j = 0; j < 16 && t + j < T; j++)
            for (int64_t k = 0; k < TILE_INPUTS; k += 16) {
                v16 value = numbers(x, (t + j) * in + i / groups * TILE_INPUTS + k, rounded);
#if INT8
                float factor = scales[t + j] > 0.0f ? 1.0f / scales[t + j] : 0.0f;
                i16 q = (i16)_mm512_cvtps_epi32((__m512)(value * factor));
                _mm_storeu_si128((__m128i *)&words[0][j] + k / 16, _mm512_cvtepi32_epi8((__m512i)(q >> 8)));
                _mm_storeu_si128((__m128i *)&words[1][j] + k / 16, _mm512_cvtepi32_epi8((__m512i)q));
#else
                put16((element *)&words[0][j] + k, value);
#endif
            }
        for (int part = 0; part < PARTS; part++) transpose(words[part]);
        memcpy(packed + i * sizeof words, words, sizeof words);
    }
}

/* sums: a tile of weights times `now` tiles of x, from tile `first` of each step of `packed` on. */
inline void tile_sums(const Linear *l, const weight *w, const char *packed, int64_t tiles, int64_t first, int64_t now,
                      v16 *sums) {
    int64_t stride = l->in * (int64_t)sizeof(weight);
    const char *next = (const char *)w + AHEAD_BYTES;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < l->in / TILE_INPUTS; k++, w += TILE_INPUTS, next += 1024) {
        const char *inputs = packed + (k * tiles + first) * 1024;
        if (first == 0)
            for (int i = 0; i < 1024; i += 64) __builtin_prefetch(next + i);
        _tile_loadd(4, w, stride);
#if INT8 /* part 0 is signed, part 1 is not; tiles of the two take turns */
        _tile_loadd(5, inputs, 64);
        _tile_dpbssd(0, 4, 5);
        _tile_loadd(6, inputs + 1024, 64);
        _tile_dpbsud(1, 4, 6);
        if (now > 2) {
            _tile_loadd(5, inputs + 2048, 64);
            _tile_dpbssd(2, 4, 5);
            _tile_loadd(6, inputs + 3072, 64);
            _tile_dpbsud(3, 4, 6);
        }
#else
        _tile_loadd(5, inputs, 64);
        _tile_dpbf16ps(0, 4, 5);
        if (now > 1) { _tile_loadd(5, inputs + 1024, 64); _tile_dpbf16ps(1, 4, 5); }
        if (now > 2) { _tile_loadd(5, inputs + 2048, 64); _tile_dpbf16ps(2, 4, 5); }
        if (now > 3) { _tile_loadd(5, inputs + 3072, 64); _tile_dpbf16ps(3, 4, 5); }
#endif
    }
    _tile_stored(0, sums, 64);
    if (now > 1) _tile_stored(1, sums + 16, 64);
    if (now > 2) _tile_stored(2, sums + 32, 64);
    if (now > 3) _tile_stored(3, sums + 48, 64);
}

/* Each tile of weights times four tiles of x at once: that is 64 rows, or 32 rows in two parts. What comes of one is
 * finished after the next has been started, since it takes a while until a tile can be read. */
static void tile_products(const Linear *l, const char *packed, const float *scales, void *y, int goes, int T) {
    int64_t tiles = (T + 15) / 16 * PARTS, passes = (tiles + 3) / 4, weight_tiles = l->out / 16;
    int64_t me = omp_get_thread_num(), threads = omp_get_num_threads();
    int64_t begin = weight_tiles * me / threads * passes, end = weight_tiles * (me + 1) / threads * passes;
    v16 sums[2][64]; /* [tile of x][output], each of 16 rows; and then [tile of x][row], each of 16 outputs */
    for (int64_t i = begin; i < end + 1; i++) {
        int64_t first = i % passes * 4, now = tiles - first < 4 ? tiles - first : 4;
        if (i < end) tile_sums(l, l->w + i / passes * 16 * l->in, packed, tiles, first, now, sums[i % 2]);
        if (i == begin) continue;
        int64_t o = (i - 1) / passes * 16, t = (i - 1) % passes * 4 / PARTS * 16, rows = 64 / PARTS;
        v16 *done = sums[(i - 1) % 2];
        for (int64_t tile = 0; tile < 4 && t + tile / PARTS * 16 < T; tile++) transpose(done + 16 * tile);
        for (int64_t j = 0; j < rows && t + j < T; j++)
            finish_row(l, done + j / 16 * PARTS * 16 + j % 16, INT8 ? scales[t + j] : 1.0f, y, goes, t + j, o);
    }
#pragma omp barrier
}
#endif

/* Whether the system lets this process use AMX (which the build must know, too). */
int use_tiles(void) {
#if TILES
    return syscall(SYS_arch_prctl, 0x1023 /* ask for */, 18 /* the tiles' contents */) == 0;
#else
    return 0;
#endif
}

/* `rounded` (a constant): x are elements instead of floats. memory: see `linear`. */
inline void multiply(const Linear *l, const void *x, int rounded, void *y, int goes, int T, float *memory, int tiles) {
#if TILES
    if (tiles && T > 2 && l->out % 16 == 0) { /* one or two rows are faster without, at the memory's speed */
        float *scales = memory + (T + 15) / 16 * 16 * l->in / 2; /* behind the rows, which take two bytes a number */
        if (INT8) row_scales(x, rounded, scales, T, l->in);
        pack_rows(x, rounded, scales, (char *)memory, T, l->in);
        tile_products(l, (char *)memory, scales, y, goes, T);
        return;
    }
#endif
#pragma omp for schedule(static)
    for (int64_t i = 0; i < T * l->in; i += 16 * WEIGHTS_DEALT) {
        float plain[16 * WEIGHTS_DEALT];
        for (int part = 0; part < WEIGHTS_DEALT; part++) store(plain + 16 * part, numbers(x, i + 16 * part, rounded));
        deal(plain, memory + i, 16 * WEIGHTS_DEALT, WEIGHTS_DEALT);
    }
    dot_products(l, memory, y, goes, T);
}

/* ---- the small operators ---- */

inline void rms_norm(const float *x, const float *gain, float *out, int64_t size, float eps) {
    v16 squares = splat(0.0f);
    for (int64_t i = 0; i < size; i += 16) squares += load(x + i) * load(x + i);
    float factor = 1.0f / sqrtf(sum(squares) / size + eps);
    for (int64_t i = 0; i < size; i += 16) store(out + i, load(x + i) * factor * load(gain + i));
}

inline void rotate(float *x, const float *cos_sin, int64_t H) { /* the pairs (i, i + H / 2) */
    for (int64_t i = 0; i < H / 2; i += 16) {
        v16 a = load(x + i), b = load(x + H / 2 + i), c = load(cos_sin + i), s = load(cos_sin + H / 2 + i);
        store(x + i, a * c - b * s);
        store(x + H / 2 + i, b * c + a * s);
    }
}

inline void norm_and_rotate(float *vector, const float *gain, const float *cos_sin, int64_t H, float eps) {
    if (gain) rms_norm(vector, gain, vector, H, eps);
    rotate(vector, cos_sin, H);
}

inline v16 silu(v16 x) { return x / (exponential(-larger(x, splat(-88.0f))) + 1.0f); } /* e^89 is no float */

inline void softmax(float *row, int64_t length, float scale) { /* of row * scale; there is room for a multiple of 16 */
    for (int64_t p = length; p % 16; p++) row[p] = -INFINITY;
    v16 tops = load(row), total = splat(0.0f);
    for (int64_t p = 16; p < length; p += 16) tops = larger(tops, load(row + p));
    float top = tops[0];
    for (int i = 1; i < 16; i++) top = tops[i] > top ? tops[i] : top;
    for (int64_t p = 0; p < length; p += 16) {
        v16 e = exponential((load(row + p) - top) * scale);
        store(row + p, e);
        total += e;
    }
    for (int64_t p = length; p % 16; p++) total[p % 16] -= row[p];
    v16 factor = splat(1.0f / sum(total));
    for (int64_t p = 0; p < length; p += 16) store(row + p, load(row + p) * factor);
}

/* out [heads, H]: the numbers i to i + 32 * parts - 1 of the values, weighted. `heads` and `parts` are constants. */
inline void weigh(const Model *m, const element *v_cache, const int32_t *table, int64_t length, const float *weights,
                  float *out, int64_t i, int heads, int parts) {
    int64_t H = m->H, stride = m->K * H, size = m->block_size, room = (length + 15) / 16 * 16;
    v16 acc[AT_ONCE][4] = {0};
    for (int64_t first = 0; first < length; first += size) {
        const element *v = v_cache + table[first / size] * size * stride + i;
        int64_t end = first + size < length ? first + size : length;
        for (int64_t p = first; p < end; p++, v += stride) {
            v16 value[4];
            for (int part = 0; part < parts; part++) split(v + 32 * part, value + 2 * part);
            for (int g = 0; g < heads; g++)
                for (int j = 0; j < 2 * parts; j++) acc[g][j] += value[j] * weights[g * room + p];
        }
    }
    for (int g = 0; g < heads; g++)
        for (int part = 0; part < parts; part++) {
            float dealt[32];
            store(dealt, acc[g][2 * part]), store(dealt + 16, acc[g][2 * part + 1]);
            undeal(dealt, out + g * H + i + 32 * part, 32, DEALT);
        }
}

/* `heads` query heads, dealt, of one kv head over a row's tokens; `heads` is a constant where this is called. Position
 * p lies in block table[p / size] at offset p % size; within a block one token follows the other. */
inline void attend(const Model *m, const float *q, const element *k_cache, const element *v_cache, const int32_t *table,
                   int64_t length, float *scores, float *out, int heads) {
    int64_t H = m->H, stride = m->K * H, size = m->block_size, room = (length + 15) / 16 * 16;
    for (int64_t first = 0; first < length; first += size) {
        const element *k = k_cache + table[first / size] * size * stride, *v = v_cache + (k - k_cache);
        int64_t end = first + size < length ? first + size : length;
        for (int64_t p = first; p < end; p++, k += stride, v += stride) {
            v16 acc[AT_ONCE] = {0};
            for (int64_t i = 0; i < H; i += 32) {
                v16 key[2];
                split(k + i, key);
                __builtin_prefetch(k + i + AHEAD_KEYS * stride);
                __builtin_prefetch(v + i);
                for (int g = 0; g < heads; g++)
                    acc[g] += load(q + g * H + i) * key[0] + load(q + g * H + i + 16) * key[1];
            }
            for (int g = 0; g < heads; g++) scores[g * room + p] = sum(acc[g]);
        }
    }
    for (int g = 0; g < heads; g++) softmax(scores + g * room, length, m->scale);
    int64_t i = 0;
    for (; i + 64 <= H; i += 64) weigh(m, v_cache, table, length, scores, out, i, heads, 2);
    if (i < H) weigh(m, v_cache, table, length, scores, out, i, heads, 1);
}

static void attend_group(const Model *m, const float *q, const element *k, const element *v, const int32_t *table,
                         int64_t length, float *scores, float *out) {
    int64_t G = m->N / m->K, H = m->H;
    if (length < 1) memset(out, 0, G * H * sizeof(float)); /* a padded row */
    else
        for (int64_t g = 0; g < G; g += AT_ONCE) {
            if (G - g == 1) attend(m, q + g * H, k, v, table, length, scores, out + g * H, 1);
            else if (G - g == 2) attend(m, q + g * H, k, v, table, length, scores, out + g * H, 2);
            else if (G - g == 3) attend(m, q + g * H, k, v, table, length, scores, out + g * H, 3);
            else attend(m, q + g * H, k, v, table, length, scores, out + g * H, AT_ONCE);
        }
}

/* ---- the step ---- */

static Work lay_out(const Model *m, int T, int64_t longest, float *memory) {
    int64_t widest = m->N * m->H > m->F ? m->N * m->H : m->F;
    widest = m->D > widest ? m->D : widest;
    Work w = {.scores_size = AT_ONCE * ((longest + 15) / 16 * 16)};
    w.x = memory;
    w.h = w.x + T * m->D;
    w.qkv = w.h + T * widest;
    w.gate_up = w.qkv + T * (m->N + 2 * m->K) * m->H;
    w.scores = w.gate_up + T * 2 * m->F;
    w.packed = w.scores + omp_get_max_threads() * w.scores_size;
    w.bytes = (w.packed + (T + 15) / 16 * 16 * widest - memory) * sizeof(float);
    return w;
}

int64_t work_bytes(const Model *m, int T, int64_t longest) { return lay_out(m, T, longest, NULL).bytes; }

/* Rotated queries (dealt) and keys, and the store: vector `head` of row t in qkv [T, N + 2 K, H]. */
static void place(const Model *m, const Layer *l, float *vector, int64_t head, int64_t position, int64_t slot,
                  element *k_cache, element *v_cache) {
    int64_t N = m->N, K = m->K, H = m->H;
    if (head < N + K)
        norm_and_rotate(vector, head < N ? l->q_norm : l->k_norm, m->cos_sin + position * H, H, m->eps);
    if (head < N) {
        float plain[H];
        memcpy(plain, vector, H * sizeof(float));
        deal(plain, vector, H, DEALT);
    } else if (slot >= 0) {
        element *to = (head < N + K ? k_cache : v_cache) + (slot * K + (head - N) % K) * H;
        for (int64_t i = 0; i < H; i += 16) put16(to + i, load(vector + i));
    }
}

static void run_layer(const Model *m, const Layer *l, const Work *w, int T, const int64_t *positions,
                      const int64_t *slots, const int32_t *tables, int64_t width, const int32_t *lengths,
                      element *k_cache, element *v_cache, int tiles) {
    int64_t D = m->D, F = m->F, N = m->N, K = m->K, H = m->H, G = N / K, heads = N + 2 * K;
#pragma omp for schedule(static)
    for (int t = 0; t < T; t++) rms_norm(w->x + t * D, l->input_norm, w->h + t * D, D, m->eps);
    multiply(&l->qkv, w->h, 0, w->qkv, SET, T, w->packed, tiles);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < T * heads; i++)
        place(m, l, w->qkv + i * H, i % heads, positions[i / heads], slots[i / heads], k_cache, v_cache);
    int64_t at_once = T < 2 * omp_get_num_threads() ? 1 : K; /* the kv heads of a row lie side by side in memory */
#pragma omp for schedule(dynamic, at_once)
    for (int64_t i = 0; i < T * K; i++) {
        int64_t t = i / K, kv = i % K;
        attend_group(m, w->qkv + (t * heads + kv * G) * H, k_cache + kv * H, v_cache + kv * H, tables + t * width,
                     lengths[t], w->scores + omp_get_thread_num() * w->scores_size, w->h + (t * N + kv * G) * H);
    }
    multiply(&l->o, w->h, 0, w->x, ADD, T, w->packed, tiles);
#pragma omp for schedule(static)
    for (int t = 0; t < T; t++) rms_norm(w->x + t * D, l->post_norm, w->h + t * D, D, m->eps);
    multiply(&l->gate_up, w->h, 0, w->gate_up, SET, T, w->packed, tiles);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < T * 4; i++) { /* four parts a row */
        const float *gate = w->gate_up + i / 4 * 2 * F, *up = gate + F;
        for (int64_t f = i % 4 * 16; f < F; f += 64)
            store(w->h + i / 4 * F + f, silu(load(gate + f)) * load(up + f));
    }
    multiply(&l->down, w->h, 0, w->x, ADD, T, w->packed, tiles);
}

/* ids, positions, slots, lengths [T] (a length counts this step's token); tables [T, width]; kv_cache [layers, 2,
 * slots, K, H], of which [slots, K, H] are half_layer elements; hidden [T, D] receives the normed hidden states. */
void decode_step(const Model *m, int T, const int64_t *ids, const int64_t *positions, const int64_t *slots,
                 const int32_t *tables, int64_t width, const int32_t *lengths, int64_t longest, element *kv_cache,
                 int64_t half_layer, element *hidden, float *memory, int tiles) {
    Work w = lay_out(m, T, longest, memory);
    int64_t D = m->D;
#pragma omp parallel
    {
#if TILES
        if (tiles) tiles_on();
#endif
#pragma omp for schedule(static)
        for (int t = 0; t < T; t++)
            for (int64_t i = 0; i < D; i += 32) {
                v16 x[2];
                float dealt[32];
                split(m->embedding + ids[t] * D + i, x);
                store(dealt, x[0]), store(dealt + 16, x[1]);
                undeal(dealt, w.x + t * D + i, 32, DEALT);
            }
        for (int64_t l = 0; l < m->num_layers; l++)
            run_layer(m, m->layers + l, &w, T, positions, slots, tables, width, lengths, kv_cache + 2 * l * half_layer,
                      kv_cache + (2 * l + 1) * half_layer, tiles);
#pragma omp for schedule(static)
        for (int t = 0; t < T; t++) {
            rms_norm(w.x + t * D, m->final_norm, w.h + t * D, D, m->eps);
            for (int64_t i = 0; i < D; i += 16) put16(hidden + t * D + i, load(w.h + t * D + i));
        }
#if TILES
        if (tiles) _tile_release();
#endif
    }
}

/* y [T, out] = x [T, in] w' + bias for few rows, as elements if `round`, else as floats. memory: a float for each input
 * of each row, the number of rows rounded up to a multiple of 16. */
void linear(const Linear *l, const element *x, void *y, int round, int T, float *memory, int tiles) {
#pragma omp parallel
    {
#if TILES
        if (tiles) tiles_on();
#endif
        multiply(l, x, 1, y, round ? ROUND : SET, T, memory, tiles);
#if TILES
        if (tiles) _tile_release();
#endif
    }
}

/* ---- the operators between products and attention, for steps with prompts ---- */

/* x [T, D] -> out [T, D], normed. With a residual it is added first, and the sum, rounded, goes to `total`. */
void add_norm(const element *x, const element *residual, element *total, const float *gain, element *out, int64_t T,
              int64_t D, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < T; t++) {
        float row[D];
        for (int64_t i = 0; i < D; i += 16) {
            v16 value = get16(x + t * D + i);
            if (residual) {
                put16(total + t * D + i, value + get16(residual + t * D + i));
                value = get16(total + t * D + i);
            }
            store(row + i, value);
        }
        rms_norm(row, gain, row, D, eps);
        for (int64_t i = 0; i < D; i += 16) put16(out + t * D + i, load(row + i));
    }
}

/* gate_up [T, 2 F] -> silu(gate) * up [T, F]. */
void silu_and_mul(const element *gate_up, element *out, int64_t T, int64_t F) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < T; t++)
        for (int64_t f = 0; f < F; f += 16) {
            const element *gate = gate_up + 2 * t * F + f;
            put16(out + t * F + f, silu(get16(gate)) * get16(gate + F));
        }
}

/* qkv [T, N + 2 K, H] -> turned queries [T, N, H]; turned keys and plain values go to their slots. */
void rotate_and_store(const element *qkv, const int64_t *positions, const int64_t *slots, const float *cos_sin,
                      const float *q_norm, const float *k_norm, element *k_cache, element *v_cache, element *queries,
                      int64_t T, int64_t N, int64_t K, int64_t H, float eps) {
    int64_t heads = N + 2 * K;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < T * heads; i++) {
        int64_t t = i / heads, head = i % heads;
        float vector[H];
        element *to = queries + (t * N + head) * H;
        if (head >= N) {
            if (slots[t] < 0) continue; /* a padded row */
            to = (head < N + K ? k_cache : v_cache) + (slots[t] * K + (head - N) % K) * H;
        }
        for (int64_t h = 0; h < H; h += 16) store(vector + h, get16(qkv + i * H + h));
        if (head < N + K) norm_and_rotate(vector, head < N ? q_norm : k_norm, cos_sin + positions[t] * H, H, eps);
        for (int64_t h = 0; h < H; h += 16) put16(to + h, load(vector + h));
    }
}
