/* Normal numbers in registers' worth of lanes: what every kernel here makes its noise with.

   A stream of noise is named by a seed and a number; it is cut into chunks of CHUNK numbers, and each chunk is a
   function of (seed, stream, chunk) alone, so any of them can be made by any thread, or made again in a backward pass.
   Within a chunk LANES generators run side by side: SFC32 (C. Doty-Humphrey's "small fast chaotic" generator), their
   states set by Philox4x32-10 (Salmon et al. 2011) under the seed, which no two lanes share. */

#ifndef SLIMBAYES_RANDOM_H
#define SLIMBAYES_RANDOM_H

#include <stdint.h>
#include <string.h>

#define LANES 64
#define BLOCK 1024  /* numbers made at a time; they stay in the first cache */
#define CHUNK 16384 /* numbers of one state; a multiple of BLOCK */
#define WARM_UP 12  /* steps after which each bit of a state depends on all of it */

#define INLINE static inline __attribute__((always_inline))
/* One version of a function for each generation of vector registers; the loader takes the best that runs. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 6
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORISED
#endif

typedef struct {
    uint32_t a[LANES], b[LANES], c[LANES], d[LANES];
} Lanes;

INLINE void lanes_step(Lanes *restrict s, uint32_t *restrict words)
{
    for (int i = 0; i < LANES; i++) {
        uint32_t sum = s->a[i] + s->b[i] + s->d[i];
        s->d[i] += 1;
        s->a[i] = s->b[i] ^ (s->b[i] >> 9);
        s->b[i] = s->c[i] + (s->c[i] << 3);
        s->c[i] = ((s->c[i] << 21) | (s->c[i] >> 11)) + sum;
        words[i] = sum;
    }
}

/* The state at the start of a chunk. */
INLINE void lanes_start(Lanes *restrict s, uint64_t seed, uint32_t stream, uint64_t chunk)
{
    for (int i = 0; i < LANES; i++) {
        uint32_t c0 = (uint32_t)i, c1 = stream, c2 = (uint32_t)chunk, c3 = (uint32_t)(chunk >> 32);
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        for (int round = 0; round < 10; round++) {
            uint64_t p = (uint64_t)0xD2511F53u * c0, q = (uint64_t)0xCD9E8D57u * c2;
            c0 = (uint32_t)(q >> 32) ^ c1 ^ k0;
            c2 = (uint32_t)(p >> 32) ^ c3 ^ k1;
            c1 = (uint32_t)q;
            c3 = (uint32_t)p;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        s->a[i] = c0;
        s->b[i] = c1;
        s->c[i] = c2;
        s->d[i] = c3;
    }
    uint32_t unused[LANES];
    for (int k = 0; k < WARM_UP; k++)
        lanes_step(s, unused);
}

/* log x for x in (0, 1] that is not denormal: x = 2^e (1 + m) with 1 + m in [1/sqrt 2, sqrt 2), and
   log(1 + m) = m - m^2/2 + m^3 P(m); the relative error of P's minimax fit is 3e-8. */
INLINE float log_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    int32_t e = (int32_t)(bits - 0x3f3504f3u) >> 23;
    bits -= (uint32_t)e << 23;
    float m;
    memcpy(&m, &bits, 4);
    m -= 1.0f;
    float p = 8.700434527e-02f;
    p = p * m - 1.426748677e-01f;
    p = p * m + 1.491476823e-01f;
    p = p * m - 1.657758470e-01f;
    p = p * m + 1.996306378e-01f;
    p = p * m - 2.500133704e-01f;
    p = p * m + 3.333391074e-01f;
    float square = m * m;
    return (m + (m * square * p - 0.5f * square)) + 0.693147180559945f * (float)e;
}

/* sin(pi x) for x in [-1/2, 1/2], relative error 8e-9 before rounding. */
INLINE float sine_of(float x)
{
    float z = x * x;
    float p = 7.794946339e-02f;
    p = p * z - 5.984590461e-01f;
    p = p * z + 2.550109579e+00f;
    p = p * z - 5.167712311e+00f;
    p = p * z + 3.141592678e+00f;
    return x * p;
}

/* The next BLOCK standard normals, by Box and Muller (1958): sqrt(-2 log u) times the cosine and the sine of pi t, with
   u = (i + 1/2)/2^31 and t a signed 32-bit integer over 2^31. They reach 6.66 either side. */
INLINE void lanes_normals(Lanes *restrict s, float *restrict out)
{
    uint32_t words[BLOCK] __attribute__((aligned(64)));
    for (int k = 0; k < BLOCK; k += LANES)
        lanes_step(s, words + k);
    const uint32_t *lengths = words, *angles = words + BLOCK / 2;
    float *cosines = out, *sines = out + BLOCK / 2;
    for (int i = 0; i < BLOCK / 2; i++) {
        float u = ((float)(int32_t)(lengths[i] >> 1) + 0.5f) * (1.0f / 2147483648.0f);
        float radius = __builtin_sqrtf(-2.0f * log_of(u));
        float t = (float)(int32_t)angles[i] * (1.0f / 2147483648.0f);
        float turn = __builtin_fabsf(t);
        float cosine = sine_of(0.5f - turn);
        float sine = __builtin_copysignf(sine_of(0.5f - __builtin_fabsf(turn - 0.5f)), t);
        cosines[i] = radius * cosine;
        sines[i] = radius * sine;
    }
}

/* The next BLOCK uniform numbers in [0, 1), of 24 bits. */
INLINE void lanes_uniforms(Lanes *restrict s, float *restrict out)
{
    uint32_t words[BLOCK] __attribute__((aligned(64)));
    for (int k = 0; k < BLOCK; k += LANES)
        lanes_step(s, words + k);
    for (int i = 0; i < BLOCK; i++)
        out[i] = (float)(int32_t)(words[i] >> 8) * (1.0f / 16777216.0f);
}

/* The next BLOCK standard Cauchy numbers: the cotangent of pi t for t = (i + 1/2)/2^32, i a signed 32-bit integer. They
   reach 2.7e9 either side. */
INLINE void lanes_cauchys(Lanes *restrict s, float *restrict out)
{
    uint32_t words[BLOCK] __attribute__((aligned(64)));
    for (int k = 0; k < BLOCK; k += LANES)
        lanes_step(s, words + k);
    for (int i = 0; i < BLOCK; i++) {
        float t = ((float)(int32_t)words[i] + 0.5f) * (1.0f / 4294967296.0f);
        out[i] = sine_of(0.5f - __builtin_fabsf(t)) / sine_of(t);
    }
}

/* The next BLOCK signs, +1 or -1: the uppermost bit of each word. */
INLINE void lanes_signs(Lanes *restrict s, float *restrict out)
{
    uint32_t words[BLOCK] __attribute__((aligned(64)));
    for (int k = 0; k < BLOCK; k += LANES)
        lanes_step(s, words + k);
    for (int i = 0; i < BLOCK; i++)
        out[i] = (words[i] >> 31) ? 1.0f : -1.0f;
}

#endif
