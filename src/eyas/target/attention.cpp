// Attention of a few query rows over cached keys and values: what a decoding step asks of a CPU.
//
// The time it takes is that of reading keys and values once, if all rows that share them are computed while they pass:
// the heads of a group, and the tokens of a draft. Keys are taken in chunks, by their place. A chunk is the unit of work
// for a thread and of rounding, and within it every row is computed as if it were alone. So a result depends on its own
// query, keys and mask, to the last bit: not on how many rows, sequences, hidden keys and threads there are.
//
// attention.py compiles this file where it runs. Of PyTorch it includes nothing, which would take many seconds.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

// Vectors as wide as the processor's, and how two of them interleave: a0 b0 a1 b1 ..., in two halves.
#if defined(__AVX512F__)
constexpr int LANES = 16;
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
constexpr int LANES = 8;
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
constexpr int LANES = 4;
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef Floats FloatsAnywhere __attribute__((aligned(4), may_alias));
typedef Words WordsAnywhere __attribute__((aligned(2), may_alias));
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Words{__VA_ARGS__})
#endif
#if defined(__x86_64__)
#define IN_REGISTER(x) asm("" : "+v"(x))  // GCC would load it anew for every use
#else
#define IN_REGISTER(x)
#endif
#define INLINE static inline __attribute__((always_inline))

constexpr int TILE = 2 * LANES;  // keys, or elements of a value, that are computed together
constexpr int CHUNK = 256;       // keys; another number rounds differently
constexpr int ROWS = 6;          // query rows that are computed together: their sums stay in registers
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

INLINE Floats floats_at(const float* x) { return *(const FloatsAnywhere*)x; }
INLINE void store(float* x, Floats v) { *(FloatsAnywhere*)x = v; }
INLINE Words words_at(const char* x, int64_t bytes) {  // zeros after so many bytes
    if (bytes >= (int64_t)sizeof(Words)) return *(const WordsAnywhere*)x;
    Words words{};
    if (bytes > 0) std::memcpy(&words, x, bytes);
    return words;
}

// Types of elements. Keys are multiplied in steps of PER_STEP elements, by floats that hold as many of the query's.

struct Float32 {
    static constexpr int BYTES = 4, PER_STEP = 1;
    INLINE void steps(Words keys, Floats* out) { out[0] = (Floats)keys; }
    INLINE void query(const char* x, int64_t size, float* out) { std::memcpy(out, x, 4 * size); }
    INLINE Floats multiply(Floats keys, float query, Floats sum) { return sum + keys * query; }
    INLINE void values(const char* x, int64_t bytes, Floats& a, Floats& b) {
        a = (Floats)words_at(x, bytes);
        b = (Floats)words_at(x + sizeof(Words), bytes - sizeof(Words));
    }
    INLINE void sums(float* x, Floats a, Floats b) { store(x, a), store(x + LANES, b); }
    INLINE void result(char* x, float f) { std::memcpy(x, &f, 4); }
};

struct BFloat16 {
    static constexpr int BYTES = 2;
    INLINE void split(Words x, Floats& even, Floats& odd) { even = (Floats)(x << 16), odd = (Floats)(x & 0xffff0000u); }
#if defined(__AVX512BF16__)
    static constexpr int PER_STEP = 2;
    INLINE void steps(Words keys, Floats* out) { out[0] = (Floats)keys; }
    INLINE void query(const char* x, int64_t size, float* out) { std::memcpy(out, x, 2 * size); }
    INLINE Floats multiply(Floats keys, float query, Floats sum) {
        int pair;
        std::memcpy(&pair, &query, 4);
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)keys, (__m512bh)_mm512_set1_epi32(pair));
    }
#else
    static constexpr int PER_STEP = 1;
    INLINE void steps(Words keys, Floats* out) { split(keys, out[0], out[1]); }
    INLINE void query(const char* x, int64_t size, float* out) {
        for (int64_t d = 0; d < size; d++) {
            std::memset(out + d, 0, 2);
            std::memcpy((char*)(out + d) + 2, x + 2 * d, 2);
        }
    }
    INLINE Floats multiply(Floats keys, float query, Floats sum) { return sum + keys * query; }
#endif
    INLINE void values(const char* x, int64_t bytes, Floats& a, Floats& b) { split(words_at(x, bytes), a, b); }
    INLINE void sums(float* x, Floats a, Floats b) { store(x, SHUFFLE(a, b, LOW)), store(x + LANES, SHUFFLE(a, b, HIGH)); }
    INLINE void result(char* x, float f) {
        uint32_t word;
        std::memcpy(&word, &f, 4);
        const uint16_t rounded = f != f ? 0x7fc0 : (word + 0x7fff + (word >> 16 & 1)) >> 16;
        std::memcpy(x, &rounded, 2);
    }
};

struct Problem {  // as attention.py packs it; strides count elements
    const char *query, *key, *value;
    const uint8_t* mask;
    char* out;  // [batch, tokens, groups * heads, value_size]
    int64_t batch, groups, heads, tokens, length, size, value_size;  // heads: of a group
    int64_t query_batch, query_head, query_token, key_batch, key_group, key_row, value_batch, value_group, value_row;
    int64_t mask_batch, mask_token, type;
    double scale;

    // What a chunk gives to a row, in floats: its maximum and total, and from TILE on its sums, rounded up to tiles.
    int64_t part() const { return value_size + 2 * TILE; }
};

struct Item {
    int64_t batch, group, chunk;
};

template <class T>
static T* kept(std::vector<T>& memory, size_t size) {  // memory that a thread keeps from call to call
    if (memory.size() < size) memory.resize(size);
    return memory.data();
}

// exp(x) for x <= 0 to about a unit in the last place (as Cephes has it); 0 where it would be subnormal; NaN for NaN.
INLINE Floats exponential(Floats x) {
    const float large = 12582912.0f;  // to which whole numbers are added exactly, as its lowest bits
    const Floats shifted = x * 1.44269504f + large, n = shifted - large;
    const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return x < -87.0f ? Floats{} : p * (Floats)(((Words)shifted << 23) + 0x3f800000u);
}

INLINE void transpose(Words* x) {
#pragma GCC unroll 4
    for (int n = 1; n < LANES; n *= 2) {
        Words y[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = SHUFFLE(x[i], x[i + LANES / 2], LOW);
            y[2 * i + 1] = SHUFFLE(x[i], x[i + LANES / 2], HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
}

// TILE keys become [steps, TILE].
template <class T>
INLINE void transpose_keys(const char* const* keys, int64_t size, float* out) {
    constexpr int STEPS = 4 / T::BYTES / T::PER_STEP;  // of a word
    const int64_t words = size * T::BYTES / 4;
    for (int half = 0; half < TILE; half += LANES) {
        for (int64_t w = 0; w < words; w += LANES) {
            const int64_t first = std::max<int64_t>(std::min(w, words - LANES), 0);  // the last may overlap the one before
            Words x[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) x[i] = words_at(keys[half + i] + 4 * first, 4 * words);
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                if (first + i == words) break;
                Floats steps[STEPS];
                T::steps(x[i], steps);
                for (int j = 0; j < STEPS; j++) store(out + ((first + i) * STEPS + j) * TILE + half, steps[j]);
            }
        }
    }
}

template <class T, int N>
INLINE void multiply_keys(const float* keys, const float* query, int64_t steps, float* scores) {
    for (int64_t begin = 0; begin < steps; begin += 32) {  // added up in parts: long sums lose more by rounding
        const int64_t end = std::min(begin + 32, steps);
        Floats a[N] = {}, b[N] = {};
        for (int64_t d = begin; d < end; d++) {
            Floats x = floats_at(keys + d * TILE), y = floats_at(keys + d * TILE + LANES);
            IN_REGISTER(x);
            IN_REGISTER(y);
#pragma GCC unroll 8
            for (int r = 0; r < N; r++) {
                a[r] = T::multiply(x, query[r * steps + d], a[r]);
                b[r] = T::multiply(y, query[r * steps + d], b[r]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < N; r++) {
            float *left = scores + r * CHUNK, *right = left + LANES;
            store(left, begin ? floats_at(left) + a[r] : a[r]);
            store(right, begin ? floats_at(right) + b[r] : b[r]);
        }
    }
}

// Adds up the values of keys that are seen. Returns 0, or NaN where a sum is not finite.
template <class T, int N>
INLINE Floats multiply_values(const char* value, int64_t row, const int* seen, int count, const float* weights,
                              int64_t size, float* out, int64_t part) {
    Floats faults{};
    for (int64_t e = 0; e < size; e += TILE) {
        const int64_t first = std::max<int64_t>(std::min(e, size - TILE), 0);
        Floats a[N] = {}, b[N] = {}, x, y;
        for (int i = 0; i < count; i++) {
            T::values(value + seen[i] * row + first * T::BYTES, size * T::BYTES, x, y);
#pragma GCC unroll 8
            for (int r = 0; r < N; r++) {
                a[r] += x * weights[r * CHUNK + seen[i]];
                b[r] += y * weights[r * CHUNK + seen[i]];
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < N; r++) {
            T::sums(out + r * part + first, a[r], b[r]);
            faults += a[r] * 0.0f + b[r] * 0.0f;
        }
    }
    return faults;
}

// Makes scores weights: 0 where the mask is, whatever the score. Writes their maximum and total.
INLINE void weigh(float* scores, const uint8_t* mask, const int* tiles, int count, float scale, float* out) {
    Floats most = Floats{} + NOTHING, sum{};
    for (int i = 0; i < count; i++) {
        for (int k = tiles[i]; k < tiles[i] + TILE; k += LANES) {
            Bytes bytes;
            std::memcpy(&bytes, mask + k, LANES);
            const Words seen = __builtin_convertvector(bytes, Words);
            const Floats x = seen != 0 ? floats_at(scores + k) * scale : Floats{} + NOTHING;
            store(scores + k, x);
            most = x > most ? x : most;
        }
    }
    float maximum = NOTHING, total = 0;
    for (int i = 0; i < LANES; i++) maximum = std::max(maximum, most[i]);
    const float base = maximum == NOTHING ? 0.0f : maximum;
    for (int i = 0; i < count; i++) {
        for (int k = tiles[i]; k < tiles[i] + TILE; k += LANES) {
            const Floats x = exponential(floats_at(scores + k) - base);
            store(scores + k, x);
            sum += x;
        }
    }
    for (int i = 0; i < LANES; i++) total += sum[i];
    out[0] = maximum;
    out[1] = total;
}

// Calls f(number of rows as a constant, first row) for blocks of about the same number of rows.
template <class F>
INLINE void in_blocks(int64_t rows, F f) {
    for (int64_t row = 0, n; row < rows; row += n) {
        const int64_t blocks = (rows - row + ROWS - 1) / ROWS;
        n = (rows - row + blocks - 1) / blocks;
        switch (n) {
            case 1: f(std::integral_constant<int, 1>(), row); break;
            case 2: f(std::integral_constant<int, 2>(), row); break;
            case 3: f(std::integral_constant<int, 3>(), row); break;
            case 4: f(std::integral_constant<int, 4>(), row); break;
            case 5: f(std::integral_constant<int, 5>(), row); break;
            default: f(std::integral_constant<int, ROWS>(), row);
        }
    }
}

// What one chunk gives to the rows of tokens from `begin` to `end`: the heads of the first, of the next, ...
template <class T>
static void attend(const Problem& p, Item item, int64_t begin, int64_t end, float* out) {
    thread_local std::vector<float> floats;
    thread_local std::vector<uint8_t> bytes;
    const int64_t tokens = end - begin, rows = tokens * p.heads, steps = p.size / T::PER_STEP, part = p.part();
    const int64_t start = item.chunk * CHUNK, length = std::min<int64_t>(CHUNK, p.length - start);
    float* query = kept(floats, rows * (steps + CHUNK) + steps * TILE);
    float *weights = query + rows * steps, *keys = weights + rows * CHUNK;
    uint8_t *mask = kept(bytes, (tokens + 1) * CHUNK), *any = mask + tokens * CHUNK;

    std::memset(mask, 0, (tokens + 1) * CHUNK);
    for (int64_t t = 0; t < tokens; t++) {
        std::memcpy(mask + t * CHUNK, p.mask + item.batch * p.mask_batch + (begin + t) * p.mask_token + start, length);
        for (int k = 0; k < CHUNK; k++) any[k] |= mask[t * CHUNK + k];
    }
    int seen[CHUNK + 1], tiles[CHUNK / TILE], count = 0, tile_count = 0;
    for (int tile = 0; tile < CHUNK; tile += TILE) {
        const int before = count;
        for (int k = tile; k < tile + TILE; k++) seen[count] = k, count += any[k];
        if (count > before) tiles[tile_count++] = tile;
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t head = item.group * p.heads + r % p.heads, token = begin + r / p.heads;
        const int64_t at = item.batch * p.query_batch + head * p.query_head + token * p.query_token;
        T::query(p.query + at * T::BYTES, p.size, query + r * steps);
    }

    const int64_t key_row = p.key_row * T::BYTES, value_row = p.value_row * T::BYTES;
    const char* key = p.key + (item.batch * p.key_batch + item.group * p.key_group) * T::BYTES + start * key_row;
    const char* value = p.value + (item.batch * p.value_batch + item.group * p.value_group) * T::BYTES + start * value_row;
    for (int i = 0; i < tile_count; i++) {
        const char* rows_of_tile[TILE];
        for (int k = 0; k < TILE; k++) {
            const int64_t row = std::min<int64_t>(tiles[i] + k, length - 1);  // memory may end with the last
            rows_of_tile[k] = key + row * key_row;
            for (int64_t e = 0; e < p.value_size * T::BYTES; e += 64) __builtin_prefetch(value + row * value_row + e, 0, 2);
        }
        transpose_keys<T>(rows_of_tile, p.size, keys);
        in_blocks(rows, [&](auto n, int64_t r) __attribute__((always_inline)) {
            multiply_keys<T, decltype(n)::value>(keys, query + r * steps, steps, weights + r * CHUNK + tiles[i]);
        });
    }
    for (int64_t r = 0; r < rows; r++)
        weigh(weights + r * CHUNK, mask + r / p.heads * CHUNK, tiles, tile_count, (float)p.scale, out + r * part);
    Floats faults{};
    in_blocks(rows, [&](auto n, int64_t r) __attribute__((always_inline)) {
        faults += multiply_values<T, decltype(n)::value>(value, value_row, seen, count, weights + r * CHUNK,
                                                         p.value_size, out + r * part + TILE, part);
    });

    // A weight of 0 makes NaN of NaN: what one token sees may have spoilt those that do not. Then each goes by itself.
    bool finite = true;
    for (int i = 0; i < LANES; i++) finite &= faults[i] == 0;
    for (int64_t t = begin; t < end && !finite && tokens > 1; t++)
        attend<T>(p, item, t, t + 1, out + (t - begin) * p.heads * part);
}

// Adds up what the chunks gave to the rows of one group, in their order.
template <class T>
static void finish(const Problem& p, int64_t batch, int64_t group, const float* parts, int64_t chunks) {
    thread_local std::vector<float> floats;
    float* sums = kept(floats, p.value_size);
    const int64_t part = p.part(), rows = p.tokens * p.heads;
    for (int64_t r = 0; r < rows; r++) {
        float most = NOTHING, total = 0;
        for (int64_t c = 0; c < chunks; c++) most = std::max(most, parts[(c * rows + r) * part]);
        std::fill(sums, sums + p.value_size, 0.0f);
        for (int64_t c = 0; c < chunks; c++) {
            const float* x = parts + (c * rows + r) * part;
            const float weight = most == NOTHING ? 1.0f : exponential(Floats{} + (x[0] - most))[0];
            total += x[1] * weight;
            for (int64_t e = 0; e < p.value_size; e++) sums[e] += x[TILE + e] * weight;
        }
        const float factor = total == 0 ? 0.0f : 1.0f / total;  // what sees nothing is 0, as PyTorch has it
        const int64_t row = ((batch * p.tokens + r / p.heads) * p.groups + group) * p.heads + r % p.heads;
        for (int64_t e = 0; e < p.value_size; e++)
            T::result(p.out + (row * p.value_size + e) * T::BYTES, sums[e] * factor);
    }
}

template <class T>
static void attention(const Problem& p) {
    thread_local std::vector<Item> items;
    thread_local std::vector<int64_t> ends;
    thread_local std::vector<float> floats;
    items.clear();
    ends.assign(1, 0);
    for (int64_t b = 0; b < p.batch; b++) {
        const int64_t before = items.size();
        for (int64_t start = 0; start < p.length; start += CHUNK) {
            const uint8_t* mask = p.mask + b * p.mask_batch + start;
            const int64_t length = std::min<int64_t>(CHUNK, p.length - start);
            bool any = false;
            for (int64_t t = 0; t < p.tokens && !any; t++) any = std::memchr(mask + t * p.mask_token, 1, length);
            if (any) items.push_back({b, 0, start / CHUNK});
        }
        const int64_t chunks = items.size() - before;
        for (int64_t i = chunks; i < chunks * p.groups; i++)
            items.push_back({b, i / chunks, items[before + i % chunks].chunk});
        ends.push_back(items.size());
    }
    const int64_t count = items.size(), parts = p.tokens * p.heads * p.part();
    float* memory = kept(floats, count * parts);
    const Item* item = items.data();
    const int64_t* end = ends.data();
#pragma omp parallel if (count > 1)
    {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) attend<T>(p, item[i], 0, p.tokens, memory + i * parts);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p.batch * p.groups; i++) {
            const int64_t b = i / p.groups, g = i % p.groups, chunks = (end[b + 1] - end[b]) / p.groups;
            finish<T>(p, b, g, memory + (end[b] + g * chunks) * parts, chunks);
        }
    }
}

extern "C" void eyas_attention(const Problem* p) {
    if (p->type == 0) attention<Float32>(*p);
    else attention<BFloat16>(*p);
}
