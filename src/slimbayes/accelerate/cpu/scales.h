/* sigma = softplus(rho) + 1e-7 and its slope, without branches, so that loops over them are vectorised. */

#ifndef SLIMBAYES_SCALES_H
#define SLIMBAYES_SCALES_H

#include "random.h"

/* exp x = (1 + rest) power, with power = 2^n. */
typedef struct {
    float rest, power;
} Exponential;

/* For -87 <= x <= 0, relative error 1e-7; what is not a number stays so. */
INLINE Exponential exp_parts(float x)
{
    float n = __builtin_rintf(x * 1.44269504088896f);
    float r = x - n * 0.693145751953125f;
    r = r - n * 1.428606820309417e-06f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return (Exponential){(p * r) * r + r, power};
}

/* exp x for x <= 0; exp -87 below -87. */
INLINE float exp_of(float x)
{
    Exponential e = exp_parts(x < -87.0f ? -87.0f : x);
    return (e.rest + 1.0f) * e.power;
}

/* softplus x = max(x, 0) + log(1 + exp -|x|); log 1p e = log u + (e - (u - 1))/u for u = 1 + e, rounded. */
INLINE float softplus_of(float x)
{
    float e = exp_of(-__builtin_fabsf(x)), u = 1.0f + e;
    return (x > 0.0f ? x : 0.0f) + (log_of(u) + (e - (u - 1.0f)) / u);
}

INLINE float scale_of(float rho) { return softplus_of(rho) + 1e-7f; }

INLINE float sigmoid_of(float x)
{
    float e = exp_of(-__builtin_fabsf(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

#endif
